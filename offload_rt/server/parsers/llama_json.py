"""`{"name": …, "parameters": {…}}` as the whole answer: the calls of Llama 3."""

from __future__ import annotations

import json
from collections.abc import Sequence

from .pieces import Content, Piece, ToolCall, call_of

TAG = "<|python_tag|>"


class LlamaJson:
    """An answer that begins with a brace (or the tag before it) is held back to its end; it is one call or several,
    with semicolons between them, if all of it is. Any other answer is text as it comes."""

    def __init__(self, names: Sequence[str] | None = None) -> None:
        self._names = names
        self._text = ""
        self._plain = False

    def push(self, text: str) -> list[Piece]:
        """The text, once it is known to be no call."""
        if self._plain:
            return [Content(text)] if text else []
        self._text += text
        begun = self._text.lstrip()
        if not begun or begun.startswith(("{", TAG)) or TAG.startswith(begun):
            return []
        self._plain = True
        return self._all()

    def finish(self) -> list[Piece]:
        """The calls, or the text that is none."""
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
            behind = rest[end:].lstrip()
            if behind and not behind.startswith(";"):
                return None
            rest = behind[1:].lstrip()
        return found or None
