"""Parsers for reasoning: `<think>…</think>`, and the harmony format."""

from __future__ import annotations

import re

from ...utils.prefixes import partial_end
from .pieces import Content, Piece, Reasoning
from .scanner import Scan, Scanner

THINK, THINK_END = "<think>", "</think>"


class Think:
    """Extracts reasoning sections (`<think>…</think>`) from a response, and drops the whitespace around them.

    Args:
        inside: Whether the response begins with reasoning because the prompt ends with the opening tag.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self._inside = inside
        self._text = ""
        self._begun = False  # whether a piece has been returned
        self._fresh = inside  # whether only whitespace has followed the last tag; this whitespace is dropped

    def push(self, text: str) -> list[Piece]:
        self._text += text
        found: list[Piece] = []
        while True:
            tag = THINK_END if self._inside else THINK
            before, seen, after = self._text.partition(tag)
            if not seen:
                break
            blank = not self._begun and not before.strip()
            found += self._emitted(before.rstrip() if self._inside or blank else before)
            self._text, self._inside, self._fresh = after, not self._inside, True
        keep = partial_end(self._text, tag)
        body = self._text[: len(self._text) - keep]
        if self._inside or not body.strip():  # hold back whitespace, because a tag may follow
            body = body.rstrip()
        self._text = self._text[len(body) :]
        return found + self._emitted(body)

    def finish(self) -> list[Piece]:
        text, self._text = self._text, ""
        return self._emitted(text.rstrip() if self._inside else text)

    def _emitted(self, text: str) -> list[Piece]:
        if self._fresh:
            text = text.lstrip()
        if not text:
            return []
        self._fresh, self._begun = False, True
        return [Reasoning(text) if self._inside else Content(text)]


def ends_within_thinking(prompt: str, prefill: str = "") -> bool:
    """Return whether a response begins inside a reasoning section.

    This is the case if the opening tag is at the end of the rendered `prompt`, or in the message `prefill` that the
    response continues.
    """
    return prompt.rstrip().endswith(THINK) or THINK in prefill.rpartition(THINK_END)[2]


START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_HEADER = re.compile(r".*(?:<\|(?:channel|start)\|>|to=)\s*\S*\s*", re.DOTALL)
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis")


class Harmony(Scanner):
    """Parser for harmony, the format of gpt-oss: `<|channel|>CHANNEL<|message|>TEXT<|end|>`.

    Messages in the channel `analysis` are reasoning. Messages to an offered function are tool calls. All other messages
    are content.
    """

    marks = ((CHANNEL, MESSAGE),)
    special = True

    def parse(self) -> Scan[None]:
        # The prompt ends with "<|start|>assistant", so the response begins inside a message header.
        tag = yield from self.accept(CHANNEL, START, "to=")
        if not tag:
            self._at = 0
            tag = yield from self.content_until(CHANNEL, START)
        while tag:
            tag = yield from self._message(tag)

    def _message(self, tag: str) -> Scan[str]:
        """Read a message that begins with `tag`. Return the first tag of the next message, or "" at the end."""
        text, complete = yield from self.read_until(MESSAGE)
        header = tag + text
        if not complete:
            show = self._reason if _ANALYSIS.search(header) else self._emit_content
            show(_HEADER.sub("", header) if CHANNEL in header or START in header else header)
            return ""
        recipient = _RECIPIENT.search(header)
        if recipient and recipient[1] in self.tools and (yield from self.peek()) == "{":
            yield from self.stream_call(recipient[1])
            _, end = yield from self.read_until(*ENDS, START, CHANNEL)
        else:
            show = self._reason if _ANALYSIS.search(header) and not recipient else self._emit_content
            end, _ = yield from self.stream_until(show, *ENDS, START, CHANNEL)
        if end in ENDS:
            end = (yield from self.accept(CHANNEL, START)) or (yield from self.content_until(CHANNEL, START))
        return end

    def _reason(self, text: str) -> None:
        self._found.append(Reasoning(text))
