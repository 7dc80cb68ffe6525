"""Tool calls of Hermes, Qwen and related models: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .pieces import Content, Piece, ToolCall, call_of, held

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """Extract complete tool calls from a response.

    If the text between the tags is not a call of a known tool, it remains content with its tags. Whitespace next to
    calls is dropped. A call without a closing tag at the end of the response is accepted if its JSON is complete.
    """

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self._names = names
        self._text = ""
        self._space = ""  # whitespace before the opening tag
        self._inside = False
        self._called = False  # the last piece was a call: drop the whitespace that follows

    def push(self, text: str) -> list[Piece]:
        self._text += text
        found: list[Piece] = []
        while True:
            mark = CLOSE if self._inside else OPEN
            before, seen, after = self._text.partition(mark)
            if not seen:
                break
            self._text = after
            if self._inside:
                found += self._call(before, CLOSE)
            else:
                shown = before.rstrip()
                self._space = before[len(shown) :]
                found += self._shown(shown)
            self._inside = not self._inside
        return found if self._inside else found + self._certain()

    def finish(self) -> list[Piece]:
        text, self._text = self._text, ""
        if self._inside:
            return self._call(text, "")
        return self._shown(text.rstrip() if self._called else text)

    def _certain(self) -> list[Piece]:
        """Return the text before a possible incomplete tag and the whitespace in front of it."""
        body = self._text[: len(self._text) - held(self._text, (OPEN,))].rstrip()
        self._text = self._text[len(body) :]
        return self._shown(body)

    def _call(self, text: str, close: str) -> list[Piece]:
        """Parse the text between two tags. If it is not a call, parse the text after its last opening tag."""
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
