"""What parsers make of an answer's text, and how they are put in a row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A whole call: `arguments` is JSON."""

    name: str
    arguments: str


Piece = Content | Reasoning | ToolCall


class Parser(Protocol):
    """Takes an answer apart as it comes. However the text is cut into pushes, the pieces, joined, are the same; no
    character is in two of them. Text that may still become a mark is held back."""

    def push(self, text: str) -> list[Piece]:
        """What is certain now."""
        ...

    def finish(self) -> list[Piece]:
        """What was held back, when no more text comes."""
        ...


class Plain:
    """All is content."""

    def push(self, text: str) -> list[Piece]:
        """The text."""
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        """Nothing is held back."""
        return []


class InRow:
    """What the first parser takes for content goes through the second."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first, self._second = first, second

    def push(self, text: str) -> list[Piece]:
        """What both are certain of."""
        return self._through(self._first.push(text))

    def finish(self) -> list[Piece]:
        """What both held back."""
        return [*self._through(self._first.finish()), *self._second.finish()]

    def _through(self, pieces: Iterable[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            found += self._second.push(piece.text) if isinstance(piece, Content) else [piece]
        return found


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces with neighbours of one kind in one."""
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
    """Characters at the end of `text` that may be the beginning of one of `marks`."""
    longest = min(len(text), max(map(len, marks)) - 1)
    ends = (n for n in range(longest, 0, -1) if any(len(mark) > n and mark.startswith(text[-n:]) for mark in marks))
    return next(ends, 0)


def call_of(value: Any, names: Sequence[str] | None) -> ToolCall | None:
    """The call that a JSON value describes, or None: a name (of `names`, if given) and arguments, or parameters."""
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
