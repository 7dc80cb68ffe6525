"""Tokenize long texts in pieces, so that the work can be cancelled. The token ids do not depend on the pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from threading import Event
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..sessions.chat_render import encode_rendered

PIECE = 1 << 16
"""Minimum length of a piece in characters. Shorter texts are tokenized whole."""

NFC_SHRINKS = 4
"""Factor by which NFC normalisation shortens UTF-8 text at most. In Unicode 16 it is 3.5, for U+0390."""

LOCAL_PATTERNS = (
    # GPT-2, and the default of `ByteLevel`
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
    r"|\s+",
    # Qwen 2
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""Regular expressions of pre-tokenizers that begin a new word at every space between two letters.

A text can be split before such a space, and its parts tokenized separately.
"""

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SPACES = (" ", "Ġ", "▁")
"""Representations of a space in vocabularies: plain, byte-level BPE, SentencePiece."""


class CancelledError(Exception):
    """The request that needs the tokens was cancelled."""


@dataclass(frozen=True)
class _TokenizerSteps:
    """The normalizers and pre-tokenizers that a fast tokenizer applies before its BPE model, in order."""

    normalizers: list[Mapping[str, Any]]
    pre_tokenizers: list[Mapping[str, Any]]

    @classmethod
    def from_backend(cls, backend: Any) -> _TokenizerSteps:
        return cls(list(_flatten(backend.normalizer)), list(_flatten(backend.pre_tokenizer)))

    @property
    def byte_level(self) -> bool:
        return any(step["type"] == "ByteLevel" for step in (*self.normalizers, *self.pre_tokenizers))

    @property
    def shrinks(self) -> int | None:
        """Upper bound of (bytes of a text) / (bytes of the normalized text), or None if there is none."""
        factor = 1
        for step in self.normalizers:
            if step["type"] == "NFC":
                factor = NFC_SHRINKS
            elif not _grows(step):
                return None
        drops = any(step.get("behavior") == "Removed" or step["type"] not in _KEEPING for step in self.pre_tokenizers)
        return None if drops else factor

    @property
    def local(self) -> bool:
        """Whether a text can be split before a space between two letters without changing the words that are found."""
        normal = all(step["type"] == "NFC" or _replaces_one(step) for step in self.normalizers)
        # If spaces remain in the normalized text, a pre-tokenizer may split after the space instead of before it.
        spaces = not any(_replaces_one(step) and step["pattern"]["String"] == " " for step in self.normalizers)
        return normal and all(_is_local(step, spaces) for step in self.pre_tokenizers)


_KEEPING = ("ByteLevel", "Digits", "Split", "Metaspace")
"""Pre-tokenizers that remove nothing from a text. `Split` with behavior "Removed" is an exception."""


def _flatten(step: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the individual steps of a normalizer or pre-tokenizer. Nested sequences of steps are flattened."""
    left = [] if step is None else [json.loads(step.__getstate__())]
    while left:
        found = left.pop(0)
        inner = found.get("normalizers") or found.get("pretokenizers")
        if found["type"] == "Sequence":
            left[:0] = inner or []
        else:
            yield found


def _grows(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and 0 < len(pattern.encode()) <= len(step["content"].encode())
    return step["type"] in ("Prepend", "ByteLevel")


def _replaces_one(step: Mapping[str, Any]) -> bool:
    """Return whether a normalizer step replaces single characters by one or more characters."""
    return step["type"] == "Replace" and _grows(step) and len(step["pattern"]["String"]) == 1


def _is_local(step: Mapping[str, Any], spaces: bool) -> bool:
    """Return whether a pre-tokenizer finds the same words if the text is split before a space between two letters.

    `spaces` tells whether the normalized text still contains spaces.
    """
    if step["type"] == "ByteLevel":
        return not step["add_prefix_space"]
    if step["type"] == "Split":
        pattern = step["pattern"]
        return pattern.get("Regex") in LOCAL_PATTERNS or (pattern.get("String") == " " and not spaces)
    return bool(step["type"] == "Digits")


class TextTokenizer:
    """Tokenizes texts of any length, long texts in pieces."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, special_tokens: bool, cancelled: Event, check: Callable[[int], None]) -> list[int]:
        """Return the token ids of `text`.

        Args:
            text: The text.
            special_tokens: Whether to add the special tokens of the tokenizer.
            cancelled: Cancels the work if it is set. Checked between the pieces of a long text.
            check: Called with lower bounds of the number of tokens while a long text is tokenized. It may raise an
                error to reject a text that is too long.

        Raises:
            CancelledError: `cancelled` was set.
        """
        if len(text) <= PIECE:
            return encode_rendered(self._tokenizer, text, special_tokens=special_tokens)
        check(self.least_tokens(text))
        if self._cut is None:
            return encode_rendered(self._tokenizer, text, special_tokens=special_tokens)
        ids: list[int] = []
        for piece in self.pieces(text):
            if cancelled.is_set():
                raise CancelledError
            ids += encode_rendered(self._tokenizer, piece)
            check(len(ids))
        before, after = self._special_ids if special_tokens else ([], [])
        return [*before, *ids, *after]

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`: its size divided by the size of the longest token."""
        return 0 if self.most_bytes is None else -(-len(text.encode("utf-8", "surrogatepass")) // self.most_bytes)

    def pieces(self, text: str) -> Iterator[str]:
        """Split `text` into pieces of at least `PIECE` characters that can be tokenized independently.

        The concatenated token ids equal the token ids of the whole text. If the text cannot be split safely, it is
        returned as one piece.
        """
        start = 0
        while self._cut is not None and (found := self._cut.search(text, start + PIECE)) is not None:
            yield text[start : found.end()]
            start = found.end()
        yield text[start:]

    @cached_property
    def _bpe(self) -> tuple[Any, _TokenizerSteps] | None:
        """Return the tokenizer's backend and its steps before the BPE model.

        Return None if the model is not BPE, or if an added token strips whitespace or must be a whole word.
        """
        # In all other cases, one token may represent text of any length.
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or type(backend.model).__name__ != "BPE" or backend.model.dropout:
            return None
        added = self._tokenizer.added_tokens_decoder.values()
        if any(token.lstrip or token.rstrip or token.single_word for token in added):
            return None
        return backend, _TokenizerSteps.from_backend(backend)

    @cached_property
    def most_bytes(self) -> int | None:
        """Maximum number of bytes of text that one token represents, or None if there is no maximum."""
        if self._bpe is None:
            return None
        backend, steps = self._bpe
        known = steps.byte_level or backend.model.byte_fallback or not backend.model.fuse_unk
        if steps.shrinks is None or not known:
            return None
        vocab = self._tokenizer.get_vocab()
        added = self._tokenizer.get_added_vocab()
        # In a byte-level vocabulary, each character represents one byte. Otherwise an unknown character has up to 4.
        size = len if steps.byte_level else _utf8
        longest = max((size(token) for token in vocab if token not in added), default=1)
        return steps.shrinks * max(4, longest, max(map(_utf8, added), default=1))

    @cached_property
    def _cut(self) -> re.Pattern[str] | None:
        """Pattern of the positions at which a text can be split. None if no split is safe with this tokenizer.

        A text may be split between a letter and a space that is followed by another letter, if no token of the
        vocabulary contains this letter followed by a space. BPE cannot merge tokens across such a position.
        """
        if self._bpe is None or not self._bpe[1].local or self._bpe[0].model.end_of_word_suffix:
            return None
        vocab = self._tokenizer.get_vocab()
        if not all(letter in vocab for letter in _LETTERS) or not any(space in vocab for space in _SPACES):
            return None
        bound = set(_before_spaces(vocab))
        free = "".join(letter for letter in _LETTERS if letter not in bound)
        return re.compile(f"[{free}](?= [A-Za-z])") if free else None

    @cached_property
    def _special_ids(self) -> tuple[list[int], list[int]]:
        """Ids of the special tokens that the tokenizer adds before and after a text."""
        alone = encode_rendered(self._tokenizer, "a")
        whole = encode_rendered(self._tokenizer, "a", special_tokens=True)
        at = next(i for i in range(len(whole)) if whole[i : i + len(alone)] == alone)
        return whole[:at], whole[at + len(alone) :]


def _utf8(token: str) -> int:
    return len(token.encode("utf-8", "surrogatepass"))


def _before_spaces(tokens: Iterable[str]) -> Iterator[str]:
    """Yield each character that directly precedes a space within a token of the vocabulary."""
    for token in tokens:
        for i, character in enumerate(token[1:]):
            if character in _SPACES:
                yield token[i]
