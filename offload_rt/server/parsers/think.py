"""`<think>…</think>`: thinking before (or between) what is for the reader."""

from __future__ import annotations

from .pieces import Content, Piece, Reasoning, held

OPEN, CLOSE = "<think>", "</think>"


class Think:
    """Takes thinking out of an answer. inside: the prompt ends with the opening mark, as some templates have it; then
    the answer begins with thinking. White space beside thinking belongs to nobody."""

    def __init__(self, *, inside: bool = False) -> None:
        self._inside = inside
        self._text = ""
        self._begun = False  # something of the answer has been shown
        self._fresh = inside  # nothing but white space since the last mark: it is not shown

    def push(self, text: str) -> list[Piece]:
        """What is certain now."""
        self._text += text
        found: list[Piece] = []
        while True:
            mark = CLOSE if self._inside else OPEN
            before, seen, behind = self._text.partition(mark)
            if not seen:
                break
            blank = not self._begun and not before.strip()
            found += self._shown(before.rstrip() if self._inside or blank else before)
            self._text, self._inside, self._fresh = behind, not self._inside, True
        keep = held(self._text, (mark,))
        body = self._text[: len(self._text) - keep]
        if self._inside or not body.strip():  # white space before a mark may not be shown: it waits for what follows
            body = body.rstrip()
        self._text = self._text[len(body) :]
        return found + self._shown(body)

    def finish(self) -> list[Piece]:
        """What was held back."""
        text, self._text = self._text, ""
        return self._shown(text.rstrip() if self._inside else text)

    def _shown(self, text: str) -> list[Piece]:
        if self._fresh:
            text = text.lstrip()
        if not text:
            return []
        self._fresh, self._begun = False, True
        return [Reasoning(text) if self._inside else Content(text)]
