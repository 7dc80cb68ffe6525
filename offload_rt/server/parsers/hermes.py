"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: the calls of Hermes, Qwen and those who learned from them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .pieces import Content, Piece, ToolCall, call_of, held

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """Takes calls out of an answer, each when it is whole; what stands between the marks and is no call of a known tool
    stays text, marks included. White space beside calls belongs to nobody. An answer that ends within a call has made
    it if its JSON is whole."""

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self._names = names
        self._text = ""
        self._space = ""  # before the opening mark
        self._inside = False
        self._called = False  # the last thing was a call: white space behind it is not shown

    def push(self, text: str) -> list[Piece]:
        """What is certain now."""
        self._text += text
        found: list[Piece] = []
        while True:
            mark = CLOSE if self._inside else OPEN
            before, seen, behind = self._text.partition(mark)
            if not seen:
                break
            self._text = behind
            if self._inside:
                found += self._call(before, CLOSE)
            else:
                shown = before.rstrip()
                self._space = before[len(shown) :]
                found += self._shown(shown)
            self._inside = not self._inside
        return found if self._inside else found + self._certain()

    def finish(self) -> list[Piece]:
        """What was held back."""
        text, self._text = self._text, ""
        if self._inside:
            return self._call(text, "")
        return self._shown(text.rstrip() if self._called else text)

    def _certain(self) -> list[Piece]:
        """Text up to what may be a mark, and up to the white space before it."""
        body = self._text[: len(self._text) - held(self._text, (OPEN,))].rstrip()
        self._text = self._text[len(body) :]
        return self._shown(body)

    def _call(self, text: str, close: str) -> list[Piece]:
        """The call between two marks. Where that is none, what follows the last opening mark in it may be one."""
        call, (lost, seen, last) = self._read(text), text.rpartition(OPEN)
        if call is not None:
            shown = ""
        elif seen and (call := self._read(last)) is not None:
            shown = f"{self._space}{OPEN}{lost}".rstrip()
        else:
            shown = f"{self._space}{OPEN}{text}{close}"
        found = self._shown(shown)
        if call is None:
            return found
        self._called = True
        return [*found, call]

    def _read(self, text: str) -> ToolCall | None:
        try:
            return call_of(json.loads(text), self._names)
        except (ValueError, RecursionError):
            return None

    def _shown(self, text: str) -> list[Piece]:
        if self._called:
            text = text.lstrip()
        if not text:
            return []
        self._called = False
        return [Content(text)]
