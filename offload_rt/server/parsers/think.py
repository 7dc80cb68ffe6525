"""Reasoning sections: `<think>…</think>` before or between content."""

from __future__ import annotations

from .pieces import Content, Piece, Reasoning, held

OPEN, CLOSE = "<think>", "</think>"


class Think:
    """Extract reasoning from a response. Whitespace next to reasoning is dropped.

    Args:
        inside: Whether the prompt ends with the opening tag, so that the response begins with reasoning.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self._inside = inside
        self._text = ""
        self._begun = False  # a piece has been returned
        self._fresh = inside  # only whitespace since the last tag: drop it

    def push(self, text: str) -> list[Piece]:
        self._text += text
        found: list[Piece] = []
        while True:
            mark = CLOSE if self._inside else OPEN
            before, seen, after = self._text.partition(mark)
            if not seen:
                break
            blank = not self._begun and not before.strip()
            found += self._shown(before.rstrip() if self._inside or blank else before)
            self._text, self._inside, self._fresh = after, not self._inside, True
        keep = held(self._text, (mark,))
        body = self._text[: len(self._text) - keep]
        if self._inside or not body.strip():  # keep whitespace back: a tag may follow
            body = body.rstrip()
        self._text = self._text[len(body) :]
        return found + self._shown(body)

    def finish(self) -> list[Piece]:
        text, self._text = self._text, ""
        return self._shown(text.rstrip() if self._inside else text)

    def _shown(self, text: str) -> list[Piece]:
        if self._fresh:
            text = text.lstrip()
        if not text:
            return []
        self._fresh, self._begun = False, True
        return [Reasoning(text) if self._inside else Content(text)]
