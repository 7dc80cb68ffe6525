"""Inputs of a batched decode step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from ..core import KVPart, ModelGeometry, VisibleTokens
from ..kernels import dispatch
from ..kernels.h2d_copy import copy_into
from ..kernels.pointer_table import PointerTable
from ..policies.base import Policy
from ..policies.infinigen.key_lists import KeyLists
from ..policies.rule import CandidateSpans, Rule
from ..transfer.residency import resident_index, resident_range
from ..transfer.row_lists import RowLists
from .batch import DecodeBatch

# Slot and visible range of padding rows, which do not belong to a sequence.
NO_SLOT = -1
NO_TOKENS = VisibleTokens(range(0), range(0), range(0))


class StepShape(NamedTuple):
    """Properties of a batch that determine the kernel launches of a step."""

    size: int  # number of sequences, including padding
    capacity: int  # maximum length of a sequence in tokens
    # Whether sequences share blocks. If so, selected tokens in shared blocks are fetched only once.
    overlapping: bool = False
    # Whether there are shared runs. If so, layers that attend to all tokens fetch shared tokens only once.
    has_shared_runs: bool = False


@dataclass(frozen=True)
class ResidentSpans:
    """Index range of the visible tokens in the resident KV, for all layers with the same sliding window."""

    newest: torch.Tensor  # index of the newest token in the resident KV, int64 `[B]`
    starts: torch.Tensor  # first visible index for each KV head, int32 `[P]`, where P = B * Hkv
    stops: torch.Tensor  # end (exclusive) of the visible indices for each KV head, int32 `[P]`
    zero_counts: torch.Tensor  # zeros, used as counts by layers that fetch no tokens, int32 `[P]`


class StepInputs:
    """Inputs for all decode steps with the same `StepShape`, at fixed addresses. `load` writes them before each step.

    Smaller batches are padded with sequences that cannot see any tokens and whose KV is not stored.
    """

    def __init__(self, policy: Policy, rows: RowLists, rule: Rule, geometry: ModelGeometry, shape: StepShape) -> None:
        device, size, capacity = rows.device, shape.size, shape.capacity
        self.rows, self.shape, self.size, self.capacity = rows, shape, size, capacity
        self._rule, self._heads = rule, geometry.kv_heads
        layers = range(geometry.layers)
        selecting = [layer for layer in geometry.kv_layers if layer not in policy.dense_layers]
        self._selecting = selecting[0]
        # One layer for each window size, and one for each group of layers whose KV is in the same blocks.
        self._by_window = geometry.layer_of_window
        self._by_group = {rows.group(layer): layer for layer in layers}
        self._layers = {self._selecting, *self._by_window.values(), *self._by_group.values()}
        self._sizes = {w: geometry.resident(layer, policy.sinks, policy.recent) for w, layer in self._by_window.items()}
        self.keys = KeyLists(rule, selecting, size, capacity, device)
        rows.keep_working_sets(selecting)
        lists, windows, groups = size * geometry.kv_heads, len(self._by_window), len(self._by_group)
        self._heads_of = {window: geometry.rows(layer).kv_heads for window, layer in self._by_window.items()}
        resident_sizes = [size * heads for heads in self._heads_of.values() for _ in ("starts", "stops")]
        written = [rows.row_count(group) for group in self._by_group]
        numbers = [size, size, size if geometry.states else 0, lists, *written, *[size] * windows]
        bounds = [lists, lists, size, size, *resident_sizes]
        self._newest = torch.zeros(sum(numbers), dtype=torch.int64, device=device)
        self._bounds = torch.zeros(sum(bounds), dtype=torch.int32, device=device)
        # For the newest tokens: ids, positions and slots of recurrent state, all int64 `[B]`, slots per list `[P]`, and
        # row ids per layer group (`rows_of`).
        self.tokens, self.positions, self.state_slots, self.slots_by_head, *parts = self._newest.split(numbers)
        self.newest_rows = dict(zip(self._by_group, parts[:groups], strict=True))
        starts, stops, limits, contexts, *spans = self._bounds.split(bounds)
        # Candidates in layers that have no sliding window.
        self.candidates = CandidateSpans(starts, stops, limits, contexts, capacity, rule.max_limit(capacity))
        parts_by_window = zip(self._by_window, parts[groups:], spans[::2], spans[1::2], strict=True)
        self.resident = {
            window: ResidentSpans(newest, first, stop, torch.zeros_like(stop))
            for window, newest, first, stop in parts_by_window
        }

    def load(self, batch: DecodeBatch) -> None:
        """Write the tokens, positions and visible ranges of a batch, and the addresses of its KV and scoring keys."""
        padding, heads = self.size - len(batch.sequences), self._heads
        padded = [*batch.sequences, *[batch.sequences[0]] * padding]
        slots = [s.slots.newest for s in padded]
        keys = [s.state.scoring_keys for s in padded]
        self.rows.hold([s.blocks for s in padded], padding)
        new_tables = self.keys.load([scoring_keys for scoring_keys in keys if scoring_keys is not None], slots)
        if new_tables is not None:
            copy_into(new_tables, self.keys.pointer_tables)
        newest = {layer: batch.slots[layer] + padding * [NO_SLOT] for layer in self._layers}
        numbers = [values + padding * [0] for values in (batch.tokens, batch.positions)]
        spare = None if batch.states is None else batch.states.spare
        numbers.append(batch.state_slots + ([] if spare is None else padding * [spare]))
        numbers.append([slot for slot in newest[self._selecting] for _ in range(heads)])
        numbers += [self.rows.rows_of(group, newest[layer]) for group, layer in self._by_group.items()]
        visible = batch.visible[self._selecting] + padding * [NO_TOKENS]
        bounds = CandidateSpans.bounds(visible, heads, self._rule)
        for window, layer in self._by_window.items():
            layer_visible = batch.visible[layer] + padding * [NO_TOKENS]
            sizes = self._sizes[window]
            numbers.append([NO_SLOT if slot == NO_SLOT else resident_index(slot, *sizes) for slot in newest[layer]])
            bounds += self._resident_bounds(layer_visible, *sizes, self._heads_of[window])
        copy_into(torch.tensor([*chain.from_iterable(numbers)]), self._newest)
        copy_into(torch.tensor([*chain.from_iterable(bounds)], dtype=torch.int32), self._bounds)

    def _resident_bounds(self, visible: Seq[VisibleTokens], sinks: int, recent: int, heads: int) -> list[list[int]]:
        spans = [span for tokens in visible if (span := resident_range(tokens, sinks, recent)) is not None]
        assert len(spans) == len(visible), "see `supports_batched_selection`"
        per_head = [span for span in spans for _ in range(heads)]
        return [[span.start for span in per_head], [span.stop for span in per_head]]

    def attention_weights(
        self, q: torch.Tensor, resident: PointerTable, fetched: KVPart, tokens: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's attention weights by token index and a mask of the attended tokens, both `[P, capacity]`.

        Args:
            q: Scaled queries `[P, G, d]`, where P = B * Hkv.
            resident: Resident KV.
            fetched: Fetched KV `[P, n, d]` and its counts.
            tokens: Token indices of the fetched KV `[P, n]`.
            lse: Log-sum-exp `[P, G]` of the attention scores.
        """
        (sinks, recent), lists, spans = self._sizes[None], len(q), self.resident[None]
        first, stop = spans.starts.unsqueeze(1), spans.stops.unsqueeze(1)
        resident_kv = dispatch.read_lists(resident, resident.tensors[0].shape[1], stop[:: self._heads, 0])
        slot = torch.arange(resident_kv.shape[1], device=q.device)
        newest = self.slots_by_head.unsqueeze(1)
        # Each slot of the ring buffer contains the last token t <= newest for which t = slot (mod recent).
        resident_tokens = torch.where(slot < sinks, slot, newest - (newest - slot) % recent)
        fetched_index = torch.arange(tokens.shape[1], device=q.device)
        assert fetched.counts is not None
        valid = torch.cat(((slot >= first) & (slot < stop), fetched_index < fetched.counts.unsqueeze(1)), dim=1)
        resident_keys = resident_kv.unflatten(0, (self.size, -1, self._heads))[:, 0].flatten(0, 1)
        keys = torch.cat((resident_keys, fetched.k), dim=1).to(q.dtype)
        weights = (torch.bmm(q, keys.transpose(1, 2)) - lse.unsqueeze(2)).exp().sum(1).masked_fill(~valid, 0)
        index = torch.where(valid, torch.cat((resident_tokens, tokens), dim=1), self.capacity)
        dense = weights.new_zeros(lists, self.capacity + 1).scatter_(1, index, weights)
        return dense[:, :-1], torch.zeros_like(dense, dtype=torch.bool).scatter_(1, index, True)[:, :-1]

    def release(self) -> None:
        self.rows.release()
        self.keys.release()

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture the step. This requires that the host does not copy any KV."""
        return self.rows.in_place
