"""Harmony, the format of gpt-oss for reasoning, calls and content: `<|channel|>CHANNEL<|message|>TEXT<|end|>`."""

from __future__ import annotations

import re

from .pieces import Reasoning
from .scanner import Scan, Scanner

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_HEADER = re.compile(r".*(?:<\|(?:channel|start)\|>|to=)\s*\S*\s*", re.DOTALL)
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis")


class Harmony(Scanner):
    """Parse the channels of a response.

    `analysis` is reasoning. A message to an offered function is a tool call. All other messages are content.
    """

    marks = ((CHANNEL, MESSAGE),)
    special = True

    def parse(self) -> Scan[None]:
        # The prompt ends with "<|start|>assistant", so the response begins inside a message header.
        tag = yield from self.take(CHANNEL, START, "to=")
        if not tag:
            self._at = 0
            tag = yield from self.content(CHANNEL, START)
        while tag:
            tag = yield from self._message(tag)

    def _message(self, tag: str) -> Scan[str]:
        """Read a message that begins with `tag`. Return the first tag of the next message, or "" at the end."""
        text, complete = yield from self.until(MESSAGE)
        header = tag + text
        if not complete:
            show = self._reason if _ANALYSIS.search(header) else self._show
            show(_HEADER.sub("", header) if CHANNEL in header or START in header else header)
            return ""
        recipient = _RECIPIENT.search(header)
        if recipient and recipient[1] in self.tools and (yield from self.peek()) == "{":
            yield from self.call(recipient[1])
            _, end = yield from self.until(*ENDS, START, CHANNEL)
        else:
            show = self._reason if _ANALYSIS.search(header) and not recipient else self._show
            end, _ = yield from self.stream(show, *ENDS, START, CHANNEL)
        if end in ENDS:
            end = (yield from self.take(CHANNEL, START)) or (yield from self.content(CHANNEL, START))
        return end

    def _reason(self, text: str) -> None:
        self._found.append(Reasoning(text))
