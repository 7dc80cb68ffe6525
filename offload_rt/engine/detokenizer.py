"""Convert token ids to text step by step. Only whole characters are returned, and no text after a stop string."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..utils.prefixes import partial_end

_PENDING = "\N{REPLACEMENT CHARACTER}"

CONTEXT_TOKENS = 6
"""Number of prompt tokens that are decoded together with the generated tokens so that spaces come out correctly."""

_INCOMPLETE = 3
"""Maximum number of bytes, and also of tokens, in an incomplete UTF-8 character."""

_MAX_HELD_BACK = 8
"""If this many tokens are held back, they cannot all belong to a single incomplete character."""

_LONGEST_WINDOW = 32
"""If the tokens are not valid UTF-8, at most this many tokens are decoded again with each new token."""


def decode(tokenizer: PreTrainedTokenizerBase | None, tokens: Sequence[int], *, special: bool = False) -> str:
    if tokenizer is None:
        return ""
    # Clean-up would remove spaces that a stream has already returned, so later text would be lost.
    options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(list(tokens), **options))


def token_text(tokenizer: PreTrainedTokenizerBase | None, token: int) -> str | None:
    """Return the text of a token as it appears inside a longer text, or None if there is no tokenizer.

    Special tokens have text, too.
    """
    if tokenizer is None:
        return None
    # SentencePiece strips the leading space of the first token, so decode the token twice and use the second copy.
    alone, twice = (decode(tokenizer, [token] * count, special=True) for count in (1, 2))
    return twice[len(alone) :] if twice.startswith(alone) else alone


def token_bytes(tokenizer: PreTrainedTokenizerBase | None, token: int, text: str) -> bytes | None:
    """Return the bytes of a token, or None if they are unknown. They may be only a part of a UTF-8 character.

    `text` is the result of `token_text`.
    """
    if _PENDING not in text:
        return text.encode()
    piece = str(tokenizer.convert_ids_to_tokens(token)) if tokenizer is not None else ""
    if _PENDING in piece:
        return text.encode()
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):  # byte fallback
        return bytes.fromhex(piece[3:5])
    if not all(letter in _byte_level() for letter in piece):
        return None
    found = bytes(_byte_level()[letter] for letter in piece)
    return found if found.decode(errors="replace") == text else None


@cache
def _byte_level() -> dict[str, int]:
    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def decoding_context(tokenizer: PreTrainedTokenizerBase | None, prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of `prompt`, excluding special tokens, that affect the text of the next token."""
    if tokenizer is None:
        return []
    has_text: dict[int, bool] = {}
    found: list[int] = []
    for token in reversed(prompt):
        if token not in has_text:
            has_text[token] = _has_text(tokenizer, token)
        if has_text[token]:  # the first token must have text, because SentencePiece strips its leading space
            found.insert(0, token)
        if len(found) == CONTEXT_TOKENS + _INCOMPLETE:
            # Byte fallback decodes each byte of an incomplete UTF-8 sequence to U+FFFD, so begin with a character.
            return found[_first_character(tokenizer, found) :]
    return found


def _first_character(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> int:
    counts = range(_INCOMPLETE + 1)  # the last character may be incomplete, too
    ranges = ((start, len(tokens) - missing) for missing in counts for start in counts)
    whole = (start for start, stop in ranges if not decode(tokenizer, tokens[start:stop]).startswith(_PENDING))
    return next(whole, 0)


def _has_text(tokenizer: PreTrainedTokenizerBase | None, token: int) -> bool:
    return decode(tokenizer, [token, token]) != ""  # twice: a space may have text only after another token


def known_texts(
    tokenizer: PreTrainedTokenizerBase | None, tokens: Sequence[int], *, special: bool = False
) -> list[str]:
    """Return the texts that `tokens` may have at the start of a longer text. Used with `added_text`.

    If the last character is incomplete, later tokens may change it. In this case, the result also contains the texts
    without the last 1 to 3 tokens.
    """
    text = decode(tokenizer, tokens, special=special)
    counts = range(1, _INCOMPLETE + 1) if text.endswith(_PENDING) else ()
    return [text, *(decode(tokenizer, tokens[:-count], special=special) for count in counts)]


def added_text(known: Sequence[str], both: str) -> str:
    """Return the part of `both` that follows the text of the earlier tokens. `both` is the text of all tokens.

    `known` is the result of `known_texts` for the earlier tokens.
    """
    rest = known[0].rstrip(_PENDING)  # fallback; not needed for valid UTF-8
    return both[len(next((text for text in known if both.startswith(text)), rest)) :]


class TextStream:
    """Converts the generated tokens of one sequence to text, in constant time per token.

    Text is held back while it ends with an incomplete character or with a possible beginning of a stop string. Without
    a tokenizer, the text is empty and no stop string is found.

    Args:
        keep_stop: Include the stop string in the text.
        special: Include special tokens in the text.
        prompt: Tokens of the prompt, which comes before the generated tokens.

    Attributes:
        held_back: Text that may begin a stop string. It has no incomplete characters.
        stopped: The stop string that was found, or None.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop: Sequence[str],
        *,
        keep_stop: bool = False,
        special: bool = False,
        prompt: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._keep_stop, self._special = tokenizer, keep_stop, special
        self._stop = tuple(stop) if tokenizer is not None else ()
        # The last tokens are decoded again together with the next one, because the text of a token depends on its
        # neighbours (spaces, bytes of one character). `_known` is the text of the first `_shown` tokens. It has already
        # been returned.
        self._window = decoding_context(tokenizer, prompt)
        self._shown, self._known = len(self._window), self._texts(self._window)
        self.held_back = ""
        self.stopped: str | None = None

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Add a token. Return the new text that later tokens can no longer change.

        If `may_stop` is True, cut the text at the first stop string and set `stopped`.
        """
        fresh = self._completed(token)
        return self._release(self.held_back + fresh) if may_stop else fresh

    def flush(self, *, may_stop: bool = True) -> str:
        """Return the text that is held back at the end of the tokens. For `may_stop`, see `push`."""
        if self.stopped is not None:
            return ""
        tail = added_text(self._known, self._decode(self._window))
        self._shown, self._known = len(self._window), self._texts(self._window)
        text, self.held_back = self.held_back + tail, ""
        if may_stop:  # a token with an incomplete character may also have the end of a stop string
            text = self._release(text)
            text, self.held_back = text + self.held_back, ""
        return text

    def _completed(self, token: int) -> str:
        window = self._window
        window.append(token)
        text = self._decode(window)
        held_back = self._incomplete_tokens(text)
        fresh = ""
        if len(window) - held_back > self._shown:
            certain = self._decode(window[: len(window) - held_back]) if held_back else text
            fresh = added_text(self._known, certain)
        if fresh:
            if not self._known[0].endswith(_PENDING) or len(window) > _LONGEST_WINDOW:  # never split a character
                del window[: self._shown]
            self._shown = len(window) - held_back
            self._known = self._texts(window[: self._shown])
        elif not _has_text(self._tokenizer, token):  # a special token; many of these must not fill the window
            window.pop()
        return fresh

    def _incomplete_tokens(self, text: str) -> int:
        """Return how many tokens at the end of the window may form an incomplete character.

        `text` is the window's text.
        """
        if not text.endswith(_PENDING):
            return 0
        window = self._window
        held_back = len(window) - self._shown
        if held_back < _MAX_HELD_BACK:
            return held_back
        counts = range(_INCOMPLETE, 0, -1)
        apart = (n for n in counts if self._decode(window[:-n]) + self._decode(window[-n:]) == text)
        return next(apart, 0)

    def _decode(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids, special=self._special)

    def _texts(self, ids: list[int]) -> list[str]:
        return known_texts(self._tokenizer, ids, special=self._special)

    def _release(self, text: str) -> str:
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            (at, self.stopped), self.held_back = min(found), ""
            return text[: at + len(self.stopped) * self._keep_stop]
        keep = max((partial_end(text, stop) for stop in self._stop), default=0)
        self.held_back = text[len(text) - keep :]
        return text[: len(text) - keep]
