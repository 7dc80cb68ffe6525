"""The sequences of a decode step, and all data about them that does not change during the step.

Sequences may share prefixes (ChunkAttention, Hydragen). A *shared run* is a maximal run of consecutive blocks that the
same group of sequences shares. `kernels.kv_runs.attend_runs` reads the KV of each run once for all of its sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby

import torch

from ..core import BLOCK_SIZE, BlockTable, VisibleTokens, padded_batch
from ..kernels.h2d_copy import to_device
from ..models.adapter import ModelAdapter
from ..models.recurrent import RecurrentState, StateSlots
from ..policies.base import Policy, QuerySource, source_between
from ..transfer.base import Transfer
from .sequence import Sequence

Attend = Callable[[torch.Tensor], torch.Tensor]
"""Function that waits for the KV that a layer is fetching, and then computes the layer's attention.

Its argument contains the true (not predicted) queries `[H, B, d]` of the layer. It returns the attention output
`[B, H * d]`.
"""


class DecodeBatch:
    """The sequences of one decode step, with the model adapter, policy and transfers that they use.

    Attributes:
        sharing: Shared prefixes of the batch. `sequences` is sorted in their tree order.
        dense: For each sequence, whether it is so short that every layer attends to all of its tokens.
        policy_layers: Layers that pass their new KV to the policy. They store KV and may select tokens.
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
        """Newest token of each sequence, which is the token that this step computes."""
        return [s.tokens[s.position] for s in self.sequences]

    @property
    def positions(self) -> list[int]:
        return [s.position + s.shift for s in self.sequences]

    def query_source(self, layer: int) -> QuerySource | None:
        """Return the source of the query with which `layer` selects tokens, or None if it selects none in this step."""
        if layer not in self.selecting:
            return None
        return source_between(self.policy.query_source, self.geometry.between(layer))

    @property
    def padded_size(self) -> int:
        """Number of sequences in a step with padding.

        In hybrid models, padding needs a free slot of recurrent state. If there is none, the batch is not padded, so
        that no memory must be allocated for padding.
        """
        full = self.states is not None and self.states.spare is None
        return len(self.sequences) if full else padded_batch(len(self.sequences))

    @property
    def states(self) -> StateSlots | None:
        """The slots that contain the recurrent states, or None if the model has no recurrent state."""
        return self.sequences[0].state_slots

    @property
    def state_slots(self) -> list[int]:
        """Slot of each sequence's recurrent state. Empty if the model has no recurrent state."""
        return [] if self.states is None else [s.state_slot for s in self.sequences]

    def state(self) -> RecurrentState | None:
        return None if self.states is None else self.states.view(self.state_slots)

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
"""Minimum number of bytes that a shared run must save so that it is computed separately.

Each shared run costs an additional matrix product and a merge. The value was measured on one CPU thread.
"""

NEVER_SHARE = 1 << 62
"""Value of `min_saved` that disables shared runs."""


@dataclass(frozen=True)
class SharedRun:
    """Token slots, in whole blocks, that the sequences [first, stop) of the batch share.

    The KV of the run is fetched through the block table of sequence `first`.
    """

    first: int
    stop: int
    tokens: range


@dataclass(frozen=True)
class Sharing:
    """Shared prefixes of a batch.

    Attributes:
        order: The *tree order*, a permutation of the batch in which sequences that share a block are adjacent.
        runs: Shared runs that are large enough for a separate matrix product. The runs of each sequence are in order
            and without gaps, beginning at slot 0.
        private: For each sequence in tree order, the first slot after its shared runs.
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
        """Find the shared prefixes by comparing block ids.

        `token_bytes` is the size of the K and V of one token in one layer. Runs that would save less than `min_saved`
        bytes are omitted.
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
        """Return the part of `visible` that is not in a shared run. `visible` must begin at slot 0.

        `b` is the index of the sequence in tree order.
        """
        start = self.private[b]
        recent = range(max(start, visible.recent.start), visible.recent.stop)
        return VisibleTokens(range(start, start), range(start, recent.start), recent)


def _branches(blocks: Seq[list[int]], first: int, stop: int, depth: int) -> list[tuple[int, int]]:
    """Return the groups [a, b) of two or more sequences in [first, stop) that have the same block at index `depth`."""
    groups = groupby(range(first, stop), key=lambda i: blocks[i][depth] if depth < len(blocks[i]) else ~i)
    slices = [(members[0], members[-1] + 1) for members in (list(group) for _, group in groups)]
    return [(a, b) for a, b in slices if b - a > 1]


def _collect_runs(
    blocks: Seq[list[int]], first: int, stop: int, start: int, depth: int, min_saved: int, runs: list[SharedRun]
) -> None:
    """Append the shared runs of the sequences [first, stop) to `runs`. They must share the block at index `depth`.

    Blocks before index `start` belong to earlier runs. A run that would save fewer than `min_saved` token reads is
    omitted. Its blocks then become part of runs with fewer sequences, or stay private.
    """
    low, high = blocks[first], blocks[stop - 1]
    # Sequences are in lexicographic order, so a prefix that the first and the last sequence share is shared by all.
    end = depth + 1
    while end < min(len(low), len(high)) and low[end] == high[end]:
        end += 1
    if _saved_reads(stop - first, (end - start) * BLOCK_SIZE) >= min_saved:
        runs.append(SharedRun(first, stop, range(start * BLOCK_SIZE, end * BLOCK_SIZE)))
        start = end
    for a, b in _branches(blocks, first, stop, end):
        _collect_runs(blocks, a, b, start, end, min_saved, runs)


def _saved_reads(sequences: int, tokens: int) -> int:
    # With two or three sequences, the joint product is less efficient, so only a quarter of the saved reads count.
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
