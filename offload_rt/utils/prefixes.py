"""Common prefixes of sequences, and overlaps of texts."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the longest common prefix."""
    longest = min(len(one), len(other))
    return next((i for i in range(longest) if one[i] != other[i]), longest)


def partial_end(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `tag` but not the whole tag."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)
