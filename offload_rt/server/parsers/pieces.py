"""Parsed parts of a response, the parser interface, and helpers shared by the parsers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Content:
    """Text shown to the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of a reasoning section."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A complete tool call. `arguments` is a JSON text."""

    name: str
    arguments: str


Piece = Content | Reasoning | ToolCall


class Parser(Protocol):
    """Split a streamed response into pieces.

    The joined pieces do not depend on how the text is split into `push` calls. Text that may be the start of a tag is
    buffered until more text arrives.
    """

    def push(self, text: str) -> list[Piece]:
        """Add text and return the pieces that are complete."""
        ...

    def finish(self) -> list[Piece]:
        """Return the buffered rest at the end of the response."""
        ...


class Plain:
    """Return all text as content."""

    def push(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class InRow:
    """Pass the content pieces of the first parser to the second parser."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first, self._second = first, second

    def push(self, text: str) -> list[Piece]:
        return self._through(self._first.push(text))

    def finish(self) -> list[Piece]:
        return [*self._through(self._first.finish()), *self._second.finish()]

    def _through(self, pieces: Iterable[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            found += self._second.push(piece.text) if isinstance(piece, Content) else [piece]
        return found


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge adjacent content pieces and adjacent reasoning pieces."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + piece.text)
        else:
            found.append(piece)
    return found


def held(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the start of one of `marks`."""
    longest = min(len(text), max(map(len, marks)) - 1)
    ends = (n for n in range(longest, 0, -1) if any(len(mark) > n and mark.startswith(text[-n:]) for mark in marks))
    return next(ends, 0)


def call_of(value: Any, names: Sequence[str] | None) -> ToolCall | None:
    """Return the tool call described by a JSON value, or None if it is not a call of a tool in `names`."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict) or (names is not None and value["name"] not in names):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
