"""Tool calls in XML: Qwen3-Coder and GLM. Each parameter is one element."""

from __future__ import annotations

import json
from typing import Any

from .json_calls import CALL, CALL_END
from .scanner import WHITESPACE, Scan, Scanner


class XmlCalls(Scanner):
    """Base class for parsers that convert XML parameters to JSON.

    Only string values are streamed while they are incomplete.
    """

    _count = 0
    """Number of parameters read so far in the current call."""

    def begin(self, name: str) -> None:
        self._count = 0
        self.emit_call(name, "{")

    def parameter(self, tool: str, name: str, end: str, *, strip: bool) -> Scan[None]:
        """Read a parameter up to the tag `end`. If `strip` is True, drop one newline on each side of the value."""
        self.emit_arguments((", " if self._count else "") + json.dumps(name, ensure_ascii=False) + ": ")
        self._count += 1
        if strip and (len(self._text) > self._at or (yield from self.more())) and self._text[self._at] == "\n":
            self._at += 1
        properties = self.tools[tool].get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        kind = schema.get("type") if isinstance(schema, dict) else None
        if kind == "string":
            self.emit_arguments('"')
            _, rest = yield from self.stream_until(self._emit_string, end, trailing="\n" * strip)
            self._emit_string(rest[strip:])
            self.emit_arguments('"')
        else:
            text, _ = yield from self.read_until(end)
            self.emit_arguments(_value(text, kind))

    def _emit_string(self, text: str) -> None:
        self.emit_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def end(self) -> None:
        self.emit_arguments("}")


class QwenCoder(XmlCalls):
    """Parser for Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`."""

    tags = (CALL, "<function=")
    marks = (("<function=", "<parameter="),)

    def read_calls(self, tag: str) -> Scan[bool]:
        if tag == CALL and not (yield from self.accept("<function=")):
            return False
        name, closed = yield from self.read_until(">", "<", "\n")
        if name not in self.tools or closed != ">":
            return False
        self.begin(name)
        while (yield from self.accept("<parameter=")):
            key, _ = yield from self.read_until(">")
            yield from self.parameter(name, key, "</parameter>", strip=True)
        self.end()
        yield from self.accept("</function>")
        yield from self.accept(CALL_END)
        return True


class Glm(XmlCalls):
    """Parser for GLM: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>`."""

    tags = (CALL,)
    marks = (("<arg_key>",),)

    def read_calls(self, tag: str) -> Scan[bool]:
        name = yield from self.read_word()
        begun = yield from self.accept("<arg_key>", CALL_END)
        if name not in self.tools or not begun:
            return False
        self.begin(name)
        while begun == "<arg_key>":
            key, _ = yield from self.read_until("</arg_key>")
            yield from self.accept("<arg_value>")
            yield from self.parameter(name, key, "</arg_value>", strip=False)
            begun = yield from self.accept("<arg_key>", CALL_END)
        self.end()
        return True


def _value(text: str, kind: Any) -> str:
    text = text.strip(WHITESPACE)
    named = {"True": "true", "False": "false", "None": "null"}
    try:
        return json.dumps(json.loads(named.get(text, text)), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
