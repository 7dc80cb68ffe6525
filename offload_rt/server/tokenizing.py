"""Compute a lower bound on the number of tokens of a text, to refuse long prompts before tokenizing them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

NFC_SHRINKS = 4
"""NFC normalisation shortens UTF-8 text by at most this factor. In Unicode 16, the maximum is 3.5, for U+0390."""

_KEEPING = ("ByteLevel", "Digits", "Split", "Metaspace")
"""Pre-tokenizers that remove nothing from a text. `Split` with behavior "Removed" is an exception."""


def max_token_bytes(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return an upper bound on the number of bytes of text that one token represents, or None if there is no bound.

    There is no bound for tokenizers that do not use BPE, or that join or remove whitespace or unknown characters.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return None
    normalizers, splits = list(_flatten(backend.normalizer)), list(_flatten(backend.pre_tokenizer))
    byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *splits))
    joins_unknown = backend.model.fuse_unk and not (byte_level or backend.model.byte_fallback)
    strips = any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values())
    removes = any(step.get("behavior") == "Removed" or step["type"] not in _KEEPING for step in splits)
    shrinks = not all(step["type"] == "NFC" or _never_shortens(step) for step in normalizers)
    if joins_unknown or strips or removes or shrinks:
        return None
    added = tokenizer.get_added_vocab()
    # In a byte-level vocabulary, each character represents one byte. Otherwise, an unknown character has up to 4 bytes.
    size = len if byte_level else _utf8
    longest = max((size(token) for token in tokenizer.get_vocab() if token not in added), default=1)
    factor = NFC_SHRINKS if any(step["type"] == "NFC" for step in normalizers) else 1
    return factor * max(4, longest, max(map(_utf8, added), default=1))


def _flatten(step: Any) -> Iterator[Mapping[str, Any]]:
    left = [] if step is None else [json.loads(step.__getstate__())]
    while left:
        found = left.pop(0)
        if found["type"] == "Sequence":
            left[:0] = found.get("normalizers") or found.get("pretokenizers") or []
        else:
            yield found


def _never_shortens(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and 0 < len(pattern.encode()) <= len(step["content"].encode())
    return step["type"] in ("Prepend", "ByteLevel")


def _utf8(token: str) -> int:
    return len(token.encode("utf-8", "surrogatepass"))
