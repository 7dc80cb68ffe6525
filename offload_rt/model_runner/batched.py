"""Batched selection: one chain of kernel launches per layer serves all sequences, and the host never waits.

    append     newest KV -> resident KV, newest KV -> pool, newest keys -> scoring keys (KV -> approximate KV)
    fetch      scores of all sequences -> tokens and counts -> KV (prefetch stream)
    attend     resident and fetched KV -> out; approximate KV of tokens that were not selected -> out

Lengths, slots and address tables of a step are in `StepInputs`: tensors at fixed addresses, written before the step.
Shapes depend on the number of sequences B and the bucket of the longest context. There are P = B * Hkv lists, one per
sequence and KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from ..core import KVPart, ModelGeometry, VisibleTokens, bucket
from ..kernels import dispatch
from ..kernels.dispatch import attend_kept
from ..kernels.h2d_copy import copy_into
from ..kernels.pointer_table import PointerTable
from ..policies.base import Policy
from ..policies.infinigen.key_lists import KeyLists
from ..policies.rule import Rule, Spans
from ..transfer.residency import place, places
from ..transfer.row_lists import PendingBatchFetch, RowLists
from .attention import give_to_sinks, scores_lse
from .batch import DecodeBatch, StepMode
from .per_sequence import PerSequenceMode, append_each
from .trace import TransferUse


def selects_together(batch: DecodeBatch) -> bool:
    """Return whether the policy can select for the whole batch at once, and every sequence is long enough to select.

    False for models with soft-capped scores, which attend sequence by sequence.
    """
    selects = any(batch.selects(layer) for layer in range(batch.geometry.layers)) and batch.geometry.softcap is None
    ready = all(s.position > 0 and s.state.scoring_keys and not batch.sees_all(s) for s in batch.sequences)
    return batch.policy.rule is not None and selects and ready


# slot and visible range of padding rows, which stand for no sequence
NOWHERE = -1
NOTHING = VisibleTokens(range(0), range(0), range(0))


class StepShape(NamedTuple):
    """Properties of a batch on which the launches of a step depend.

    Attributes:
        size: Number of sequences, including padding.
        capacity: Upper bound of the tokens of a sequence.
        overlapping: Whether sequences share blocks. Selected tokens of shared blocks are then fetched once.
        joined: Whether sequences share so many blocks that layers that attend to all tokens also fetch shared tokens
            only once.
    """

    size: int
    capacity: int
    overlapping: bool = False
    joined: bool = False


class StepInputs:
    """Kernel inputs of the steps of one shape, at fixed addresses.

    `load` writes the values before a step. A batch with fewer than `size` sequences is padded with rows that see no
    tokens and whose KV is not stored.
    """

    def __init__(self, policy: Policy, rows: RowLists, rule: Rule, geometry: ModelGeometry, shape: StepShape) -> None:
        device, size, capacity = rows.device, shape.size, shape.capacity
        self.rows, self.shape, self.size, self.capacity = rows, shape, size, capacity
        self._rule, self._policy = rule, policy
        self._heads = geometry.kv_heads
        selecting = [layer for layer in range(geometry.layers) if layer not in policy.dense_layers]
        self._selecting = selecting[0]
        self.keys = KeyLists(rule, selecting, size, capacity, device)
        lists = size * geometry.kv_heads
        self._newest = torch.zeros(4 * size + lists, dtype=torch.int64, device=device)
        self._bounds = torch.zeros(4 * lists + 2 * size, dtype=torch.int32, device=device)
        # Newest tokens: ids, positions, slots and indices in the resident KV, int64 `[B]` each; slots per list `[P]`.
        parts = self._newest.split([size, size, size, size, lists])
        self.tokens, self.positions, self.slots, self.places, self.slots_by_head = parts
        starts, stops, limits, contexts, *resident = self._bounds.split([lists, lists, size, size, lists, lists])
        # Candidates of layers without a sliding window.
        self.candidates = Spans(starts, stops, limits, contexts, capacity, rule.most(capacity))
        # Start and end of the visible entries in the resident KV, int32 `[P]` each.
        self.resident = resident[0], resident[1]

    def load(self, batch: DecodeBatch) -> None:
        """Write the inputs of a step: addresses of KV and scoring keys, and visible tokens, of each sequence."""
        padding = self.size - len(batch.sequences)
        held = [*batch.sequences, *[batch.sequences[0]] * padding]
        slots = [s.slots.newest for s in held]
        keys = [s.state.scoring_keys for s in held]
        self.rows.hold([s.blocks for s in held])
        moved = self.keys.hold([own for own in keys if own is not None], slots)
        if moved is not None:
            copy_into(moved, self.keys.tables)
        sinks, recent, heads = self._policy.sinks, self._policy.recent, self._heads
        slots[len(batch.sequences) :] = padding * [NOWHERE]
        by_head = [slot for slot in slots for _ in range(heads)]
        resident_at = [NOWHERE if slot == NOWHERE else place(slot, sinks, recent) for slot in slots]
        tokens, positions = (own + padding * [0] for own in (batch.tokens, batch.positions))
        copy_into(torch.tensor([*tokens, *positions, *slots, *resident_at, *by_head]), self._newest)
        visible = batch.visible(self._selecting) + padding * [NOTHING]
        resident = [span for seen in visible for span in [places(seen, sinks, recent)] * heads]
        candidates = chain.from_iterable(Spans.numbers(visible, heads, self._rule))
        bounds = [*candidates, *(span.start for span in resident), *(span.stop for span in resident)]
        copy_into(torch.tensor(bounds, dtype=torch.int32), self._bounds)

    def attended(
        self, q: torch.Tensor, resident: PointerTable, fetched: KVPart, tokens: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's attention weights by token index, `[P, capacity]`, and whether each token was attended.

        A list belongs to one KV head of one sequence; P = B * Hkv.

        Args:
            q: Scaled queries `[P, G, d]`.
            resident: KV entries that stay on the device.
            fetched: Fetched KV `[P, n, d]` with its counts.
            tokens: Token indices of the fetched KV `[P, n]`.
            lse: Log-sum-exp `[P, G]` of the attention scores.
        """
        (sinks, recent), lists = (self._policy.sinks, self._policy.recent), len(q)
        first, stop = (x.unsqueeze(1) for x in self.resident)
        kept = dispatch.read_lists(resident, resident.tensors[0].shape[1], stop[:: self._heads, 0])
        at = torch.arange(kept.shape[1], device=q.device)
        newest = self.slots_by_head.unsqueeze(1)
        # Slot `at` of the ring buffer has the last token t <= newest with t = at (mod recent).
        there = torch.where(at < sinks, at, newest - (newest - at) % recent)
        place = torch.arange(tokens.shape[1], device=q.device)
        assert fetched.counts is not None
        valid = torch.cat(((at >= first) & (at < stop), place < fetched.counts.unsqueeze(1)), dim=1)
        own = kept.unflatten(0, (-1, 2, self._heads))[:, 0].flatten(0, 1)
        keys = torch.cat((own, fetched.k), dim=1).to(q.dtype)
        weights = (torch.bmm(q, keys.transpose(1, 2)) - lse.unsqueeze(2)).exp().sum(1).masked_fill(~valid, 0)
        index = torch.where(valid, torch.cat((there, tokens), dim=1), self.capacity)
        dense = weights.new_zeros(lists, self.capacity + 1).scatter_(1, index, weights)
        return dense[:, :-1], torch.zeros_like(dense, dtype=torch.bool).scatter_(1, index, True)[:, :-1]

    def release(self) -> None:
        """Drop all references to sequences. `load` must be called before the next use."""
        self.rows.release()
        self.keys.release()

    @property
    def static(self) -> bool:
        """Whether kernel launches depend only on the tensors of this object, so that they can be captured.

        This requires that the host copies no KV and that there is no working set.
        """
        return self.rows.in_place and not self.rows.working


class BatchedMode:
    """Selection mode that selects for the whole batch at once. Its launches depend only on `inputs` and the model."""

    def __init__(self, batch: DecodeBatch, inputs: StepInputs, *, dense: bool = False) -> None:
        """Create the mode for one step of `batch`.

        If `dense`, also fetch dense layers (which attend to all tokens) with one gather for the batch.
        """
        self._batch, self._inputs, self._dense = batch, inputs, dense
        self.selected: list[LayerSelection] = []
        self._newest: torch.Tensor | None = None

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and positions on the device, int64 `[B]` each."""
        return self._inputs.tokens, self._inputs.positions

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the newest k and v `[Hkv, B, d]` with one launch for KV and one launch for scoring keys.

        KV of sliding-window layers is in other blocks and is stored sequence by sequence.
        """
        inputs = self._inputs
        if self._batch.geometry.windows[layer] is not None:
            append_each(self._batch, layer, k, v)
            return
        if self._newest is None:
            self._newest = inputs.rows.rows_of(inputs.slots)
        k, v = (rows.transpose(0, 1).reshape(-1, rows.shape[2]) for rows in (k, v))
        inputs.rows.append(layer, k, v, inputs.places, self._newest)
        if self._batch.selects(layer):
            inputs.keys.append(layer, k, v, inputs.slots_by_head)

    def fetch(self, layer: int, q: torch.Tensor) -> BatchedFetch:
        """Select tokens with q `[H, B, d]` and start one gather of their KV. The counts stay on the device."""
        batch, inputs = self._batch, self._inputs
        tokens, counts = inputs.keys.select(layer, q, inputs.candidates)
        pending = inputs.rows.fetch(layer, tokens, counts, overlapping=inputs.shape.overlapping)
        self.selected.append(LayerSelection(layer, tokens, counts[:: inputs.rows.heads], pending.tally))
        return BatchedFetch(batch, inputs, layer, counts, pending, tokens)

    def fetch_all(self, layer: int) -> BatchedFetch | None:
        """Start one gather of all candidates of a layer that attends to all tokens, padded to the capacity.

        Return None if this mode does not fetch such layers (`dense` is False).
        """
        batch, inputs = self._batch, self._inputs
        if not self._dense:
            return None
        candidates = inputs.candidates
        slots = torch.arange(inputs.capacity, device=candidates.starts.device)
        tokens = (slots + candidates.starts.unsqueeze(1)).clamp_(max=inputs.capacity - 1)
        counts = candidates.stops - candidates.starts
        pending = inputs.rows.fetch(layer, tokens, counts, overlapping=inputs.shape.joined)
        if pending.tally is not None:
            self.selected.append(LayerSelection(layer, tokens, counts[:: inputs.rows.heads], pending.tally))
        return BatchedFetch(batch, inputs, layer, counts, pending)

    def finish(self) -> None:
        """Record the step in the traces. If eviction or a recorder needs the selected tokens, wait for the device."""
        batch, rows = self._batch, self._inputs.rows
        seeing_all = batch.geometry.layers - len(batch.geometry.sliding)
        for sequence in batch.sequences:
            sequence.trace.bytes_to_host += seeing_all * rows.token_bytes
        for selection in self.selected:
            self._enter(selection)
        entered = {selection.layer for selection in self.selected}
        for layer in batch.policy.dense_layers - entered if self._dense else ():
            for sequence, visible in zip(batch.sequences, batch.visible(layer), strict=True):
                sequence.trace.bytes_requested += len(visible.candidates) * rows.token_bytes
                sequence.trace.enter_rows(layer, visible, len(visible.candidates))

    def _enter(self, selection: LayerSelection) -> None:
        """Record a layer's selection in the traces, slot tables and recorders of the sequences."""
        batch, layer, rows = self._batch, selection.layer, self._inputs.rows
        tallies = None if selection.tally is None else selection.tally.unbind()
        counts = selection.counts[: len(batch.sequences)].unbind()
        each = zip(batch.sequences, batch.visible(layer), counts, strict=True)
        for b, (sequence, visible, count) in enumerate(each):
            use = TransferUse(rows.heads, rows.pair_bytes, None if tallies is None else tallies[b])
            sequence.trace.enter_selection(layer, visible, count, use)
            recorder = sequence.trace.recorder
            if sequence.slots.listens or recorder is not None:
                slots = selection.tokens[b * rows.heads : (b + 1) * rows.heads, : int(count)]
                sequence.slots.selected(layer, slots)
                if recorder is not None:
                    recorder.selected(sequence.position, layer, sequence.slots.positions(layer, slots))


@dataclass(frozen=True)
class LayerSelection:
    """Token indices that a layer selected, int64 `[P, n]`, padded, in P = B * Hkv lists.

    The first `counts[p]` entries of list p are valid. If a layer that attends to all tokens fetches shared tokens only
    once, all candidates count as selected. `tally` has the numbers of transferred entries and of working-set hits
    (`PendingBatchFetch.tally`).
    """

    layer: int
    tokens: torch.Tensor
    counts: torch.Tensor
    tally: torch.Tensor | None


@dataclass(frozen=True)
class BatchedFetch:
    """A pending fetch of a whole batch. The first `counts[p]` entries of each list are valid.

    `selected` `[P, n]` has the token indices of the entries if the layer selected them. P = B * Hkv.
    """

    batch: DecodeBatch
    inputs: StepInputs
    layer: int
    counts: torch.Tensor
    pending: PendingBatchFetch
    selected: torch.Tensor | None = None

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """Return the attention output `[B, H * d]` of q `[H, B, d]` over resident, fetched and approximate KV."""
        batch, layer, inputs = self.batch, self.layer, self.inputs
        k, v = self.pending.wait()
        grouped = q.transpose(0, 1).reshape(len(k), -1, q.shape[2])
        scale = batch.geometry.scales[layer]
        out, lse = attend_kept(grouped, inputs.rows.resident(layer), *inputs.resident, k, v, self.counts, scale)
        for b, sequence in enumerate(batch.sequences):
            if sequence.trace.measures_missed and batch.selects(layer):
                keys = sequence.keys(layer, batch.visible(layer)[b].all)
                attended = lse.view(inputs.size, -1)[b]
                sequence.trace.enter_missed_mass(layer, attended, scores_lse(q[:, b], keys, scale))
        if self.selected is not None and batch.policy.wants_weights:
            fetched = KVPart(k, v, self.counts)
            seen = inputs.attended(
                grouped.to(lse.dtype) * scale, inputs.rows.resident(layer), fetched, self.selected, lse
            )
            inputs.keys.attended(layer, inputs.candidates, *seen)
        if self.selected is not None:
            chosen = self.selected, self.counts
            out, lse = inputs.keys.merge_approximate(layer, q, inputs.candidates, chosen, (out, lse))
        if (sinks := batch.adapter.sinks(layer)) is not None:
            out = give_to_sinks(out, lse, sinks.view(-1, lse.shape[1]).repeat(inputs.size, 1))
        return out.to(q.dtype).view(inputs.size, -1)


MAX_CACHED = 8  # maximum number of combinations of batch size and bucket whose inputs and graphs are kept


class StepModes:
    """Chooses the selection mode of each step. The inputs of the latest batch sizes and context buckets are cached."""

    def __init__(self) -> None:
        self.inputs: dict[StepShape, StepInputs] = {}

    def mode(self, batch: DecodeBatch) -> StepMode:
        """Return a `BatchedMode` if policy and transfer support it, else a `PerSequenceMode`."""
        inputs = self.load(batch)
        return PerSequenceMode(batch) if inputs is None else BatchedMode(batch, inputs)

    def load(self, batch: DecodeBatch, size: int | None = None) -> StepInputs | None:
        """Load the batch into inputs for `size` sequences and return them.

        None means the number of sequences in the batch. Return None if the policy or the transfer does not support
        batched selection.
        """
        rule, transfer = batch.policy.rule, batch.transfer.batched
        if rule is None or transfer is None or not selects_together(batch):
            return None
        size = len(batch.sequences) if size is None else size
        capacity, sharing = bucket(max(s.slots.context for s in batch.sequences)), batch.sharing
        shape = StepShape(size, capacity, sharing.overlapping, bool(sharing.segments))
        if shape not in self.inputs:
            rows = transfer.row_lists(size, capacity)
            self.inputs[shape] = StepInputs(batch.policy, rows, rule, batch.geometry, shape)
        self.inputs[shape] = self.inputs.pop(shape)
        while len(self.inputs) > MAX_CACHED:
            self.inputs.pop(next(iter(self.inputs)))
        self.inputs[shape].load(batch)
        return self.inputs[shape]

    def release(self) -> None:
        """Drop all references to sequences, which may have ended."""
        for inputs in self.inputs.values():
            inputs.release()
