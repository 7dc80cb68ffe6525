"""The sequences of a decode step, with everything that does not change during the step.

Sequences may share prefixes (ChunkAttention, Hydragen). A *shared run* is a maximal run of blocks that the same
sequences share. `kernels.kv_runs.attend_runs` reads the KV of each run once, for all of its sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby

import torch

from ..core import BLOCK_SIZE, BlockTable, VisibleTokens
from ..kernels.h2d_copy import to_device
from ..models.adapter import ModelAdapter
from ..models.recurrent import RecurrentState
from ..policies.base import Policy, QuerySource, source_between
from ..transfer.base import Transfer
from .sequence import Sequence

Attend = Callable[[torch.Tensor], torch.Tensor]
"""Function that computes the attention of a layer whose KV is being fetched. It waits for the KV.

The argument is the queries `[H, B, d]` of the layer, not predicted ones. The result is the attention output
`[B, H * d]`.
"""


class DecodeBatch:
    """The sequences of one decode step, with the model adapter, policy and transfers that they use.

    Attributes:
        sharing: Shared prefixes. `sequences` are in its tree order.
        dense: Whether each sequence is so short that every layer attends to all of its tokens.
        policy_layers: Layers whose new KV is passed to the policy: they store KV and may select tokens.
        selecting: Layers that select tokens in this step for at least one sequence.
        visible: Tokens that the newest token of each sequence can attend to, `[layers][B]`.
        slots: Slot of each sequence's newest token, `[layers][B]`. In sliding-window layers, token t is in slot t.
    """

    def __init__(
        self,
        sequences: Seq[Sequence],
        adapter: ModelAdapter,
        policy: Policy,
        transfer: Transfer,
        sharing: Sharing,
    ) -> None:
        self.sequences, self.adapter, self.policy, self.transfer = sequences, adapter, policy, transfer
        self.sharing, self.geometry = sharing, adapter.geometry
        self.block_tables = [s.blocks for s in sequences]
        self.dense = [s.slots.context <= policy.dense_until for s in sequences]
        sparse = frozenset(range(self.geometry.layers)) - policy.dense_layers
        self.policy_layers = sparse & frozenset(self.geometry.kv_layers)
        self.selecting = frozenset[int]() if all(self.dense) else sparse
        layers, windows = self.geometry.layer_of_window, self.geometry.windows
        visible = {window: self._visible(layer) for window, layer in layers.items()}
        newest = [s.slots.newest for s in sequences], [s.position for s in sequences]
        self.visible = [visible[window] for window in windows]
        self.slots = [newest[window is not None] for window in windows]

    @property
    def tokens(self) -> list[int]:
        """The newest token of each sequence, which this step computes."""
        return [s.tokens[s.position] for s in self.sequences]

    @property
    def positions(self) -> list[int]:
        return [s.position + s.shift for s in self.sequences]

    def query_source(self, layer: int) -> QuerySource | None:
        """Return the source of the query that selects tokens in `layer`. None if `layer` selects none in this step."""
        if layer not in self.selecting:
            return None
        return source_between(self.policy.query_source, self.geometry.between(layer))

    def state(self) -> RecurrentState | None:
        slots = self.sequences[0].state_slots
        return None if slots is None else slots.view([s.state_slot for s in self.sequences])

    def _visible(self, layer: int) -> list[VisibleTokens]:
        slides = self.geometry.windows[layer] is not None
        sinks, recent = self.geometry.resident(layer, self.policy.sinks, self.policy.recent)
        return [
            VisibleTokens.of(
                s.position + 1 if slides else s.slots.context,
                sinks=sinks,
                recent=recent,
                window=self.geometry.window_at(layer, s.position + s.shift),
                floor=s.blocks.floor,
            )
            for s in self.sequences
        ]


MIN_SAVED_BYTES = 2 << 20
"""Number of bytes that a shared run must save to be computed separately.

A shared run costs an additional matrix product and a merge (measured on one CPU thread).
"""

NEVER_SHARE = 1 << 62
"""Value of `min_saved` that disables shared runs."""


@dataclass(frozen=True)
class SharedRun:
    """Token slots, in whole blocks, that the sequences [first, stop) of the batch share.

    KV is fetched through the block table of sequence `first`.
    """

    first: int
    stop: int
    tokens: range


@dataclass(frozen=True)
class Sharing:
    """Shared prefixes of a batch.

    Attributes:
        order: *Tree order*: a permutation of the batch in which sequences with a common block are adjacent.
        runs: Shared runs that are large enough for a separate matrix product. The runs of a sequence are in order,
            without gaps, and begin at slot 0.
        private: First slot after the runs of each sequence, in tree order.
        overlapping: Whether any two sequences share a block, even if no shared run is large enough.
    """

    order: tuple[int, ...]
    runs: tuple[SharedRun, ...]
    private: tuple[int, ...]
    overlapping: bool

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder `rows` `[B, ...]` from tree order to batch order."""
        if all(i == index for index, i in enumerate(self.order)):
            return rows
        inverse = torch.tensor(sorted(range(len(self.order)), key=self.order.__getitem__))
        return rows.index_select(0, to_device(inverse, rows.device))

    @classmethod
    def find(cls, block_tables: Seq[BlockTable], token_bytes: int, min_saved: int = MIN_SAVED_BYTES) -> Sharing:
        """Compute the shared prefixes from block ids.

        `token_bytes` is the size of K and V of one token in one layer. Runs that save less than `min_saved` bytes are
        left out.
        """
        order = sorted(range(len(block_tables)), key=lambda i: block_tables[i].ids)
        tables = [block_tables[i].ids for i in order]
        runs: list[SharedRun] = []
        groups = _branches(tables, 0, len(tables), 0)
        for first, stop in groups:
            _collect_runs(tables, first, stop, 0, 0, -(-min_saved // token_bytes), runs)
        private = [0] * len(order)
        for run in runs:
            private[run.first : run.stop] = [run.tokens.stop] * (run.stop - run.first)
        return cls(tuple(order), tuple(runs), tuple(private), bool(groups))

    def private_part(self, b: int, visible: VisibleTokens) -> VisibleTokens:
        """Return the part of `visible`, which must begin at slot 0, that is in no shared run.

        `b` is the index of the sequence in tree order.
        """
        start = self.private[b]
        recent = range(max(start, visible.recent.start), visible.recent.stop)
        return VisibleTokens(range(start, start), range(start, recent.start), recent)


def _branches(blocks: Seq[list[int]], first: int, stop: int, depth: int) -> list[tuple[int, int]]:
    """Return groups [a, b) of at least two sequences in [first, stop) with the same block at index `depth`."""
    groups = groupby(range(first, stop), key=lambda i: blocks[i][depth] if depth < len(blocks[i]) else ~i)
    slices = [(members[0], members[-1] + 1) for members in (list(group) for _, group in groups)]
    return [(a, b) for a, b in slices if b - a > 1]


def _collect_runs(
    blocks: Seq[list[int]], first: int, stop: int, start: int, depth: int, min_saved: int, runs: list[SharedRun]
) -> None:
    """Append the shared runs of the sequences [first, stop), which share the block at index `depth`.

    Blocks before index `start` belong to earlier runs. A run that saves fewer than `min_saved` token reads is left out.
    Its blocks then join runs of fewer sequences, or stay private.
    """
    low, high = blocks[first], blocks[stop - 1]
    # Sequences are in lexicographic order. A prefix that the first and the last share is therefore shared by all.
    end = depth + 1
    while end < min(len(low), len(high)) and low[end] == high[end]:
        end += 1
    if _saved_reads(stop - first, (end - start) * BLOCK_SIZE) >= min_saved:
        runs.append(SharedRun(first, stop, range(start * BLOCK_SIZE, end * BLOCK_SIZE)))
        start = end
    for a, b in _branches(blocks, first, stop, end):
        _collect_runs(blocks, a, b, start, end, min_saved, runs)


def _saved_reads(sequences: int, tokens: int) -> int:
    # With two or three sequences, the joint product is less efficient, so only a quarter of the reads counts.
    return (sequences - 1) * tokens // (1 if sequences > 3 else 4)


class SharedPrefixes:
    """Caches the `Sharing` of the latest batch until the batch or its blocks change (ChunkAttention §3.3)."""

    def __init__(self, token_bytes: int, min_saved: int = MIN_SAVED_BYTES) -> None:
        self._token_bytes, self._min_saved = token_bytes, min_saved
        self._tables: list[list[int]] = []
        self._sharing = Sharing.find([], token_bytes)

    def find(self, block_tables: Seq[BlockTable]) -> Sharing:
        blocks = [blocks.ids for blocks in block_tables]
        if blocks != self._tables:
            self._sharing = Sharing.find(block_tables, self._token_bytes, self._min_saved)
            self._tables = [list(ids) for ids in blocks]
        return self._sharing
