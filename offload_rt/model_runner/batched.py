"""Selection of a whole batch at once: each layer is one chain of launches whatever the number of sequences, and nothing
is asked of the device.

    append     newest rows -> resident rows, newest rows -> pool, newest keys -> scoring keys (rows -> low-bit rows)
    fetch      scores of all sequences -> tokens and counts -> rows (prefetch stream)
    attend     resident and fetched rows -> out; with a tail, low-bit rows of what was not selected -> out

What the launches read of a step, lengths, slots and tables of addresses, lies in `StepInputs`: tensors of fixed
addresses that are written before the step. Shapes depend on the number of sequences B and on the bucket of the longest
context; P = B * Hkv lists of rows, one for each sequence and KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch

from ..core import ModelGeometry, Visible, bucket
from ..kernels.dispatch import attend_kept
from ..kernels.h2d_copy import copy_into
from ..policies.base import Policy
from ..policies.infinigen.key_lists import KeyLists, Rule, Spans
from ..transfer.residency import place, places
from ..transfer.row_lists import Arriving, RowLists
from .attention import give_to_sinks, scores_lse
from .batch import DecodeBatch, Strategy
from .per_sequence import PerSequenceStrategy, append_each
from .trace import LinkUse


def selects_together(batch: DecodeBatch) -> bool:
    """Whether the policy selects for a batch at once and every sequence has keys to score, and is long enough that it
    does. Capped scores are attended to one sequence after the other."""
    selects = any(batch.selects(layer) for layer in range(batch.geometry.layers)) and batch.geometry.softcap is None
    ready = all(s.position > 0 and not batch.sees_all(s) for s in batch.sequences)
    return batch.policy.rule is not None and selects and ready


NOWHERE = -1
"""The slot of a newest token that no sequence has."""


NOTHING = Visible(range(0), range(0), range(0))
"""What it sees."""


class StepInputs:
    """What the launches of a step read, for `size` sequences of up to `capacity` tokens each: tensors that stay where
    they are, whose values `load` writes before a step. A batch may be smaller: the rows behind it are nobody's, see
    nothing, and are written nowhere."""

    def __init__(
        self, policy: Policy, rows: RowLists, rule: Rule, geometry: ModelGeometry, size: int, capacity: int
    ) -> None:
        device = rows.device
        self.rows, self.size, self.capacity, self._rule, self._policy = rows, size, capacity, rule, policy
        self._heads = geometry.kv_heads
        selecting = [layer for layer in range(geometry.layers) if layer not in policy.dense_layers]
        self._selecting = selecting[0]
        self.keys = KeyLists(rule, selecting, size, capacity, device)
        lists = size * geometry.kv_heads
        self._newest = torch.zeros(4 * size + lists, dtype=torch.int64, device=device)
        self._bounds = torch.zeros(4 * lists + size, dtype=torch.int32, device=device)
        parts = self._newest.split([size, size, size, size, lists])
        self.tokens, self.positions, self.slots, self.places, self.slots_by_head = parts
        """int64 `[B]`, the last `[P]`. Of the newest tokens: ids, positions, slots, places among the resident rows,
        slots again for each KV head."""
        starts, stops, limits, *resident = self._bounds.split([lists, lists, size, lists, lists])
        self.candidates = Spans(starts, stops, limits, capacity, rule.most(capacity))
        """What the layers that see everything select from."""
        self.resident = resident[0], resident[1]
        """The first and behind the last place of the resident rows that they see, int32 `[P]` each."""

    def load(self, batch: DecodeBatch) -> None:
        """Writes who the batch's sequences are, where their rows and keys lie, and what each may see."""
        nobody = self.size - len(batch.sequences)
        held = [*batch.sequences, *[batch.sequences[0]] * nobody]
        slots = [s.slots.newest for s in held]
        keys = [s.state.scoring_keys for s in held]
        self.rows.hold([s.blocks for s in held])
        moved = self.keys.hold([own for own in keys if own is not None], slots)
        if moved is not None:
            copy_into(moved, self.keys.tables)
        sinks, recent, heads = self._policy.sinks, self._policy.recent, self._heads
        slots[len(batch.sequences) :] = nobody * [NOWHERE]
        by_head = [slot for slot in slots for _ in range(heads)]
        resident_at = [NOWHERE if slot == NOWHERE else place(slot, sinks, recent) for slot in slots]
        tokens, positions = (own + nobody * [0] for own in (batch.tokens, batch.positions))
        copy_into(torch.tensor([*tokens, *positions, *slots, *resident_at, *by_head]), self._newest)
        visible = batch.visible(self._selecting) + nobody * [NOTHING]
        resident = [span for seen in visible for span in [places(seen, sinks, recent)] * heads]
        candidates = chain.from_iterable(Spans.numbers(visible, heads, self._rule))
        bounds = [*candidates, *(span.start for span in resident), *(span.stop for span in resident)]
        copy_into(torch.tensor(bounds, dtype=torch.int32), self._bounds)

    def release(self) -> None:
        """Lets go of the sequences, until the next `load`."""
        self.rows.release()
        self.keys.release()

    @property
    def static(self) -> bool:
        """Whether a step is launches alone, which depend on nothing but these tensors: the host copies no rows, and no
        address is a working set's."""
        return self.rows.in_place and not self.rows.working


class BatchedStrategy:
    """The `Strategy` that selects for the whole batch at once, from the `inputs` that hold it. What it computes depends
    on nothing but them and the model; what it selected is entered in traces by `finish`."""

    def __init__(self, batch: DecodeBatch, inputs: StepInputs, *, dense: bool = False) -> None:
        """dense: rows of dense layers are fetched as lists too."""
        self._batch, self._inputs, self._dense = batch, inputs, dense
        self.selected: list[LayerSelection] = []
        self._newest = inputs.rows.rows_of(inputs.slots)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and positions int64 `[B]`, which are on the device."""
        return self._inputs.tokens, self._inputs.positions

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keeps the newest rows k, v `[Hkv, B, d]` of all sequences by one launch each for rows and scoring keys; those
        of sliding layers, which lie elsewhere, one sequence after the other."""
        inputs = self._inputs
        if self._batch.geometry.windows[layer] is not None:
            append_each(self._batch, layer, k, v)
            return
        k, v = (rows.transpose(0, 1).reshape(-1, rows.shape[2]) for rows in (k, v))
        inputs.rows.append(layer, k, v, inputs.places, self._newest)
        if self._batch.selects(layer):
            inputs.keys.append(layer, k, v, inputs.slots_by_head)

    def fetch(self, layer: int, q: torch.Tensor) -> BatchedFetch:
        """Selects with q `[H, B, d]` and starts one gather; how many rows these are stays on the device."""
        batch, inputs = self._batch, self._inputs
        tokens, counts = inputs.keys.select(layer, q, inputs.candidates)
        arriving = inputs.rows.fetch(layer, tokens, counts, overlapping=batch.sharing.overlapping)
        self.selected.append(LayerSelection(layer, tokens, counts[:: inputs.rows.heads], arriving.tally))
        return BatchedFetch(batch, inputs, layer, counts, arriving, tokens)

    def fetch_all(self, layer: int) -> BatchedFetch | None:
        """Starts one gather of all candidates, padded to the capacity; None without `dense`."""
        batch, inputs = self._batch, self._inputs
        if not self._dense:
            return None
        candidates = inputs.candidates
        slots = torch.arange(inputs.capacity, device=candidates.starts.device)
        tokens = (slots + candidates.starts.unsqueeze(1)).clamp_(max=inputs.capacity - 1)
        counts = candidates.stops - candidates.starts
        arriving = inputs.rows.fetch(layer, tokens, counts, overlapping=False)
        return BatchedFetch(batch, inputs, layer, counts, arriving)

    def finish(self) -> None:
        """Enters the step in the traces; the device is asked only for those who have to know."""
        batch, rows = self._batch, self._inputs.rows
        seeing_all = batch.geometry.layers - len(batch.geometry.sliding)
        for sequence in batch.sequences:
            sequence.trace.bytes_to_host += seeing_all * rows.token_bytes
        for selection in self.selected:
            self._enter(selection)
        for layer in batch.policy.dense_layers if self._dense else ():
            for sequence, visible in zip(batch.sequences, batch.visible(layer), strict=True):
                sequence.trace.bytes_requested += len(visible.candidates) * rows.token_bytes
                sequence.trace.enter_rows(layer, visible, len(visible.candidates))

    def _enter(self, selection: LayerSelection) -> None:
        """Enters a layer's selection in traces and slot tables, and tells the recorder."""
        batch, layer, rows = self._batch, selection.layer, self._inputs.rows
        tallies = None if selection.tally is None else selection.tally.unbind()
        counts = selection.counts[: len(batch.sequences)].unbind()
        each = zip(batch.sequences, batch.visible(layer), counts, strict=True)
        for b, (sequence, visible, count) in enumerate(each):
            use = LinkUse(rows.heads, rows.pair_bytes, None if tallies is None else tallies[b])
            sequence.trace.enter_selection(layer, visible, count, use)
            recorder = sequence.trace.recorder
            if sequence.slots.listens or recorder is not None:
                slots = selection.tokens[b * rows.heads : (b + 1) * rows.heads, : int(count)]
                sequence.slots.selected(layer, slots)
                if recorder is not None:
                    recorder.selected(sequence.position, layer, sequence.slots.positions(layer, slots))


@dataclass(frozen=True)
class LayerSelection:
    """What a layer selected: tokens int64 `[P, n]`, of which `counts` `[B]` (those of nobody behind them) of each KV
    head of a sequence are meant, and `Arriving.tally`, how many rows cross the link."""

    layer: int
    tokens: torch.Tensor
    counts: torch.Tensor
    tally: torch.Tensor | None


@dataclass(frozen=True)
class BatchedFetch:
    """The `LayerFetch` of a whole batch: rows on their way, of which `counts` `[P]` of each list are meant, and which
    tokens `[P, n]` they are of where a layer selected them."""

    batch: DecodeBatch
    inputs: StepInputs
    layer: int
    counts: torch.Tensor
    arriving: Arriving
    selected: torch.Tensor | None = None

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """Returns `[B, H * d]` from q `[H, B, d]`, over resident and fetched rows, and what is known of the others."""
        batch, layer, inputs = self.batch, self.layer, self.inputs
        k, v = self.arriving.wait()
        grouped = q.transpose(0, 1).reshape(len(k), -1, q.shape[2])
        scale = batch.geometry.scales[layer]
        out, lse = attend_kept(grouped, inputs.rows.resident(layer), *inputs.resident, k, v, self.counts, scale)
        for b, sequence in enumerate(batch.sequences):
            if sequence.trace.measures_missed and batch.selects(layer):
                keys = sequence.keys(layer, batch.visible(layer)[b].all)
                attended = lse.view(inputs.size, -1)[b]
                sequence.trace.enter_missed_mass(layer, attended, scores_lse(q[:, b], keys, scale))
        if self.selected is not None:
            chosen = self.selected, self.counts
            out, lse = inputs.keys.join_tail(layer, q, inputs.candidates, chosen, (out, lse))
        if (sinks := batch.adapter.sinks(layer)) is not None:
            out = give_to_sinks(out, lse, sinks.view(-1, lse.shape[1]).repeat(inputs.size, 1))
        return out.to(q.dtype).view(inputs.size, -1)


MOST_CACHED = 8
"""Inputs of so many batch sizes and buckets are cached: a few hundred bytes a sequence and layer, and their graphs."""


class StrategyCache:
    """Chooses the strategy of each step, and caches the inputs of the latest batch sizes and buckets."""

    def __init__(self) -> None:
        self.inputs: dict[tuple[int, int], StepInputs] = {}

    def strategy(self, batch: DecodeBatch) -> Strategy:
        """Returns a `BatchedStrategy` where policy and link can select for a batch at once, else a
        `PerSequenceStrategy`."""
        inputs = self.load(batch)
        return PerSequenceStrategy(batch) if inputs is None else BatchedStrategy(batch, inputs)

    def load(self, batch: DecodeBatch, size: int | None = None) -> StepInputs | None:
        """Returns inputs of `size` sequences (None: as many as there are) that hold the batch; None where policy or
        link cannot select for it at once."""
        rule, link = batch.policy.rule, batch.link.batched
        if rule is None or link is None or not selects_together(batch):
            return None
        size = len(batch.sequences) if size is None else size
        key = size, capacity = size, bucket(max(s.slots.context for s in batch.sequences))
        if key not in self.inputs:
            rows = link.row_lists(size, capacity)
            self.inputs[key] = StepInputs(batch.policy, rows, rule, batch.geometry, size, capacity)
        self.inputs[key] = self.inputs.pop(key)
        while len(self.inputs) > MOST_CACHED:
            self.inputs.pop(next(iter(self.inputs)))
        self.inputs[key].load(batch)
        return self.inputs[key]

    def release(self) -> None:
        """Lets go of the rows and keys of sequences that may have ended."""
        for inputs in self.inputs.values():
            inputs.release()
