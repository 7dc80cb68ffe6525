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
from ..policies.rule import CandidateSpans, Rule, candidate_ranges
from ..transfer.residency import resident_index, resident_range
from ..transfer.row_lists import RowLists
from .batch import DecodeBatch
from .sequence import Sequence

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
    # Whether the device has copies of all blocks. If so, layers that attend to all tokens read these copies in place.
    on_device: bool = False


@dataclass(frozen=True)
class ResidentSpans:
    """Index range of the visible tokens in the resident KV, for all layers with the same sliding window."""

    newest: torch.Tensor  # index of the newest token in the resident KV, int64 `[B]`
    starts: torch.Tensor  # first visible index for each KV head, int32 `[P]`, where P = B * Hkv
    stops: torch.Tensor  # end (exclusive) of the visible indices for each KV head, int32 `[P]`
    zero_counts: torch.Tensor  # zeros, used as counts by layers that fetch no tokens, int32 `[P]`


@dataclass(frozen=True)
class SelectionInputs:
    """Inputs of the layers that select tokens."""

    rule: Rule
    keys: KeyLists
    slots: torch.Tensor  # slot of the newest token for each list, int64 `[P]`
    candidates: CandidateSpans

    def load(
        self, sequences: Seq[Sequence], newest: Seq[int], visible: Seq[VisibleTokens]
    ) -> tuple[list[int], list[list[int]]]:
        """Set the scoring keys of the batch. Return the values of `slots`, and those of the limits in `candidates`.

        `newest` contains the slot of the newest token of each sequence, or `NO_SLOT` for padding.
        """
        keys = [s.state.scoring_keys for s in sequences]
        own_slots = [s.slots.newest for s in sequences]
        new_tables = self.keys.load([scoring_keys for scoring_keys in keys if scoring_keys is not None], own_slots)
        if new_tables is not None:
            copy_into(new_tables, self.keys.pointer_tables)
        heads = len(self.slots) // len(sequences)
        return [slot for slot in newest for _ in range(heads)], CandidateSpans.bounds(visible, heads, self.rule)[2:]


class StepInputs:
    """Inputs for all decode steps with the same `StepShape`, at fixed addresses. `load` writes them before each step.

    Smaller batches are padded with sequences that cannot see any tokens and whose KV is not stored. `selection` is None
    if all layers attend to all tokens.
    """

    def __init__(self, policy: Policy, rows: RowLists, geometry: ModelGeometry, shape: StepShape) -> None:
        device, size, capacity = rows.device, shape.size, shape.capacity
        self.rows, self.shape, self.size, self.capacity = rows, shape, size, capacity
        self._heads, self._full_layer = geometry.kv_heads, geometry.layer_of_window[None]
        layers = range(geometry.layers)
        selecting = [layer for layer in geometry.kv_layers if layer not in policy.dense_layers]
        # One layer for each window size, and one for each group of layers whose KV is in the same blocks.
        self._by_window = geometry.layer_of_window
        self._by_group = {rows.group(layer): layer for layer in layers}
        self._layers = {*self._by_window.values(), *self._by_group.values()}
        self._sizes = {w: geometry.resident(layer, policy.sinks, policy.recent) for w, layer in self._by_window.items()}
        rows.keep_working_sets(selecting)
        lists, windows, groups = size * geometry.kv_heads, len(self._by_window), len(self._by_group)
        self._heads_of = {window: geometry.rows(layer).kv_heads for window, layer in self._by_window.items()}
        resident_sizes = [size * heads for heads in self._heads_of.values() for _ in ("starts", "stops")]
        written = [rows.row_count(group) for group in self._by_group]
        rule = policy.rule if selecting else None
        numbers = [size, size, size if geometry.states else 0, *written, *[size] * windows, *([lists] if rule else [])]
        bounds = [lists, lists, *resident_sizes, *([size, size] if rule else [])]
        self._newest = torch.zeros(sum(numbers), dtype=torch.int64, device=device)
        self._bounds = torch.zeros(sum(bounds), dtype=torch.int32, device=device)
        # For the newest tokens: ids, positions and slots of recurrent state, all int64 `[B]`, and row ids per layer
        # group (`rows_of`).
        self.tokens, self.positions, self.state_slots, *parts = self._newest.split(numbers)
        self.newest_rows = dict(zip(self._by_group, parts[:groups], strict=True))
        # Range of the candidates of each list in layers that have no sliding window, int32 `[P]`.
        self.starts, self.stops, *spans = self._bounds.split(bounds)
        newest, firsts, stops = parts[groups : groups + windows], spans[: 2 * windows : 2], spans[1 : 2 * windows : 2]
        self.resident = {
            window: ResidentSpans(own, first, stop, torch.zeros_like(stop))
            for window, own, first, stop in zip(self._by_window, newest, firsts, stops, strict=True)
        }
        self.selection: SelectionInputs | None = None
        if rule is not None:
            (slots,), (limits, contexts) = parts[groups + windows :], spans[2 * windows :]
            candidates = CandidateSpans(self.starts, self.stops, limits, contexts, capacity, rule.max_limit(capacity))
            keys = KeyLists(rule, selecting, size, capacity, device)
            self.selection = SelectionInputs(rule, keys, slots, candidates)

    def load(self, batch: DecodeBatch) -> None:
        """Write the tokens, positions and visible ranges of a batch, and the addresses of its KV and scoring keys."""
        padding = self.size - len(batch.sequences)
        padded = [*batch.sequences, *[batch.sequences[0]] * padding]
        self.rows.hold([s.blocks for s in padded], padding)
        newest = {layer: batch.slots[layer] + padding * [NO_SLOT] for layer in self._layers}
        numbers = [values + padding * [0] for values in (batch.tokens, batch.positions)]
        spare = None if batch.states is None else batch.states.spare
        numbers.append(batch.state_slots + ([] if spare is None else padding * [spare]))
        numbers += [self.rows.rows_of(group, newest[layer]) for group, layer in self._by_group.items()]
        visible = batch.visible[self._full_layer] + padding * [NO_TOKENS]
        bounds = candidate_ranges(visible, self._heads)
        for window, layer in self._by_window.items():
            layer_visible = batch.visible[layer] + padding * [NO_TOKENS]
            sizes = self._sizes[window]
            numbers.append([NO_SLOT if slot == NO_SLOT else resident_index(slot, *sizes) for slot in newest[layer]])
            bounds += self._resident_bounds(layer_visible, *sizes, self._heads_of[window])
        if self.selection is not None:
            slots, limits = self.selection.load(padded, newest[self._full_layer], visible)
            numbers, bounds = [*numbers, slots], bounds + limits
        copy_into(torch.tensor([*chain.from_iterable(numbers)]), self._newest)
        copy_into(torch.tensor([*chain.from_iterable(bounds)], dtype=torch.int32), self._bounds)

    def _resident_bounds(self, visible: Seq[VisibleTokens], sinks: int, recent: int, heads: int) -> list[list[int]]:
        spans = [span for tokens in visible if (span := resident_range(tokens, sinks, recent)) is not None]
        assert len(spans) == len(visible), "see `supports_batched_steps`"
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
        assert self.selection is not None
        newest = self.selection.slots.unsqueeze(1)
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
        if self.selection is not None:
            self.selection.keys.release()

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture the step. This requires that the host does not copy any KV."""
        return self.rows.in_place
