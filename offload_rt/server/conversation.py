"""Convert requests of all API protocols to conversations for a chat template, and force tool calls where required."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from ..sampling_params import StructuredOutputs
from .errors import bad_request
from .openai.requests import ChatRequest, Message, NamedTool, TokenizeRequest
from .parsers.pieces import Tools

Choice = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class Conversation:
    """A conversation in the form that chat templates accept.

    Attributes:
        choice: Whether the response may ("auto"), must not ("none") or must ("required") call a tool.
        named: Name of the tool that must be called, or None.
        parallel: Whether the response may contain several tool calls.
        template: Variables for the chat template, such as `enable_thinking`.
        continues: Whether the response continues the last message.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    choice: Choice = "auto"
    named: str | None = None
    parallel: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False

    @property
    def offered(self) -> Tools | None:
        """The tools that the response may call, with the schemas of their parameters. None if it may not call tools."""
        if not self.tools or self.choice == "none":
            return None
        tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}
        return {self.named: tools[self.named]} if self.named else tools

    @property
    def prefill(self) -> str:
        """Text of the last message if the response continues it, otherwise ""."""
        return str(self.messages[-1]["content"]) if self.continues else ""


def continues_last(messages: Sequence[Mapping[str, Any]], param: str, wanted: bool | None = None) -> bool:
    """Return whether the response continues the last message instead of starting a new one.

    Args:
        param: Request field that contains the messages. Named in errors.
        wanted: vLLM's `continue_final_message`. If None, the last message is continued if it is an assistant message.

    Raises:
        RefusedError: `wanted` is True, but the last message cannot be continued.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        if wanted:
            raise bad_request("continue_final_message requires that the last message is the assistant's", param)
        return False
    if last.get("tool_calls"):
        raise bad_request(f"{param} ends with tool calls: add a message with the result of each call", param)
    return wanted is not False


def with_answer(conversation: Sequence[Mapping[str, Any]], answer: Mapping[str, Any], *, continues: bool) -> list[Any]:
    """Return the messages with `answer` added as a new message.

    If `continues`, its text is appended to the last message instead.
    """
    if not continues:
        return [*conversation, answer]
    before = content_text(conversation[-1].get("content"), "messages")
    return [*conversation[:-1], {**answer, "content": before + (answer.get("content") or "")}]


def from_chat(body: ChatRequest) -> Conversation:
    """Return the conversation of a chat request. Raises RefusedError for content that is not text."""
    found = conversation_of(body, body.messages, body.tool_choice, parallel=body.parallel_tool_calls is not False)
    if body.add_generation_prompt is False and not found.continues:
        raise bad_request(
            "add_generation_prompt: false requires that the last message is the assistant's, which is continued. Send "
            "the whole prompt as text to /v1/completions instead",
            "add_generation_prompt",
        )
    return found


def conversation_of(
    body: ChatRequest | TokenizeRequest,
    messages: Sequence[Message],
    choice: str | NamedTool | None = None,
    *,
    parallel: bool = True,
) -> Conversation:
    """Return a conversation that has the given `messages` and the tools of `body`.

    `choice` and `parallel` are OpenAI's `tool_choice` and `parallel_tool_calls`.
    """
    functions = [tool.function.model_dump(exclude_none=True) for tool in body.tools or ()]
    named = choice.function.name if isinstance(choice, NamedTool) else None
    effort = {"reasoning_effort": body.reasoning_effort} if body.reasoning_effort else {}
    converted = [template_message(message, f"messages.{i}") for i, message in enumerate(messages)]
    return Conversation(
        converted,
        **tool_options(functions, choice, named),
        parallel=parallel,
        template=effort | (body.chat_template_kwargs or {}),
        continues=continues_last(converted, "messages", body.continue_final_message),
    )


def tool_options(functions: Sequence[Mapping[str, Any]], choice: Any, named: str | None) -> dict[str, Any]:
    """Return the fields of a `Conversation` that concern tools.

    Raises RefusedError if `choice` or `named` contradicts the tools.

    Args:
        functions: Name, description and parameters of each tool.
        named: Tool that must be called, or None. Takes precedence over `choice`.
    """
    if named is not None and named not in [function["name"] for function in functions]:
        raise bad_request(f"tool_choice names {named!r}, which is not in tools", "tool_choice")
    if not functions and choice == "required":
        raise bad_request("tool_choice requires a tool call, but tools is empty", "tool_choice")
    tools = [{"type": "function", "function": function} for function in functions]
    return {"tools": tools, "choice": "required" if named else choice or "auto", "named": named}


def template_message(message: Message, where: str) -> dict[str, Any]:
    """Convert a message for the chat template. `where` is the message's location in the request, for use in errors.

    Content becomes a string, and arguments of tool calls become objects. Fields whose value is None are removed.
    """
    found = message.model_dump(exclude_none=True)
    found["content"] = content_text(message.content, where)
    if message.tool_calls is not None:
        found["tool_calls"] = [_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(message.tool_calls)]
    return found


def content_text(content: Any, where: str) -> str:
    """Return the text of a message's content: a string as it is, text parts joined by newlines, and "" for None.

    Raises RefusedError for other content. `where` is the location of the message in the request.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise bad_request(f"{where}.content must be a string or a list of content parts", f"{where}.content")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type", "text")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise bad_request(f"{where}.content.{i}: {kind!r} is not supported: send text", f"{where}.content.{i}")
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise bad_request(f"{where}.content.{i}.text must be a string", f"{where}.content.{i}.text")
        texts.append(text)
    return "\n".join(texts)


def call_message(name: str, arguments: str | Mapping[str, Any], call_id: str, where: str) -> dict[str, Any]:
    """Return an assistant message with one tool call. `where` is its location in the request, for use in errors."""
    return _call({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}, where)


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where}.function needs a name", f"{where}.function")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = parsed_arguments(arguments)
    if not isinstance(arguments, dict):
        raise bad_request(f"{where}.function.arguments must be a JSON object", f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def parsed_arguments(text: str) -> dict[str, Any] | None:
    """Parse the JSON arguments of a tool call. Return None if they are not a JSON object.

    Missing closing characters are added, because the text may have been cut off at `max_tokens`.
    """
    try:
        found = from_json(text.encode(), allow_partial="trailing-strings", cache_strings=False)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


MAX_CALLS = 8
"""Maximum number of calls in a response that must call a tool.

Without a limit, a small model may repeat calls endlessly.
"""


def forced_call(conversation: Conversation) -> dict[str, Any]:
    """Return sampling parameters that force a tool call, or {} if no call is required."""
    if conversation.choice != "required":
        return {}
    functions = [tool["function"] for tool in conversation.tools]
    offered = [function for function in functions if function["name"] in (conversation.offered or ())]
    listed = conversation.parallel and conversation.named is None
    pointer = "#/items" if listed else "#"
    calls = [_call_schema(function, f"{pointer}/anyOf/{i}") for i, function in enumerate(offered)]
    schema: dict[str, Any] = {"anyOf": calls}
    if listed:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": MAX_CALLS}
    return {"structured_outputs": StructuredOutputs(json=schema)}


def _call_schema(function: Mapping[str, Any], pointer: str) -> dict[str, Any]:
    """Return the JSON schema for a call of `function`. It will be inserted at the JSON pointer `pointer`."""
    parameters = function.get("parameters") or {}
    known = parameters.get("type") == "object"
    arguments = _prefix_references(parameters, f"{pointer}/properties/arguments") if known else {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _prefix_references(schema: dict[str, Any], pointer: str) -> dict[str, Any]:
    """Rewrite references in `schema` so that they stay valid if it is inserted into another schema at `pointer`."""
    # References in a schema that has an `$id` are relative to that schema, so they do not change.

    def move(found: dict[str, Any]) -> dict[str, Any]:
        target = found.get("$ref")
        if not isinstance(target, str) or not target.startswith("#"):
            return found
        return found | {"$ref": pointer + target[1:]}

    if "$id" in schema:
        return schema
    try:
        moved: dict[str, Any] = json.loads(json.dumps(schema), object_hook=move)
    except RecursionError:
        raise bad_request("tools: a schema is nested too deeply", "tools") from None
    return moved


_TOOLS_PROMPT = """You may call tools. Each line describes one, with the JSON schema of its parameters:
{tools}

To call tools, respond only with a JSON list of calls: [{{"name": "NAME", "arguments": {{...}}}}]
The user then sends the results. If no tool is needed, respond with text."""


def describe_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, system: bool
) -> list[dict[str, Any]]:
    """Convert tools, tool calls and tool results to text. Used for chat templates that do not support tools.

    The tools are described in a system message, or in the first user message if `system` is False.
    """
    found: list[dict[str, Any]] = []
    names: dict[Any, str] = {}
    for message in messages:
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id"), "the tool")
            _add_message(found, {"role": "user", "content": f"Result of {name}:\n{message['content']}"})
            continue
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls") or ()}
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls:
            listed = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
            text = json.dumps(listed, ensure_ascii=False)
            plain["content"] = f"{plain['content']}\n{text}" if plain["content"] else text
        _add_message(found, plain)
    if tools:
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        _add_description(found, _TOOLS_PROMPT.format(tools="\n".join(lines)), "system" if system else "user")
    return found


def _add_message(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append a message. Consecutive user messages are joined, because chat templates expect alternating roles."""
    last = messages[-1] if messages else {}
    if message["role"] == last.get("role") == "user":
        messages[-1] = last | {"content": f"{last['content']}\n\n{message['content']}"}
    else:
        messages.append(message)


def _add_description(messages: list[dict[str, Any]], text: str, role: str) -> None:
    first = next((i for i, message in enumerate(messages) if message["role"] == role), None)
    if first is None:
        messages.insert(0, {"role": role, "content": text})
    elif role == "system":
        messages[first]["content"] = f"{messages[first]['content']}\n\n{text}"
    else:
        messages[first]["content"] = f"{text}\n\n{messages[first]['content']}"
