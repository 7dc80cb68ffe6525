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

import torch

from ..core import KVPart, bucket
from ..kernels.dispatch import attend_kept
from ..transfer.row_lists import PendingBatchFetch
from .attention import give_to_sinks, scores_lse
from .batch import DecodeBatch, LayerFetch, StepMode
from .per_sequence import PerSequenceMode
from .step_inputs import StepInputs, StepShape
from .trace import TransferUse


def selects_together(batch: DecodeBatch) -> bool:
    """Return whether the policy can select for the whole batch at once, and every sequence is long enough to select.

    False for models with soft-capped scores, which attend sequence by sequence.
    """
    geometry = batch.geometry
    selects = any(batch.selects(layer) for layer in range(geometry.layers)) and geometry.softcap is None
    ready = all(s.position > 0 and s.state.scoring_keys and not batch.sees_all(s) for s in batch.sequences)
    windows = {geometry.windows[layer]: layer for layer in geometry.sliding}
    return batch.policy.rule is not None and selects and ready and all(map(batch.adjacent, windows.values()))


class BatchedMode:
    """Selection mode that selects for the whole batch at once. Its launches depend only on `inputs` and the model."""

    def __init__(self, batch: DecodeBatch, inputs: StepInputs, *, dense: bool = False) -> None:
        """Create the mode for one step of `batch`.

        If `dense`, also fetch dense layers (which attend to all tokens) with one gather for the batch.
        """
        self._batch, self._inputs, self._dense = batch, inputs, dense
        self.selected: list[LayerSelection] = []
        self._newest: dict[int, torch.Tensor] = {}

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and positions on the device, int64 `[B]` each."""
        return self._inputs.tokens, self._inputs.positions

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the newest k and v `[Hkv, B, d]` with two launches for KV and one for scoring keys."""
        inputs, window = self._inputs, self._batch.geometry.windows[layer]
        k, v = (rows.transpose(0, 1).reshape(-1, rows.shape[2]) for rows in (k, v))
        group = inputs.rows.group(layer)
        if group not in self._newest:
            # A copy, because the next `load` does not wait for the write-back stream, which reads the rows.
            self._newest[group] = inputs.newest_rows[group].clone()
        inputs.rows.append(layer, k, v, inputs.resident[window].places, self._newest[group])
        if self._batch.selects(layer):
            inputs.keys.append(layer, k, v, inputs.slots_by_head)

    def fetch(self, layer: int, q: torch.Tensor) -> BatchedFetch:
        """Select tokens with q `[H, B, d]` and start one gather of their KV. The counts stay on the device."""
        batch, inputs = self._batch, self._inputs
        tokens, counts = inputs.keys.select(layer, q, inputs.candidates)
        pending = inputs.rows.fetch(layer, tokens, counts, overlapping=inputs.shape.overlapping)
        self.selected.append(LayerSelection(layer, tokens, counts[:: inputs.rows.heads], pending.tally))
        return BatchedFetch(batch, inputs, layer, counts, pending, tokens)

    def fetch_all(self, layer: int) -> LayerFetch | None:
        """Start one gather of all candidates of a layer that attends to all tokens, padded to the capacity.

        Return None if this mode does not fetch such layers (`dense` is False). In sliding-window layers, all visible KV
        is resident, so no gather is needed.
        """
        batch, inputs = self._batch, self._inputs
        if batch.geometry.windows[layer] is not None:
            return WindowFetch(batch, inputs, layer)
        if not self._dense:
            return None
        candidates = inputs.candidates
        slots = torch.arange(inputs.capacity, device=candidates.starts.device)
        tokens = (slots + candidates.starts.unsqueeze(1)).clamp_(max=inputs.capacity - 1)
        counts = candidates.stops - candidates.starts
        pending = inputs.rows.fetch(layer, tokens, counts, overlapping=inputs.shape.joined, cached=False)
        if pending.tally is not None:
            self.selected.append(LayerSelection(layer, tokens, counts[:: inputs.rows.heads], pending.tally))
        return BatchedFetch(batch, inputs, layer, counts, pending)

    def finish(self) -> None:
        """Record the step in the traces. If eviction or a recorder needs the selected tokens, wait for the device."""
        batch, rows = self._batch, self._inputs.rows
        for sequence in batch.sequences:
            sequence.trace.bytes_to_host += batch.geometry.layers * rows.token_bytes
        for selection in self.selected:
            self._enter(selection)
        entered = {selection.layer for selection in self.selected}
        for layer in batch.policy.dense_layers - entered if self._dense else batch.geometry.sliding:
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
    """The tokens that a layer selected in a step, in P = B * Hkv lists.

    `tokens` has token indices, int64 `[P, n]`, padded. The first `counts[p]` entries of list p are valid. If a layer
    that attends to all tokens fetches shared tokens only once, all candidates count as selected. `tally` has the
    numbers of transferred entries and of working-set hits (`PendingBatchFetch.tally`).
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
        out, lse = _attend(batch, inputs, layer, grouped, k, v, self.counts)
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
        return _with_sinks(batch, inputs, layer, out, lse).to(q.dtype)


@dataclass(frozen=True)
class WindowFetch:
    """A fetch of a sliding-window layer. All its visible KV is resident, so no KV is transferred."""

    batch: DecodeBatch
    inputs: StepInputs
    layer: int

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """Return the attention output `[B, H * d]` of q `[H, B, d]`."""
        batch, inputs, layer = self.batch, self.inputs, self.layer
        grouped = q.transpose(0, 1).reshape(inputs.size * batch.geometry.kv_heads, -1, q.shape[2])
        nothing = grouped.new_empty(len(grouped), 0, q.shape[2])
        out, lse = _attend(batch, inputs, layer, grouped, nothing, nothing, inputs.no_counts)
        return _with_sinks(batch, inputs, layer, out, lse).to(q.dtype)


def _attend(
    batch: DecodeBatch,
    inputs: StepInputs,
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with q `[P, G, d]` to resident KV and to the first `counts[p]` entries of k and v `[P, n, d]`.

    P = B * Hkv.
    """
    spans = inputs.resident[batch.geometry.windows[layer]]
    kept, scale = inputs.rows.resident(layer), batch.geometry.scales[layer]
    return attend_kept(q, kept, spans.starts, spans.stops, k, v, counts, scale)


def _with_sinks(
    batch: DecodeBatch, inputs: StepInputs, layer: int, out: torch.Tensor, lse: torch.Tensor
) -> torch.Tensor:
    """Return out `[P, G, d]` as `[B, H * d]`, after applying the learned attention sinks of the layer, if it has some.

    lse `[P, G]` is the log-sum-exp of the scores without sinks; P = B * Hkv.
    """
    if (sinks := batch.adapter.sinks(layer)) is not None:
        out = give_to_sinks(out, lse, sinks.view(-1, lse.shape[1]).repeat(inputs.size, 1))
    return out.view(inputs.size, -1)


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
