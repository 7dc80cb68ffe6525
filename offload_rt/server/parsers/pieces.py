"""Pieces of a response: content, reasoning and tool calls; and the interface of parsers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class ToolCall:
    """A tool call. `arguments` is a JSON text. In a stream, `Arguments` pieces with the rest of it may follow."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Arguments:
    """More text of the arguments of the last tool call."""

    text: str


Piece = Content | Reasoning | ToolCall | Arguments

Tools = Mapping[str, Mapping[str, Any]]
"""The tools that a response may call: name and JSON schema of the parameters."""


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


class Pipeline:
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


class FirstCall:
    """Drop everything after the first tool call of a response."""

    def __init__(self, parser: Parser) -> None:
        self._parser, self._called = parser, False

    def push(self, text: str) -> list[Piece]:
        return self._first(self._parser.push(text))

    def finish(self) -> list[Piece]:
        return self._first(self._parser.finish())

    def _first(self, pieces: Iterable[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            if self._called and not isinstance(piece, Arguments):
                self._parser = Silent()
                break
            self._called |= isinstance(piece, ToolCall)
            found.append(piece)
        return found


class Silent:
    """Drop all text."""

    def push(self, text: str) -> list[Piece]:
        return []

    def finish(self) -> list[Piece]:
        return []


def text_of(pieces: Iterable[Piece], kind: type[Content] | type[Reasoning]) -> str:
    """Return the joined text of the pieces of one kind."""
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge adjacent content pieces, adjacent reasoning pieces, and each tool call with its arguments."""
    groups: list[tuple[Piece, list[str]]] = []
    for piece in pieces:
        text = piece.arguments if isinstance(piece, ToolCall) else piece.text
        first = groups[-1][0] if groups else None
        continues = isinstance(first, ToolCall) if isinstance(piece, Arguments) else type(piece) is type(first)
        if continues and not isinstance(piece, ToolCall):
            groups[-1][1].append(text)
        else:
            groups.append((piece, [text]))
    return [
        ToolCall(first.name, "".join(texts)) if isinstance(first, ToolCall) else type(first)("".join(texts))
        for first, texts in groups
    ]


def partial_tag(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` may be the start of `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)
