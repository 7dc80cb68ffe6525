"""Batched selection: each kernel serves all sequences, and the host never waits for the device.

    append     store the newest KV on the device, in the pool, in scoring keys and in approximate KV
    fetch      score all tokens, select tokens, and gather their KV (on the prefetch stream)
    attend     attend to resident and fetched KV, and merge approximate KV of all other tokens

The inputs of a step are tensors at fixed addresses (`StepInputs`). Their shapes depend on the number of sequences B and
on the bucket of the longest context. There are P = B * Hkv lists, one for each KV head of each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from ..core import KVPart, bucket
from ..kernels.decode_attention import apply_sinks, scores_lse
from ..kernels.dispatch import attend_copies, attend_resident
from ..models.recurrent import RecurrentState
from ..transfer.residency import resident_range
from ..transfer.row_lists import PendingBatchFetch
from .batch import Attend, DecodeBatch
from .decode import DecodeStep
from .per_sequence import PerSequenceMode
from .step_inputs import SelectionInputs, StepInputs, StepShape
from .trace import TransferUse


def supports_batched_steps(batch: DecodeBatch, *, on_device: bool) -> bool:
    """Return whether `BatchedMode` can compute a step. For `on_device`, see `StepShape`."""
    geometry, policy = batch.geometry, batch.policy
    attends_on_device = on_device and not batch.policy_layers
    if geometry.softcap is not None or not (attends_on_device or _selects(batch)):
        return False
    sliding = [layer for window, layer in geometry.layer_of_window.items() if window is not None]
    # In sliding-window layers, the resident KV must be contiguous.
    sizes = {layer: geometry.resident(layer, policy.sinks, policy.recent) for layer in sliding}
    return all(
        resident_range(visible, *sizes[layer]) is not None for layer in sliding for visible in batch.visible[layer]
    )


def _selects(batch: DecodeBatch) -> bool:
    # All sequences must be long enough to select tokens.
    if batch.policy.rule is None or not batch.selecting or any(batch.dense):
        return False
    return all(s.position > 0 and s.state.scoring_keys for s in batch.sequences)


class BatchedMode(PerSequenceMode):
    """Selects tokens for the whole batch at once. Kernel launches depend only on `inputs` and the model.

    If `dense` is True, the inputs may have padding. Layers that attend to all tokens then also fetch KV for the whole
    batch at once, and recurrent states are gathered from the slots in the inputs.

    Attributes:
        recurrent_layers: Decoder layers that have computed recurrent states from the slots in the inputs.
    """

    def __init__(self, batch: DecodeBatch, inputs: StepInputs, *, dense: bool = False) -> None:
        super().__init__(batch)
        self._inputs, self._dense = inputs, dense
        self.selections: list[LayerSelection] = []
        self.recurrent_layers: list[int] = []
        self._newest: dict[int, torch.Tensor] = {}

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inputs.tokens, self._inputs.positions

    def state(self) -> RecurrentState | None:
        states = self._batch.states
        if states is None or not self._dense:
            return super().state()
        return states.gather(self._inputs.state_slots, self.recurrent_layers.append)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        inputs, window = self._inputs, self._batch.geometry.windows[layer]
        newest = KVPart(k, v).map(lambda rows: rows.transpose(0, 1).reshape(-1, rows.shape[2]))
        group = inputs.rows.group(layer)
        if group not in self._newest:
            # Clone the rows, because the write-back stream reads them and the next `load` does not wait for it.
            self._newest[group] = inputs.newest_rows[group].clone()
        inputs.rows.append(layer, newest, inputs.resident[window].newest, self._newest[group])
        if layer in self._batch.selecting:
            self._selection.keys.append(layer, newest.k, newest.v, self._selection.slots)

    @property
    def _selection(self) -> SelectionInputs:
        assert self._inputs.selection is not None, "only layers that select tokens need these inputs"
        return self._inputs.selection

    def fetch(self, layer: int, q: torch.Tensor) -> Attend:
        inputs, selection = self._inputs, self._selection
        kv_layer = self._batch.geometry.kv_layer(layer)
        tokens, counts = selection.keys.select(kv_layer, q, selection.candidates)
        fetch = inputs.rows.fetch(kv_layer, tokens, counts, overlapping=inputs.shape.overlapping)
        self.selections.append(LayerSelection(layer, tokens, counts[:: inputs.rows.heads], fetch.tally))
        return partial(self._attend_batch, layer, counts, fetch, tokens)

    def fetch_all(self, layer: int) -> Attend:
        inputs = self._inputs
        if self._batch.geometry.windows[layer] is not None:  # In sliding-window layers, all visible KV is resident.
            zero_counts = inputs.resident[self._batch.geometry.windows[layer]].zero_counts
            return partial(self._attend_batch, layer, zero_counts, None, None)
        if inputs.shape.on_device:
            return partial(self._attend_on_device, layer)
        if not self._dense:
            return super().fetch_all(layer)
        # Lists are padded to the capacity, because the host does not know the counts.
        slots = torch.arange(inputs.capacity, device=inputs.starts.device)
        tokens = (slots + inputs.starts.unsqueeze(1)).clamp_(max=inputs.capacity - 1)
        counts = inputs.stops - inputs.starts
        kv_layer = self._batch.geometry.kv_layer(layer)
        fetch = inputs.rows.fetch(kv_layer, tokens, counts, overlapping=inputs.shape.has_shared_runs, cached=False)
        if fetch.tally is not None:
            self.selections.append(LayerSelection(layer, tokens, counts[:: inputs.rows.heads], fetch.tally))
        return partial(self._attend_batch, layer, counts, fetch, None)

    def finish(self) -> None:
        batch, rows = self._batch, self._inputs.rows
        for layer in self.recurrent_layers:
            assert batch.states is not None
            batch.states.add_processed(layer, batch.state_slots, 1)
        for sequence in batch.sequences:
            sequence.trace.bytes_to_host += sum(rows.token_bytes(layer) for layer in batch.geometry.kv_layers)
        for selection in self.selections:
            self._record_selection(selection)
        recorded = {selection.layer for selection in self.selections}
        for layer in batch.policy.dense_layers - recorded if self._dense else batch.geometry.sliding:
            copied = self._inputs.shape.on_device and batch.geometry.windows[layer] is None
            for sequence, visible in zip(batch.sequences, batch.visible[layer], strict=True):
                fetched = len(visible.candidates)
                sequence.trace.record_fetch(layer, visible, fetched)
                if copied:
                    sequence.trace.record_copies(layer, visible, fetched, fetched, rows.heads)
                else:
                    sequence.trace.bytes_requested += fetched * rows.token_bytes(layer)

    def _record_selection(self, selection: LayerSelection) -> None:
        batch, layer, rows = self._batch, selection.layer, self._inputs.rows
        tallies = None if selection.tally is None else selection.tally.unbind()
        counts = selection.counts[: len(batch.sequences)].unbind()
        per_sequence = zip(batch.sequences, batch.visible[layer], counts, strict=True)
        for b, (sequence, visible, count) in enumerate(per_sequence):
            use = TransferUse(rows.heads, rows.entry_bytes, None if tallies is None else tallies[b])
            sequence.trace.record_fetch(layer, visible, count, use)
            recorder = sequence.trace.recorder
            if sequence.slots.records_selected or recorder is not None:  # This waits for the device.
                slots = selection.tokens[b * rows.heads : (b + 1) * rows.heads, : int(count)]
                kv_layer = batch.geometry.kv_layer(layer)
                sequence.slots.record_selected(kv_layer, slots)
                if recorder is not None:
                    recorder.selected(sequence.position, layer, sequence.slots.positions(kv_layer, slots))

    def _attend_batch(
        self,
        layer: int,
        counts: torch.Tensor,
        fetch: PendingBatchFetch | None,
        selected: torch.Tensor | None,
        q: torch.Tensor,
    ) -> torch.Tensor:
        """Return the attention output `[B, H * d]` of q `[H, B, d]` over resident, fetched and approximate KV.

        Args:
            counts: Number of valid fetched entries in each list, `[P]`.
            fetch: Fetched entries, with padding. None if all visible KV is resident.
            selected: Token indices `[P, n]` of the fetched entries. None if the layer attends to all tokens.
            q: True queries of this layer.
        """
        batch, inputs, geometry = self._batch, self._inputs, self._batch.geometry
        kv_layer, grouped = geometry.kv_layer(layer), self._grouped(layer, q)
        fetched = KVPart.of(grouped.new_empty(1, len(grouped), 0, q.shape[2])) if fetch is None else fetch.wait()
        spans, resident = inputs.resident[geometry.windows[layer]], inputs.rows.resident(kv_layer)
        scale = geometry.scales[layer]
        out, lse = attend_resident(grouped, resident, spans.starts, spans.stops, fetched.k, fetched.v, counts, scale)
        if layer in batch.selecting:
            self._measure_attention_mass(layer, q, lse)
        if selected is not None:
            keys, candidates = self._selection.keys, self._selection.candidates
            if batch.policy.wants_weights and kv_layer == layer:
                scaled, counted = grouped.to(lse.dtype) * scale, replace(fetched, counts=counts)
                attended = inputs.attention_weights(scaled, resident, counted, selected, lse)
                keys.on_attended(kv_layer, candidates, *attended)
            out, lse = keys.merge_approximate(kv_layer, q, candidates, (selected, counts), (out, lse))
        return self._with_sinks(layer, out, lse).to(q.dtype)

    def _attend_on_device(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Return the attention output `[B, H * d]` of q `[H, B, d]` over all tokens, reading copies of blocks."""
        inputs, geometry = self._inputs, self._batch.geometry
        kv_layer, spans = geometry.kv_layer(layer), inputs.resident[None]
        out, lse = attend_copies(
            self._grouped(layer, q), inputs.rows.resident(kv_layer), spans.starts, spans.stops,
            *inputs.rows.copies(kv_layer), inputs.starts, inputs.stops, geometry.scales[layer],
        )  # fmt: skip
        return self._with_sinks(layer, out, lse).to(q.dtype)

    def _grouped(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Return the queries `[P, G, d]` of each list."""
        lists = self._inputs.size * self._batch.geometry.rows(layer).kv_heads
        # If there is only one KV head, `reshape` returns a view, but kernels need contiguous queries.
        return q.transpose(0, 1).reshape(lists, -1, q.shape[2]).contiguous()

    def _with_sinks(self, layer: int, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Add the attention sinks of the layer to out `[P, G, d]`, and return `[B, H * d]`."""
        if (sinks := self._batch.adapter.sinks[layer]) is not None:
            out = apply_sinks(out, lse, sinks.view(-1, lse.shape[1]).repeat(self._inputs.size, 1))
        return out.view(self._inputs.size, -1)

    def _measure_attention_mass(self, layer: int, q: torch.Tensor, lse: torch.Tensor) -> None:
        """Record the missed attention mass of the sequences that have requested it.

        `lse` `[P, G]` is the log-sum-exp of the scores of the attended tokens.
        """
        batch, scale = self._batch, self._batch.geometry.scales[layer]
        for b, sequence in enumerate(batch.sequences):
            if sequence.trace.measures_missed:
                keys = sequence.keys(batch.geometry.kv_layer(layer), batch.visible[layer][b].all)
                attended = lse.view(self._inputs.size, -1)[b]
                sequence.trace.record_missed_mass(layer, attended, scores_lse(q[:, b], keys, scale))


@dataclass(frozen=True)
class LayerSelection:
    """Tokens that a layer has fetched in a step: the selected tokens, or all candidates if it does not select."""

    layer: int
    tokens: torch.Tensor  # token indices with padding, int64 `[P, n]`
    counts: torch.Tensor  # number of valid indices per sequence, `[B]`
    tally: torch.Tensor | None = None  # see `PendingBatchFetch.tally`


MAX_CACHED = 8  # maximum number of (batch size, bucket) combinations for which inputs and graphs are kept


class EagerSteps:
    """Runs decode steps without CUDA graphs. The `StepInputs` of recent batch sizes are cached."""

    def __init__(self) -> None:
        self.inputs: dict[StepShape, StepInputs] = {}

    def run(self, batch: DecodeBatch) -> torch.Tensor:
        """Run a decode step. Return float32 logits `[B, V]`."""
        return DecodeStep(batch, self.mode(batch)).run()

    def mode(self, batch: DecodeBatch) -> PerSequenceMode:
        inputs = self.load(batch)
        return PerSequenceMode(batch) if inputs is None else BatchedMode(batch, inputs)

    def load(self, batch: DecodeBatch, size: int | None = None) -> StepInputs | None:
        """Return `StepInputs` with the values of the batch, or None if each sequence must be computed separately.

        `size` is the number of sequences including padding. None means that the step is not captured and not padded.
        """
        if (transfer := batch.transfer.batched) is None:
            return None
        dense = any(
            window is None and layer not in batch.selecting for layer, window in enumerate(batch.geometry.windows)
        )
        on_device = size is not None and dense and transfer.on_device(batch.block_tables)
        if not supports_batched_steps(batch, on_device=on_device):
            return None
        size = len(batch.sequences) if size is None else size
        capacity, sharing = bucket(max(s.slots.context for s in batch.sequences)), batch.sharing
        overlapping = sharing.overlapping and bool(batch.selecting)
        shape = StepShape(size, capacity, overlapping, bool(sharing.runs) and not on_device, on_device)
        if shape not in self.inputs:
            self.inputs[shape] = StepInputs(batch.policy, transfer.row_lists(size, capacity), batch.geometry, shape)
        self.inputs[shape] = self.inputs.pop(shape)
        while len(self.inputs) > MAX_CACHED:
            self.inputs.pop(next(iter(self.inputs)))
        self.inputs[shape].load(batch)
        return self.inputs[shape]

    def release(self) -> None:
        """Drop all references to sequences, because these may have ended."""
        for inputs in self.inputs.values():
            inputs.release()
