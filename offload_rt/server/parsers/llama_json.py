"""Tool calls of Llama 3: the whole response is `{"name": …, "parameters": {…}}`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .pieces import Content, Piece, ToolCall, call_of

TAG = "<|python_tag|>"


class LlamaJson:
    """Parse a response that consists of tool calls only, separated by semicolons.

    A response that begins with `{` or `TAG` is buffered until it is complete. If any part of it is not a call, the
    whole response is content. Any other response is streamed as content.
    """

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self._names = names
        self._text = ""
        self._plain = False

    def push(self, text: str) -> list[Piece]:
        if self._plain:
            return [Content(text)] if text else []
        self._text += text
        begun = self._text.lstrip()
        if not begun or begun.startswith(("{", TAG)) or TAG.startswith(begun):
            return []
        self._plain = True
        return self._all()

    def finish(self) -> list[Piece]:
        calls = self._calls()
        if calls is None:
            return self._all()
        self._text = ""
        return list(calls)

    def _all(self) -> list[Piece]:
        text, self._text = self._text, ""
        return [Content(text)] if text else []

    def _calls(self) -> list[ToolCall] | None:
        rest, found = self._text.strip().removeprefix(TAG).lstrip(), []
        while rest:
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):
                return None
            call = call_of(value, self._names)
            if call is None:
                return None
            found.append(call)
            remaining = rest[end:].lstrip()
            if remaining and not remaining.startswith(";"):
                return None
            rest = remaining[1:].lstrip()
        return found or None
