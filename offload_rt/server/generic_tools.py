"""Describe tools, tool calls and tool results as text, for models whose chat template does not support tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_PROMPT = """You may call tools. Each line describes one, with the JSON schema of its parameters:
{tools}

To call tools, respond only with a JSON list of calls: [{{"name": "NAME", "arguments": {{...}}}}]
The user then sends the results. If no tool is needed, respond with text."""


def describe_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, system: bool
) -> list[dict[str, Any]]:
    """Return the conversation with tools, tool calls and tool results converted to text.

    Args:
        messages: Messages of a conversation.
        tools: Tools in OpenAI's format.
        system: Whether the chat template accepts system messages. If not, the tools are described in the first user
            message.
    """
    found: list[dict[str, Any]] = []
    names: dict[Any, str] = {}
    for message in messages:
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id"), "the tool")
            _add(found, {"role": "user", "content": f"Result of {name}:\n{message['content']}"})
            continue
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls") or ()}
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls:
            listed = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
            text = json.dumps(listed, ensure_ascii=False)
            plain["content"] = f"{plain['content']}\n{text}" if plain["content"] else text
        _add(found, plain)
    if tools:
        lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        _describe(found, _PROMPT.format(tools="\n".join(lines)), "system" if system else "user")
    return found


def _add(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append a message. Join two consecutive user messages, because chat templates expect alternating roles."""
    last = messages[-1] if messages else {}
    if message["role"] == last.get("role") == "user":
        messages[-1] = last | {"content": f"{last['content']}\n\n{message['content']}"}
    else:
        messages.append(message)


def _describe(messages: list[dict[str, Any]], text: str, role: str) -> None:
    first = next((i for i, message in enumerate(messages) if message["role"] == role), None)
    if first is None:
        messages.insert(0, {"role": role, "content": text})
    elif role == "system":
        messages[first]["content"] = f"{messages[first]['content']}\n\n{text}"
    else:
        messages[first]["content"] = f"{text}\n\n{messages[first]['content']}"
