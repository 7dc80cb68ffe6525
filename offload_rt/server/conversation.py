"""Conversations as input of chat templates, their conversion from requests, and required tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..sampling_params import StructuredOutputs
from .errors import refused
from .openai.requests import ChatRequest, Message, NamedTool, TokenizeRequest

Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class Conversation:
    """Input of a chat template.

    Attributes:
        messages: Messages with `role` and `content` (a string).
        tools: Tools in OpenAI's format.
        choice: Whether the response may, must not or must call a tool.
        named: Name of the tool that must be called.
        template: Additional variables of the chat template, such as `enable_thinking`.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    choice: Choice = "auto"
    named: str | None = None
    template: Mapping[str, Any] = field(default_factory=dict)

    @property
    def offered(self) -> list[str] | None:
        """Names of the tools that the response may call, or None if it may call none."""
        if not self.tools or self.choice == "none":
            return None
        return [self.named] if self.named else [tool["function"]["name"] for tool in self.tools]


def refuse_prefill(messages: Sequence[Mapping[str, Any]], param: str) -> None:
    """Raise RefusedError if a conversation ends with an assistant message, which clients send to have it continued."""
    # A chat template would close that message and begin a new one.
    if messages and messages[-1].get("role") == "assistant":
        raise refused(
            f"{param} ends with an assistant message, and this server cannot continue a message: remove it, add "
            "a user or tool message after it, or send the whole prompt as text to /v1/completions",
            param,
        )


def from_chat(body: ChatRequest) -> Conversation:
    """Convert a chat request. Raises RefusedError for content that is not text and for a final assistant message."""
    refuse_prefill([{"role": message.role} for message in body.messages[-1:]], "messages")
    if body.add_generation_prompt is False:
        raise refused(
            "add_generation_prompt must be true: without a generation prompt the model would continue the last "
            "message. Send the whole prompt as text to /v1/completions instead",
            "add_generation_prompt",
        )
    return conversation_of(body, body.messages, body.tool_choice)


def conversation_of(
    body: ChatRequest | TokenizeRequest, messages: Sequence[Message], choice: str | NamedTool | None = None
) -> Conversation:
    """Convert messages and tools in the format of chat requests."""
    if body.continue_final_message:
        raise refused("continue_final_message: this server cannot continue a message", "continue_final_message")
    functions = [tool.function.model_dump(exclude_none=True) for tool in body.tools or ()]
    named = choice.function.name if isinstance(choice, NamedTool) else None
    return Conversation(
        [template_message(message, f"messages.{i}") for i, message in enumerate(messages)],
        **tool_options(functions, choice, named),
        template=body.chat_template_kwargs or {},
    )


def tool_options(functions: Sequence[Mapping[str, Any]], choice: Any, named: str | None) -> dict[str, Any]:
    """Return the fields of a `Conversation` for tools.

    Args:
        functions: Name, description and parameters of each tool.
        choice: "auto", "none" or "required". None is "auto".
        named: Name of the tool that must be called, whatever `choice` is.
    """
    if named is not None and named not in [function["name"] for function in functions]:
        raise refused(f"tool_choice names {named!r}, which is not in tools", "tool_choice")
    if not functions and choice == "required":
        raise refused("tool_choice requires a tool call, but tools is empty", "tool_choice")
    tools = [{"type": "function", "function": function} for function in functions]
    return {"tools": tools, "choice": "required" if named else choice or "auto", "named": named}


def template_message(message: Message, where: str) -> dict[str, Any]:
    """Convert a message: content to a string, arguments of tool calls to objects. Fields that are None are removed."""
    found = message.model_dump(exclude_none=True)
    found["content"] = content_text(message.content, where)
    if message.tool_calls is not None:
        found["tool_calls"] = [_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(message.tool_calls)]
    return found


def content_text(content: Any, where: str) -> str:
    """Return the text of a message content: None, a string, or parts, which are joined by newlines.

    Raises RefusedError for other content.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise refused(f"{where}.content must be a string or a list of content parts", f"{where}.content")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type", "text")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise refused(f"{where}.content.{i}: {kind!r} is not supported: send text", f"{where}.content.{i}")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise refused(f"{where}.content.{i}.text must be a string", f"{where}.content.{i}.text")
        texts.append(text)
    return "\n".join(texts)


def call_message(name: str, arguments: str | Mapping[str, Any], call_id: str, where: str) -> dict[str, Any]:
    """Return a tool call of an earlier response in the form that assistant messages contain."""
    return _call({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}, where)


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refused(f"{where}.function needs a name", f"{where}.function")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise refused(f"{where}.function.arguments must be JSON", f"{where}.function.arguments") from None
    if not isinstance(arguments, dict):
        raise refused(f"{where}.function.arguments must be an object", f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def forced_call(conversation: Conversation) -> dict[str, Any]:
    """Return the `structured_outputs` field of `SamplingParams` that forces a tool call, or no field."""
    if conversation.choice != "required":
        return {}
    functions = [tool["function"] for tool in conversation.tools]
    offered = [function for function in functions if function["name"] in (conversation.offered or ())]
    if len(offered) == 1:
        return {"structured_outputs": StructuredOutputs(json=_call_schema(offered[0], "#"))}
    calls = [_call_schema(function, f"#/anyOf/{i}") for i, function in enumerate(offered)]
    return {"structured_outputs": StructuredOutputs(json={"anyOf": calls})}


def _call_schema(function: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the schema of a call of `function`. `place`: JSON pointer of the schema."""
    parameters = function.get("parameters") or {}
    known = parameters.get("type") == "object"
    arguments = _moved(parameters, f"{place}/properties/arguments") if known else {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Adjust the references of a schema (`#/$defs/...`) for its new position `place` in another schema."""
    # References in a schema with `$id` are relative to that schema, wherever it is.

    def move(found: dict[str, Any]) -> dict[str, Any]:
        target = found.get("$ref")
        if not isinstance(target, str) or not target.startswith("#"):
            return found
        return found | {"$ref": place + target[1:]}

    if "$id" in schema:
        return schema
    try:
        moved: dict[str, Any] = json.loads(json.dumps(schema), object_hook=move)
    except RecursionError:
        raise refused("tools: a schema is nested too deeply", "tools") from None
    return moved
