"""Pieces of a response (content, reasoning, tool calls), and the interface of the parsers that produce them."""

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
    """A tool call or the beginning of one. `arguments` is JSON text that later `Arguments` pieces continue."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Arguments:
    """JSON text that continues the arguments of the preceding tool call."""

    text: str


Piece = Content | Reasoning | ToolCall | Arguments

Tools = Mapping[str, Mapping[str, Any]]
"""The tools that a response may call, as a mapping from names to the JSON schemas of their parameters."""


class Parser(Protocol):
    """Interface for parsers that split the text of a streamed response into pieces.

    Text that may be the beginning of a tag is held back until more text arrives. The joined pieces do not depend on how
    the text is divided among `push` calls.
    """

    def push(self, text: str) -> list[Piece]:
        """Add text of the response. Return the pieces that are now complete."""
        ...

    def finish(self) -> list[Piece]:
        """End the response. Return the text that was held back."""
        ...


class Plain:
    def push(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class Pipeline:
    """Parser that chains two parsers: the content pieces of the first one are parsed by the second one."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first, self._second = first, second

    def push(self, text: str) -> list[Piece]:
        return self._parse_content(self._first.push(text))

    def finish(self) -> list[Piece]:
        return [*self._parse_content(self._first.finish()), *self._second.finish()]

    def _parse_content(self, pieces: Iterable[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            found += self._second.push(piece.text) if isinstance(piece, Content) else [piece]
        return found


class FirstCall:
    """Parser that drops everything after the first tool call of a response."""

    def __init__(self, parser: Parser) -> None:
        self._parser, self._called, self._ended = parser, False, False

    def push(self, text: str) -> list[Piece]:
        return [] if self._ended else self._until_second(self._parser.push(text))

    def finish(self) -> list[Piece]:
        return [] if self._ended else self._until_second(self._parser.finish())

    def _until_second(self, pieces: Iterable[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            if self._called and not isinstance(piece, Arguments):
                self._ended = True
                break
            self._called |= isinstance(piece, ToolCall)
            found.append(piece)
        return found


def text_of(pieces: Iterable[Piece], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge adjacent pieces of the same kind, and merge each `ToolCall` with the `Arguments` that follow it."""
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
