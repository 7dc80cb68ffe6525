"""Tool calls whose arguments are JSON: Llama 3, Hermes, Mistral, DeepSeek, and models without a special format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from .pieces import ToolCall
from .scanner import Scan, Scanner

T = TypeVar("T")


class LlamaJson(Scanner):
    """Parser for Llama 3's calls, `{"name": …, "parameters": {…}}`, at the beginning of the response or after a tag."""

    tags = ("<|python_tag|>",)
    untagged = True
    marks = (('"parameters"', "python_tag"), ('"parameters"', "ipython"))
    special = True

    def read_calls(self, tag: str) -> Scan[bool]:
        return (yield from self.json_calls())


class ForcedCalls(LlamaJson):
    """Parser for responses that guided decoding limits to calls. Other text belongs to a truncated call: drop it."""

    def _emit_content(self, text: str) -> None:
        pass


class FencedJson(Scanner):
    """Parser for JSON tool calls at the beginning of the response or in a code fence."""

    tags = ("```",)
    untagged = True

    def read_calls(self, tag: str) -> Scan[bool]:
        if tag:
            yield from self.accept("json", "tool_call", "tool_code")
        found = yield from self.json_calls()
        if tag and found:
            yield from self.accept(tag)
        return found


CALL, CALL_END = "<tool_call>", "</tool_call>"
FENCE, FENCE_END = "```json", "```"


class Hermes(Scanner):
    """Parser for the calls of Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

    Small models often write a JSON code fence instead of the tag. A fence before the first tag is therefore also
    treated as a call, if it contains only calls whose arguments fit the tools. All other fences are examples that
    belong to the text.
    """

    tags: tuple[str, ...] = (CALL, FENCE)
    marks = ((CALL,),)

    def read_calls(self, tag: str) -> Scan[bool]:
        if tag == FENCE:
            return (yield from self._fenced_calls())
        self.tags = (CALL,)
        found = yield from self.json_calls()
        if found:
            yield from self.accept(CALL_END)
        return found

    def _fenced_calls(self) -> Scan[bool]:
        calls: list[ToolCall] = []
        while (yield from self.peek()) == "{":
            start = self._at
            yield from self.accept("{")
            # JSON whose first key is a different one is not a call, so it can be returned as content immediately.
            if (yield from self.read_string()) not in ("name", "arguments", "parameters"):
                return False
            self._at = start
            call = yield from self.read_call()
            if call is None or not fits_schema(json.loads(call.arguments), self.tools[call.name]):
                return False
            calls.append(call)
        if not calls or ((yield from self.peek()) and not (yield from self.accept(FENCE_END))):
            return False
        for call in calls:
            self.emit_call(call.name, call.arguments)
        return True


class Mistral(Scanner):
    """Parser for Mistral's calls.

    Older models write `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`. Newer ones write `[TOOL_CALLS]NAME[ARGS]{…}`
    for each call.
    """

    tags = ("[TOOL_CALLS]",)
    marks = (tags,)
    special = True

    def read_calls(self, tag: str) -> Scan[bool]:
        if (yield from self.json_calls()):
            return True
        name = yield from self.read_word()
        if (yield from self.accept("[CALL_ID]")):
            yield from self.read_word()
        yield from self.accept("[ARGS]")
        if name not in self.tools or (yield from self.peek()) != "{":
            return False
        yield from self.stream_call(name)
        return True


class DeepSeek(Scanner):
    """Parser for calls of DeepSeek V3, R1 and V3.1: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`.

    V3 and R1 write `function<｜tool▁sep｜>NAME`, and put the arguments in a code fence.
    """

    CALLS, CALL = tags = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    marks = ((CALLS,),)
    special = True

    def read_calls(self, tag: str) -> Scan[bool]:
        if tag == self.CALLS and not (yield from self.accept(self.CALL)):
            return False
        if not (yield from self._call()):
            return False
        while (yield from self.accept(self.CALL)) and (yield from self._call()):
            pass
        yield from self.accept("<｜tool▁calls▁end｜>")
        return True

    def _call(self) -> Scan[bool]:
        name = yield from self.read_word()
        if not (yield from self.accept("<｜tool▁sep｜>")):
            return False
        if name == "function" and (yield from self.peek()) != "{":
            name = yield from self.read_word()
        fenced = yield from self.accept("```json")
        if name not in self.tools or (yield from self.peek()) != "{":
            return False
        yield from self.stream_call(name)
        if fenced:
            yield from self.accept("```")
        yield from self.accept("<｜tool▁call▁end｜>")
        return True


_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),),
    "integer": (int,), "number": (int, float),
}  # fmt: skip


def fits_schema(value: Any, schema: Any) -> bool:
    """Return whether a JSON value fits a schema. Only types, property names, `required` and `enum` are checked.

    If a schema has properties but no `additionalProperties`, a value with unknown properties does not fit, unlike in
    JSON schema: such properties show that no call was intended. Invalid entries of a schema are ignored.
    """
    if not isinstance(schema, Mapping):
        return True
    if (allowed := _entry(schema, "enum", list)) and value not in allowed:
        return False
    if not _has_type(value, schema.get("type")):
        return False
    if isinstance(value, list):
        return all(fits_schema(item, schema.get("items")) for item in value)
    if not isinstance(value, dict):
        return True
    properties = _entry(schema, "properties", dict)
    closed = bool(properties) and not schema.get("additionalProperties")
    return all(name in value for name in _entry(schema, "required", list)) and all(
        fits_schema(item, properties[name]) if name in properties else not closed for name, item in value.items()
    )


def _entry(schema: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return an entry of a schema that a client sent. If it is missing or has the wrong type, return an empty one."""
    entry = schema.get(name)
    return entry if isinstance(entry, kind) else kind()


def _has_type(value: Any, names: Any) -> bool:
    for name in names if isinstance(names, list) else [names]:
        if not isinstance(name, str) or name not in _TYPES:
            return True
        # In Python, bool is a subclass of int.
        if isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool)):
            return True
    return False
