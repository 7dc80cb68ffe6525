"""Token ids to text as they come: never half a character, never past a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_PENDING = "\N{REPLACEMENT CHARACTER}"

CONTEXT_TOKENS = 6
"""Prompt tokens that are decoded in front of new tokens."""


def decode(tokenizer: PreTrainedTokenizerBase | None, tokens: Sequence[int]) -> str:
    """Return the text of `tokens` without special tokens; "" without a tokenizer."""
    return "" if tokenizer is None else str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def decoding_context(tokenizer: PreTrainedTokenizerBase | None, prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of `prompt` that decide how the next token is decoded. SentencePiece tokenizers strip the
    space at the start of a text, so at least one of these tokens must have a text if any of the prompt has."""
    start = max(0, len(prompt) - CONTEXT_TOKENS)
    while start and not decode(tokenizer, prompt[start:]):
        start = max(0, start - CONTEXT_TOKENS)
    return list(prompt[start:]) if tokenizer is not None else []


def added_text(before: str, both: str) -> str:
    """Return what `both` adds to `before`. `before` may end in an incomplete character that `both` completes."""
    known = before if both.startswith(before) else before.rstrip(_PENDING)
    return both[len(known) :]


class TextStream:
    """Convert one sequence's new tokens to text, step by step.

    `push` returns text that can no longer change: an incomplete UTF-8 character, or a possible beginning of a stop
    string, is held back until more tokens or `flush` decide. Without a tokenizer the text is empty and no stop string
    is found. With `keep_stop` the text includes the stop string. `prompt` holds the tokens before the new ones.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop: Sequence[str],
        *,
        keep_stop: bool = False,
        prompt: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._keep_stop = tokenizer, keep_stop
        self._stop = tuple(stop) if tokenizer is not None else ()
        self._ids = decoding_context(tokenizer, prompt)
        # The text of ids[:to] has been returned. Tokens from `from` on are decoded again with the next ones, because a
        # token's text depends on its neighbours (spaces, bytes of one character).
        self._from, self._to = 0, len(self._ids)
        self._held = ""
        self.stopped: str | None = None
        """The stop string that was found."""

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """The text that `token` completes; sets `stopped` to a stop string that is found in it, if `may_stop`."""
        self._ids.append(token)
        text = self._decode(self._ids[self._from :])
        if text.endswith(_PENDING):
            return ""
        fresh = added_text(self._decode(self._ids[self._from : self._to]), text)
        if fresh:  # a token without text cannot stand in front of the next one
            self._from, self._to = self._to, len(self._ids)
        return self._release(self._held + fresh) if may_stop else fresh

    def flush(self) -> str:
        """What is still held back when no more tokens come."""
        tail = added_text(self._decode(self._ids[self._from : self._to]), self._decode(self._ids[self._from :]))
        self._from = self._to = len(self._ids)
        held, self._held = self._held + tail, ""
        return held if self.stopped is None else ""

    def _decode(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids)

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
