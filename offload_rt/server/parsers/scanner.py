"""Base class for tool parsers. A generator reads the text of a response and yields when it needs more text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any, ClassVar, TypeVar

from ...utils.prefixes import partial_end
from .pieces import Arguments, Content, Piece, ToolCall, Tools

T = TypeVar("T")
Scan = Generator[None, None, T]
"""Return type of the reading methods: generators that yield when they need more text, and finally return a T."""

WHITESPACE = " \t\n\r\f\v"

_WORD = re.compile(r"[\w.-]*")
_IN_STRING = re.compile(r'(?:[^"\\]+|\\.)*', re.DOTALL)
_CLOSING = {"{": "}", "[": "]", "(": ")"}


class Brackets:
    """Finds the closing bracket of a text that begins with a bracket and arrives in parts.

    Brackets inside strings are ignored. `quotes` contains the characters that delimit strings. `done` is set after the
    closing bracket, and `failed` is set if brackets do not match.
    """

    def __init__(self, quotes: str = '"') -> None:
        self._outside = re.compile(rf"[\[\](){{}}<{quotes}]")
        self._quotes, self._quote = quotes, ""
        self._open: list[str] = []
        self._escaped = False
        self.done = self.failed = False

    def feed(self, text: str) -> int:
        """Read more text. Return how many of its characters belong to the text that ends with the closing bracket."""
        at = 0
        while at < len(text) and not (self.done or self.failed):
            if self._escaped:
                self._escaped, at = False, at + 1
            elif self._quote:
                end = re.compile(rf"[\\{self._quote}]").search(text, at)
                if end is None:
                    return len(text)
                self._escaped, at = end[0] == "\\", end.end()
                self._quote = self._quote if self._escaped else ""
            else:
                found = self._outside.search(text, at)
                if found is None:
                    return len(text)
                at = found.end() if self._process(found[0]) else found.start()
        return at

    def _process(self, character: str) -> bool:
        if character in self._quotes:
            self._quote = character
        elif character in _CLOSING:
            self._open.append(_CLOSING[character])
        elif self._open and self._open[-1] == character:
            self._open.pop()
            self.done = not self._open
        else:  # a bracket that does not match, or "<", which begins a tag
            self.failed = True
        return not self.failed


class Scanner:
    """Base class for tool parsers. Subclasses implement `read_calls` with the reading methods of this class.

    The reading methods wait until they have enough text, so the pieces do not depend on how the text is divided. A call
    is emitted together with the start of its arguments, and the rest of the arguments is streamed. All other text is
    content. Whitespace next to calls is dropped.
    """

    tags: tuple[str, ...] = ()
    """Tags that can come before a call."""
    untagged: ClassVar[bool] = False
    """Whether a response may begin with calls that have no tag before them."""
    marks: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """A chat template uses this format if it contains all texts of one of these tuples."""
    special: ClassVar[bool] = False
    """Whether the tags are special tokens. By default, the detokenizer removes special tokens."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self._text, self._at, self._ended = "", 0, False
        self._mark = 0  # position of the last opening tag
        self._space = ""  # whitespace before this tag
        self._called = False  # whether the last piece was a call, after which whitespace is dropped
        self._found: list[Piece] = []
        self._running = self.parse()

    def parse(self) -> Scan[None]:
        if self.untagged and not (yield from self.read_calls("")):
            self._at = 0
        while tag := (yield from self.content_until(*self.tags)):
            if not (yield from self.read_calls(tag)):
                self._emit_content(self._space + tag)
                self._at = self._mark

    def read_calls(self, tag: str) -> Scan[bool]:
        """Read and emit the calls after `tag`. At the beginning of the response, `tag` is "".

        If the text is not a call of an offered tool, return False. The tag and the text then become content.
        """
        raise NotImplementedError

    def push(self, text: str) -> list[Piece]:
        self._text += text
        return self._resume()

    def finish(self) -> list[Piece]:
        self._ended = True
        return self._resume()

    def _resume(self) -> list[Piece]:
        next(self._running, None)
        found, self._found = self._found, []
        return found

    # ------------------------------------------------------------------------------------------------------- reading

    def more(self) -> Scan[bool]:
        """Wait for more text. Return False if the response has ended."""
        size = len(self._text)
        while len(self._text) == size and not self._ended:
            yield
        return len(self._text) > size

    def peek(self) -> Scan[str]:
        """Skip whitespace and return the next character, or "" at the end of the response."""
        while True:
            rest = self._text[self._at :].lstrip(WHITESPACE)
            if rest:
                self._at = len(self._text) - len(rest)
                return rest[0]
            self._at = len(self._text)
            if not (yield from self.more()):
                return ""

    def accept(self, *tags: str) -> Scan[str]:
        """Skip whitespace and one of `tags`. Return this tag, or "" if none of them follows.

        No tag may be a prefix of another one.
        """
        yield from self.peek()
        longest = max(map(len, tags))
        while True:
            rest = self._text[self._at : self._at + longest]
            for tag in tags:
                if rest.startswith(tag):
                    self._at += len(tag)
                    return tag
            if not any(tag.startswith(rest) for tag in tags) or not (yield from self.more()):
                return ""

    def read_word(self) -> Scan[str]:
        """Skip whitespace, then read and return the letters, digits and `_.-` that follow."""
        yield from self.peek()
        start, end = self._at, self._at
        while True:
            found = _WORD.match(self._text, end)
            assert found is not None
            end = found.end()
            if end < len(self._text) or not (yield from self.more()):
                self._at = end
                return self._text[start:end]

    def read_string(self) -> Scan[str | None]:
        """Skip whitespace, then read and return a JSON string. Return None if anything else follows."""
        if (yield from self.peek()) != '"':
            return None
        start, end = self._at, self._at + 1
        while True:  # each character is read only once, so long strings take linear time
            found = _IN_STRING.match(self._text, end)
            assert found is not None
            end = found.end()
            if self._text[end : end + 1] == '"':
                break
            if not (yield from self.more()):
                return None
        self._at = end + 1
        value = _json(self._text[start : self._at])
        return value if isinstance(value, str) else None

    def read_until(self, *tags: str) -> Scan[tuple[str, str]]:
        """Read up to the next of `tags`. Return the text before it, and the tag ("" at the end of the response)."""
        parts: list[str] = []
        tag, _ = yield from self.stream_until(parts.append, *tags)
        return "".join(parts), tag

    def stream_until(self, emit: Callable[[str], None], *tags: str, trailing: str = "") -> Scan[tuple[str, str]]:
        """Pass the text before the next tag to `emit` as it arrives.

        Args:
            emit: Receives the text in parts.
            tags: The text ends at any of these tags.
            trailing: Characters, such as newlines, that are not passed to `emit` if they are directly before the tag.

        Returns:
            The tag ("" at the end of the response), and the `trailing` characters before it.
        """
        while True:
            rest = self._text[self._at :]
            found = [(at, tag) for tag in tags if (at := rest.find(tag)) >= 0]
            keep = 0 if self._ended else max(partial_end(rest, tag) for tag in tags)
            end, tag = min(found) if found else (len(rest) - keep, "")
            shown = rest[:end].rstrip(trailing) if trailing else rest[:end]
            if shown:
                emit(shown)
            if tag or self._ended:
                self._at += end + len(tag)
                return tag, rest[len(shown) : end]
            self._at += len(shown)
            yield from self.more()

    def stream_brackets(self, emit: Callable[[str], None], span: Brackets | None = None) -> Scan[bool]:
        """Pass text that is enclosed in brackets to `emit` as it arrives. Return whether the brackets were closed."""
        span = span or Brackets()
        while True:
            count = span.feed(self._text[self._at :])
            if count:
                emit(self._text[self._at : self._at + count])
            self._at += count
            if span.done or span.failed or not (yield from self.more()):
                return span.done

    # ------------------------------------------------------------------------------------------------------- content

    def content_until(self, *tags: str) -> Scan[str]:
        """Emit the text before the next tag as content. Return the tag, or "" at the end of the response."""
        tag, self._space = yield from self.stream_until(self._emit_content, *tags, trailing=WHITESPACE)
        self._mark = self._at
        if not tag and not self._called:
            self._emit_content(self._space)
        return tag

    def _emit_content(self, text: str) -> None:
        text = text.lstrip(WHITESPACE) if self._called else text
        if text:
            self._called = False
            self._found.append(Content(text))

    # --------------------------------------------------------------------------------------------------------- calls

    def emit_call(self, name: str, arguments: str = "") -> None:
        self._found.append(ToolCall(name, arguments))
        self._called = True

    def emit_arguments(self, text: str) -> None:
        self._found.append(Arguments(text))

    def stream_call(self, name: str) -> Scan[None]:
        """Emit a call of the tool `name`. Its arguments are the JSON object at the current position."""
        self.emit_call(name)
        yield from self.stream_brackets(self.emit_arguments)

    def json_call(self) -> Scan[bool]:
        """Read and emit the call `{"name": …, "arguments": {…}}`.

        If the text is not a call of an offered tool, return False and do not move the position. If the keys are in
        another order, the call is emitted only when it is complete.
        """
        if (yield from self.peek()) != "{":
            return False
        start = self._at
        if name := (yield from self._json_head()):
            yield from self.stream_call(name)
            if (yield from self.accept("}", ",")) == ",":  # more keys follow, such as an id
                outer = Brackets()
                outer.feed("{")
                yield from self.stream_brackets(lambda text: None, outer)
            return True
        self._at = start
        found = yield from self.read_call()
        if found is None:
            self._at = start
            return False
        self.emit_call(found.name, found.arguments)
        return True

    def read_call(self) -> Scan[ToolCall | None]:
        """Read a complete JSON call. Return None if the text is not a call of an offered tool."""
        parts: list[str] = []
        complete = yield from self.stream_brackets(parts.append)
        return _described_call(_json("".join(parts)), self.tools) if complete else None

    def _json_head(self) -> Scan[str]:
        yield from self.accept("{")
        if (yield from self.read_string()) != "name" or not (yield from self.accept(":")):
            return ""
        name = yield from self.read_string()
        if name not in self.tools or not (yield from self.accept(",")):
            return ""
        if (yield from self.read_string()) not in ("arguments", "parameters") or not (yield from self.accept(":")):
            return ""
        return str(name) if (yield from self.peek()) == "{" else ""

    def json_calls(self) -> Scan[bool]:
        """Read a JSON list of calls, or several calls with separators between them. Return whether a call was found."""
        start = self._at
        listed = yield from self.accept("[")
        if not (yield from self.json_call()):
            self._at = start
            return False
        more = True
        while more:
            after = self._at
            yield from self.accept(";", ",")
            more = yield from self.json_call()
            if not more:
                self._at = after
        if listed:
            yield from self.accept("]")
        return True


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _described_call(value: Any, tools: Tools) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in tools:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
