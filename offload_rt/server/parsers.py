"""Streaming parsers for reasoning and tool calls, and their selection by model and request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from .options import ReasoningParser, ToolParser

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
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


def text_of(pieces: Iterable[Piece], kind: type[Content] | type[Reasoning]) -> str:
    """Return the joined text of the pieces of one kind."""
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


def joined(pieces: Iterable[Any]) -> list[Piece]:
    """Merge adjacent content pieces and adjacent reasoning pieces."""
    found: list[Piece] = []
    for kind, alike in groupby(pieces, type):
        group = list(alike)
        found += group if kind is ToolCall else [kind("".join(piece.text for piece in group))]
    return found


def _partial_tag(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` may be the start of `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)


def _tool_call(value: Any, names: Sequence[str] | None) -> ToolCall | None:
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


class Think:
    """Extract reasoning sections (`<think>…</think>`) from a response. Whitespace next to reasoning is dropped.

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
            tag = THINK_END if self._inside else THINK
            before, seen, after = self._text.partition(tag)
            if not seen:
                break
            blank = not self._begun and not before.strip()
            found += self._shown(before.rstrip() if self._inside or blank else before)
            self._text, self._inside, self._fresh = after, not self._inside, True
        keep = _partial_tag(self._text, tag)
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


class Hermes:
    """Extract tool calls of Hermes, Qwen and others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

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
            tag = CALL_END if self._inside else CALL
            before, seen, after = self._text.partition(tag)
            if not seen:
                break
            self._text = after
            if self._inside:
                found += self._call(before, CALL_END)
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
        body = self._text[: len(self._text) - _partial_tag(self._text, CALL)].rstrip()
        self._text = self._text[len(body) :]
        return self._shown(body)

    def _call(self, text: str, close: str) -> list[Piece]:
        """Parse the text between two tags. If it is not a call, parse the text after its last opening tag."""
        call, (lost, seen, last) = self._read(text), text.rpartition(CALL)
        if call is not None:
            shown = ""
        elif seen and (call := self._read(last)) is not None:
            shown = f"{self._space}{CALL}{lost}".rstrip()
        else:
            shown = f"{self._space}{CALL}{text}{close}"
        found = self._shown(shown)
        if call is None:
            return found
        self._called = True
        return [*found, call]

    def _read(self, text: str) -> ToolCall | None:
        try:
            return _tool_call(json.loads(text), self._names)
        except (ValueError, RecursionError):
            return None

    def _shown(self, text: str) -> list[Piece]:
        if self._called:
            text = text.lstrip()
        if not text:
            return []
        self._called = False
        return [Content(text)]


class LlamaJson:
    """Parse tool calls of Llama 3: the whole response is `{"name": …, "parameters": {…}}`, separated by semicolons.

    A response that begins with `{` or `LLAMA_TAG` is buffered until it is complete. If any part of it is not a call,
    the whole response is content. Any other response is streamed as content.
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
        if not begun or begun.startswith(("{", LLAMA_TAG)) or LLAMA_TAG.startswith(begun):
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
        rest, found = self._text.strip().removeprefix(LLAMA_TAG).lstrip(), []
        while rest:
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):
                return None
            call = _tool_call(value, self._names)
            if call is None:
                return None
            found.append(call)
            remaining = rest[end:].lstrip()
            if remaining and not remaining.startswith(";"):
                return None
            rest = remaining[1:].lstrip()
        return found or None


def tool_parser(configured: ToolParser, template: str) -> ToolParser:
    """Return the configured tool parser. "auto" chooses one by the tags in the chat template."""
    if configured != "auto":
        return configured
    if CALL in template:
        return "hermes"
    llama = '"parameters"' in template and ("python_tag" in template or "ipython" in template)
    return "llama3_json" if llama else "none"


def reasoning_parser(configured: ReasoningParser, template: str) -> ReasoningParser:
    """Return the configured reasoning parser. "auto" chooses one by the tags in the chat template."""
    if configured != "auto":
        return configured
    return "think" if THINK_END in template else "none"


def answer_parser(
    tools: ToolParser, reasoning: ReasoningParser, names: Sequence[str] | None, *, thinking: bool = False
) -> Parser:
    """Return a parser that extracts reasoning first and tool calls from the remaining text.

    Args:
        tools: Format of tool calls.
        reasoning: Format of reasoning.
        names: Names of the tools that may be called. None disables tool calls.
        thinking: Whether the prompt ends inside a reasoning section.
    """
    parser: Parser = Plain()
    if names is not None and tools != "none":
        parser = Hermes(names) if tools == "hermes" else LlamaJson(names)
    return Pipeline(Think(inside=thinking), parser) if reasoning == "think" else parser


def ends_within_thinking(prompt: str) -> bool:
    """Return whether a rendered prompt ends with an opening reasoning tag, as some templates do."""
    return prompt.rstrip().endswith(THINK)
