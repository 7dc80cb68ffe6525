"""Request bodies of OpenAI's Responses API, and their conversion to conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ..conversation import Conversation, call_message, refuse_prefill, text_of, tool_options
from ..errors import refused
from .requests import Body, CacheSalt, Count, FunctionSpec, JsonSchema, NamedFunction, NamedTool, ResponseFormat, Tool


class FlatTool(Body):
    """A tool of the Responses API, with the fields of its function at the top level."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FlatNamed(Body):
    """A `tool_choice` that names the tool to call."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextOptions(Body):
    format: TextFormat | None = None


class ResponsesRequest(Body):
    """`POST /v1/responses`."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamed | None = None
    text: TextOptions | None = None
    background: bool | None = None
    cache_salt: CacheSalt | None = None


def new_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the messages that a request adds. Raises RefusedError for unsupported items."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    found: list[dict[str, Any]] = []
    for i, item in enumerate(body.input):
        _add(found, item, f"input.{i}")
    return found


def from_responses(body: ResponsesRequest, messages: Sequence[Mapping[str, Any]]) -> Conversation:
    """Return the conversation of the instructions of a request and `messages`."""
    if not messages:
        raise refused("input is empty: send a string or at least one item", "input")
    refuse_prefill(messages, "input")
    head = [{"role": "system", "content": body.instructions}] if body.instructions else []
    tools, choice = [], body.tool_choice
    for i, tool in enumerate(body.tools or ()):
        if tool.type != "function" or not tool.name:
            raise refused(f"tools.{i}: only tools of type 'function' with a name are supported", f"tools.{i}")
        spec = FunctionSpec(name=tool.name, description=tool.description, parameters=tool.parameters)
        tools.append(Tool(type="function", function=spec))
    named = (
        NamedTool(type="function", function=NamedFunction(name=choice.name))
        if isinstance(choice, FlatNamed)
        else choice
    )
    return Conversation([*head, *messages], **tool_options(tools, named))


def format_of(body: ResponsesRequest) -> ResponseFormat | None:
    """Return the `response_format` of the corresponding chat request."""
    requested = body.text.format if body.text else None
    if requested is None:
        return None
    schema = (
        JsonSchema.model_validate({"name": requested.name, "schema": requested.schema_})
        if requested.type == "json_schema"
        else None
    )
    return ResponseFormat(type=requested.type, json_schema=schema)


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Append an input item. A tool call is added to the preceding assistant message."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append(_message(item, where))
    elif kind == "function_call":
        call = call_message(
            _text(item, "name", where), _text(item, "arguments", where), _text(item, "call_id", where), where
        )
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        last = messages[-1]
        messages[-1] = last | {"tool_calls": [*last.get("tool_calls", ()), call]}
    elif kind == "function_call_output":
        output = item.get("output")
        content = text_of(output if _readable(output) else "", where)
        messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": content})
    elif kind != "reasoning":  # earlier reasoning is not part of the prompt
        raise refused(f"{where}: items of type {kind!r} are not supported", where)


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not _readable(item.get("content")):
        raise refused(f"{where}.content must be a string or a list of content parts", f"{where}.content")
    return {"role": _text(item, "role", where), "content": text_of(item.get("content"), where)}


def _readable(content: Any) -> bool:
    return isinstance(content, str) or (isinstance(content, list) and all(isinstance(part, dict) for part in content))


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise refused(f"{where}.{name} must be a non-empty string", f"{where}.{name}")
    return value
