"""Token ids to text as they come: never half a character, never past a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_PENDING = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of one sequence's new tokens. `push` returns what can be shown for certain: text that ends in half a
    UTF-8 character, or that a stop string may still swallow, is held back until more tokens or `flush` decide.
    Without a tokenizer there is no text and no stop string is ever found. With `keep_stop` the text ends behind the
    stop string, else before it."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str], *, keep_stop: bool = False
    ) -> None:
        self._tokenizer, self._keep_stop = tokenizer, keep_stop
        self._stop = tuple(stop) if tokenizer is not None else ()
        self._ids: list[int] = []
        # The text of ids[from:to] is out; it is decoded again with what follows, because a token's text depends on
        # its neighbours (spaces, bytes of one character).
        self._from = self._to = 0
        self._held = ""
        self.stopped: str | None = None
        """The stop string that was found."""

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """The text that `token` completes; sets `stopped` to a stop string that is found in it, if `may_stop`."""
        self._ids.append(token)
        text = self._decode(self._ids[self._from :])
        if text.endswith(_PENDING):
            return ""
        fresh = text[len(self._decode(self._ids[self._from : self._to])) :]
        self._from, self._to = self._to, len(self._ids)
        return self._release(self._held + fresh) if may_stop else fresh

    def flush(self) -> str:
        """What is still held back when no more tokens come."""
        tail = self._decode(self._ids[self._from :])[len(self._decode(self._ids[self._from : self._to])) :]
        self._from = self._to = len(self._ids)
        held, self._held = self._held + tail, ""
        return held if self.stopped is None else ""

    def _decode(self, ids: list[int]) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _release(self, text: str) -> str:
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            (at, self.stopped), self._held = min(found), ""
            return text[: at + len(self.stopped) * self._keep_stop]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
