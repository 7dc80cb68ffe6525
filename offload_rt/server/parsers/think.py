"""Parser of reasoning in `<think>…</think>`."""

from __future__ import annotations

from .pieces import Content, Piece, Reasoning, partial_tag

THINK, THINK_END = "<think>", "</think>"


class Think:
    """Extract reasoning sections (`<think>…</think>`) from a response. Whitespace next to reasoning is dropped.

    Args:
        inside: Whether the prompt ends with the opening tag, so that the response begins with reasoning.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self._inside = inside
        self._text = ""
        self._begun = False  # whether a piece has been returned
        self._fresh = inside  # whether only whitespace has followed the last tag; it is dropped

    def push(self, text: str) -> list[Piece]:
        self._text += text
        found: list[Piece] = []
        while True:
            tag = THINK_END if self._inside else THINK
            before, seen, after = self._text.partition(tag)
            if not seen:
                break
            blank = not self._begun and not before.strip()
            found += self._shown(before.rstrip() if self._inside or blank else before)
            self._text, self._inside, self._fresh = after, not self._inside, True
        keep = partial_tag(self._text, tag)
        body = self._text[: len(self._text) - keep]
        if self._inside or not body.strip():  # hold back whitespace, because a tag may follow
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


def ends_within_thinking(prompt: str, prefill: str = "") -> bool:
    """Return whether the response begins inside a reasoning section.

    Args:
        prompt: Rendered prompt. Some chat templates end it with the opening tag.
        prefill: Text of the assistant message that the response continues, or "".
    """
    return prompt.rstrip().endswith(THINK) or THINK in prefill.rpartition(THINK_END)[2]
