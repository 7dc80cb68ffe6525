"""Request bodies of Anthropic's Messages API, and their conversion to conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ..conversation import Conversation, call_message, text_of
from ..errors import refused
from ..openai.requests import Body, CacheSalt, Count, Texts


class Turn(Body):
    """A message. Its content is a string or a list of content blocks."""

    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class ClientTool(Body):
    """A tool that the model may call."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolUse(Body):
    """The `tool_choice` of a request."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class CountRequest(Body):
    """`POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolUse | None = None


class MessagesRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: Count
    stop_sequences: Texts | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    cache_salt: CacheSalt | None = None


def from_messages(body: CountRequest) -> Conversation:
    """Convert a request to a conversation. Raises RefusedError for unsupported content blocks."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": text_of(body.system, "system")})
    for i, turn in enumerate(body.messages):
        messages += _turn(turn, f"messages.{i}")
    return Conversation(messages, **_tools(body))


def _tools(body: CountRequest) -> dict[str, Any]:
    tools = []
    for i, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            raise refused(
                f"tools.{i}.type: {tool.type!r} is not supported: only client tools are",
                f"tools.{i}.type",
            )
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema or {}}
        tools.append({"type": "function", "function": function})
    use = body.tool_choice or ToolUse(type="auto")
    named = use.name if use.type == "tool" else None
    if use.type in ("any", "tool") and (
        not tools or (use.type == "tool" and named not in [t.name for t in body.tools or ()])
    ):
        raise refused(
            "tool_choice requires a tool, but tools does not contain it: add it to tools, or change tool_choice",
            "tool_choice",
        )
    choice = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}[use.type]
    return {"tools": tools, "choice": choice, "named": named}


def _turn(turn: Turn, where: str) -> list[dict[str, Any]]:
    """Convert a message to template messages. Each tool result becomes a separate message."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for i, block in enumerate(turn.content):
        kind, at = block.get("type"), f"{where}.content.{i}"
        if kind == "text":
            texts.append(block)
        elif kind == "tool_use" and turn.role == "assistant":
            calls.append(_call(block, at))
        elif kind == "tool_result" and turn.role == "user":
            found.append(_result(block, at))
        elif kind not in ("thinking", "redacted_thinking"):  # earlier reasoning is not part of the prompt
            raise refused(f"{at}: {kind!r} is not supported in a message of role {turn.role!r}: send text", at)
    if texts or calls or not found:
        message: dict[str, Any] = {"role": turn.role, "content": text_of(texts, where)}
        found.append(message | ({"tool_calls": calls} if calls else {}))
    return found


def _call(block: dict[str, Any], at: str) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(given, dict):
        raise refused(f"{at}: a tool_use block needs a name and an input object", at)
    return call_message(name, given, str(block.get("id", "")), at)


def _result(block: dict[str, Any], at: str) -> dict[str, Any]:
    content: Any = block.get("content")
    if not (content is None or isinstance(content, str) or _objects(content)):
        raise refused(f"{at}.content must be a string or a list of content blocks", f"{at}.content")
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text_of(content, at)}


def _objects(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(one, dict) for one in value)
