"""Shared prefixes of the sequences in a batch (ChunkAttention, Hydragen).

The block lists of the sequences, in sorted order, form a trie. A *segment* is a maximal run of blocks that the same
sequences share. `kernels.segments.attend_runs` attends to the segments and to the unshared rest of each sequence. It
reads shared KV once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby

import torch

from ..core import BLOCK_SIZE, BlockTable, VisibleTokens
from ..kernels.h2d_copy import to_device

PAYS_FROM_BYTES = 2 << 20
"""Smallest number of bytes a segment must save to be computed separately.

Each segment costs an additional matrix product and a merge (measured on one CPU thread).
"""

NEVER_PAYS = 1 << 62
"""Value of `pays_from` that disables segments."""


@dataclass(frozen=True)
class Segment:
    """Token slots, in whole blocks, that the sequences [first, stop) of the batch share.

    The slots are fetched through the block table of sequence `first`.
    """

    first: int
    stop: int
    tokens: range


@dataclass(frozen=True)
class Sharing:
    """Shared prefixes of a batch. Sequences are in tree order.

    Attributes:
        order: Tree order: a permutation of the batch in which sequences with a common block are adjacent. `restore`
            inverts it.
        segments: Segments that are large enough for a separate product, parents before children. The segments of each
            sequence are contiguous and begin at slot 0.
        private: First slot of the private part of each sequence, in tree order.
        overlapping: Whether any two sequences share a block, even if no segment is large enough.
    """

    order: tuple[int, ...]
    segments: tuple[Segment, ...]
    private: tuple[int, ...]
    overlapping: bool

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder `rows` `[B, ...]` from tree order to the order of the batch."""
        if all(i == at for at, i in enumerate(self.order)):
            return rows
        back = torch.tensor(sorted(range(len(self.order)), key=self.order.__getitem__))
        return rows.index_select(0, to_device(back, rows.device))

    @classmethod
    def find(cls, block_tables: Seq[BlockTable], token_bytes: int, pays_from: int = PAYS_FROM_BYTES) -> Sharing:
        """Compute the shared prefixes from block ids.

        `token_bytes` is the size of K and V of one token in one layer. Segments that save fewer than `pays_from` bytes
        become part of their children, or of the unshared rest.
        """
        order = sorted(range(len(block_tables)), key=lambda i: block_tables[i].ids)
        tables = [block_tables[i].ids for i in order]
        segments: list[Segment] = []
        tops = _branches(tables, 0, len(tables), 0)
        for first, stop in tops:
            _descend(tables, first, stop, 0, 0, -(-pays_from // token_bytes), segments)
        private = [0] * len(order)
        for segment in segments:
            private[segment.first : segment.stop] = [segment.tokens.stop] * (segment.stop - segment.first)
        return cls(tuple(order), tuple(segments), tuple(private), bool(tops))

    def private_part(self, b: int, visible: VisibleTokens) -> VisibleTokens:
        """Return the tokens of `visible` that are in no segment, for the sequence at index `b` in tree order.

        `visible` must begin at slot 0.
        """
        start = self.private[b]
        recent = range(max(start, visible.recent.start), visible.recent.stop)
        return VisibleTokens(range(start, start), range(start, recent.start), recent)


def _branches(blocks: Seq[list[int]], first: int, stop: int, depth: int) -> list[tuple[int, int]]:
    """Return the ranges [i, j) within [first, stop) of at least two sequences with the same block at index `depth`."""
    groups = groupby(range(first, stop), key=lambda i: blocks[i][depth] if depth < len(blocks[i]) else ~i)
    slices = [(members[0], members[-1] + 1) for members in (list(group) for _, group in groups)]
    return [(a, b) for a, b in slices if b - a > 1]


def _descend(
    blocks: Seq[list[int]], first: int, stop: int, start: int, depth: int, pays_from: int, segments: list[Segment]
) -> None:
    """Append the segments that all or some of the sequences [first, stop) share, parents before children.

    All these sequences share the block at index `depth`. Blocks before index `start` are already in segments. A segment
    is only appended if it saves at least `pays_from` token reads. Otherwise its blocks become part of its children
    (segments of smaller groups of the sequences) or of the unshared rest.
    """
    low, high = blocks[first], blocks[stop - 1]
    # Sequences are in lexicographic order. A prefix that the first and the last share is therefore shared by all.
    end = depth + 1
    while end < min(len(low), len(high)) and low[end] == high[end]:
        end += 1
    if _saved(stop - first, (end - start) * BLOCK_SIZE) >= pays_from:
        segments.append(Segment(first, stop, range(start * BLOCK_SIZE, end * BLOCK_SIZE)))
        start = end
    for a, b in _branches(blocks, first, stop, end):
        _descend(blocks, a, b, start, end, pays_from, segments)


def _saved(sequences: int, tokens: int) -> int:
    """Return how many token reads a segment of `tokens` tokens saves.

    For two or three sequences, only a quarter counts, because the joint product is less efficient.
    """
    return (sequences - 1) * tokens // (1 if sequences > 3 else 4)


class SharedPrefixes:
    """Cache of the `Sharing` of the latest batch, valid until the batch or its blocks change (ChunkAttention §3.3)."""

    def __init__(self, token_bytes: int, pays_from: int = PAYS_FROM_BYTES) -> None:
        self._token_bytes, self._pays_from = token_bytes, pays_from
        self._tables: list[list[int]] = []
        self._sharing = Sharing.find([], token_bytes)

    def find(self, block_tables: Seq[BlockTable]) -> Sharing:
        """Return the shared prefixes of a batch with these block tables."""
        blocks = [blocks.ids for blocks in block_tables]
        if blocks != self._tables:
            self._sharing = Sharing.find(block_tables, self._token_bytes, self._pays_from)
            self._tables = [list(ids) for ids in blocks]
        return self._sharing
