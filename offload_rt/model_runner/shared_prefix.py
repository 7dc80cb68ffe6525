"""What a batch shares: the chunk lists of its sequences in tree order form a trie; a *segment* is a maximal run of its
chunks with the same sequences below. Attention over segments and over what each sequence has for itself is
`kernels.segments.attend_runs`: each shared row is read once, not once for each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby

import torch

from ..core import CHUNK, BlockTable, Visible
from ..kernels.h2d_copy import to_device

PAYS_FROM_BYTES = 2 << 20
"""A segment costs one more product and merge, and saves reading its rows for all sequences but one; on one thread of a
CPU that pays from about so many saved bytes on. Two or three queries at once cost nearly as much as one by one: what so
few sequences save counts a quarter. `offload-rt bench-sharing` prints the gain by batch, prefix and suffix."""

NEVER_PAYS = 1 << 62
"""For `pays_from`: no segments at all."""


@dataclass(frozen=True)
class Segment:
    """Token slots `tokens`, whole chunks, that sequences [first, stop) of the batch hold in common; `first` reads them
    for all."""

    first: int
    stop: int
    tokens: range


@dataclass(frozen=True)
class Sharing:
    """What a batch shares, in tree order.

    order: the batch's positions so that the sequences of any chunk are neighbours; `restore` undoes it.
    segments: those worth a product of their own, parents before children; along each sequence they follow each other
        from slot 0 on without a gap.
    private: for each sequence (in tree order) the slot where its own rows start.
    overlapping: whether any two sequences hold a chunk in common, worth a product or not.
    """

    order: tuple[int, ...]
    segments: tuple[Segment, ...]
    private: tuple[int, ...]
    overlapping: bool

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `[B, ...]` in tree order, in the order of the batch."""
        if all(i == at for at, i in enumerate(self.order)):
            return rows
        back = torch.tensor(sorted(range(len(self.order)), key=self.order.__getitem__))
        return rows.index_select(0, to_device(back, rows.device))

    @classmethod
    def of(cls, block_tables: Seq[BlockTable], token_bytes: int, pays_from: int = PAYS_FROM_BYTES) -> Sharing:
        """From chunk ids alone. token_bytes: K and V of one token in one layer. A segment that saves fewer than
        `pays_from` bytes (see PAYS_FROM_BYTES) is left to those below it: it becomes part of each child's, in the end
        of each sequence's own rows."""
        order = sorted(range(len(block_tables)), key=lambda i: block_tables[i].chunks)
        chunks = [block_tables[i].chunks for i in order]
        segments: list[Segment] = []
        tops = _branches(chunks, 0, len(chunks), 0)
        for first, stop in tops:
            _descend(chunks, first, stop, 0, 0, -(-pays_from // token_bytes), segments)
        private = [0] * len(order)
        for segment in segments:
            private[segment.first : segment.stop] = [segment.tokens.stop] * (segment.stop - segment.first)
        return cls(tuple(order), tuple(segments), tuple(private), bool(tops))

    def own(self, b: int, visible: Visible) -> Visible:
        """What of `visible`, which begins at slot 0, sequence `b` (in tree order) has for itself."""
        start = self.private[b]
        recent = range(max(start, visible.recent.start), visible.recent.stop)
        return Visible(range(start, start), range(start, recent.start), recent)


def _branches(chunks: Seq[list[int]], first: int, stop: int, depth: int) -> list[tuple[int, int]]:
    """Those slices [first, stop) of at least two sequences that have the same chunk at `depth`."""
    groups = groupby(range(first, stop), key=lambda i: chunks[i][depth] if depth < len(chunks[i]) else ~i)
    slices = [(members[0], members[-1] + 1) for members in (list(group) for _, group in groups)]
    return [(a, b) for a, b in slices if b - a > 1]


def _descend(
    chunks: Seq[list[int]], first: int, stop: int, start: int, depth: int, pays_from: int, segments: list[Segment]
) -> None:
    """Sequences [first, stop) have the same chunk at `depth`; those from `start` on are not in a segment yet."""
    low, high = chunks[first], chunks[stop - 1]
    # In lexicographic order whatever the first and the last have in common, all between them have too.
    end = depth + 1
    while end < min(len(low), len(high)) and low[end] == high[end]:
        end += 1
    if _saved(stop - first, (end - start) * CHUNK) >= pays_from:
        segments.append(Segment(first, stop, range(start * CHUNK, end * CHUNK)))
        start = end
    for a, b in _branches(chunks, first, stop, end):
        _descend(chunks, a, b, start, end, pays_from, segments)


def _saved(sequences: int, tokens: int) -> int:
    """Tokens that need not be read, as far as that saves time."""
    return (sequences - 1) * tokens // (1 if sequences > 3 else 4)


class SharedPrefixes:
    """The `Sharing` of the latest batch, made again only when the batch or a block table's chunks have changed: every
    64 tokens of a sequence, not every step (ChunkAttention §3.3)."""

    def __init__(self, token_bytes: int, pays_from: int = PAYS_FROM_BYTES) -> None:
        self._token_bytes, self._pays_from = token_bytes, pays_from
        self._chunks: list[list[int]] = []
        self._sharing = Sharing.of([], token_bytes)

    def of(self, block_tables: Seq[BlockTable]) -> Sharing:
        """What a batch with these block tables shares."""
        chunks = [blocks.chunks for blocks in block_tables]
        if chunks != self._chunks:
            self._sharing = Sharing.of(block_tables, self._token_bytes, self._pays_from)
            self._chunks = [list(ids) for ids in chunks]
        return self._sharing
