"""Layers that select, the whole batch at once: each layer is one chain of launches whatever the number of sequences,
and nothing is asked of the device (DESIGN section 10).

    append     newest rows -> resident rows, newest rows -> pool, newest keys -> scoring keys
    fetch      scores of all sequences -> tokens and counts -> rows (prefetch stream)
    attend     resident and fetched rows -> out

What the launches read of a step, lengths, slots and tables of addresses, lies in `Lists`: tensors of fixed addresses
that are written before the step. Shapes depend on the number of sequences and on the bucket of the longest context.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch

from ..core import ModelGeometry, bucket
from ..kernels.dispatch import attend_kept
from ..kernels.h2d_copy import copy_into
from ..select.base import Policy
from ..select.key_lists import KeyLists, Rule, Spans
from ..transfer.residency import place, places
from ..transfer.row_lists import Arriving, RowLists
from .attention import scores_lse
from .batch import Step, Strategy
from .per_sequence import PerSequenceStrategy
from .trace import Crossing


def suits(step: Step) -> bool:
    """Whether the policy selects for a batch at once and every sequence has keys to score; and no sliding window ends
    among the resident rows, which would then not lie together."""
    selects = any(step.selects(layer) for layer in range(step.geometry.layers))
    fits = all(window is None or window >= step.policy.recent for window in step.geometry.windows)
    return step.policy.rule is not None and selects and fits and all(s.position > 0 for s in step.batch)


class Lists:
    """What the launches of a step read, for `batch` sequences of up to `tokens` tokens; `hold` writes it before."""

    def __init__(
        self, policy: Policy, rows: RowLists, rule: Rule, geometry: ModelGeometry, batch: int, tokens: int
    ) -> None:
        device = rows.device
        self.rows, self.batch, self.room, self._rule, self._policy = rows, batch, tokens, rule, policy
        self._heads = geometry.kv_heads
        selecting = [layer for layer in range(geometry.layers) if layer not in policy.dense_layers]
        self._layer_of = {window: layer for layer, window in enumerate(geometry.windows)}
        self.keys = KeyLists(rule, selecting, batch, device)
        lists = batch * geometry.kv_heads
        self._newest = torch.zeros(4 * batch + lists, dtype=torch.int64, device=device)
        self._spans = torch.zeros(len(self._layer_of), 4 * lists + batch, dtype=torch.int32, device=device)
        sizes = [batch, batch, batch, batch, lists]
        self.tokens, self.positions, self.slots, self.places, self.every_slot = self._newest.split(sizes)
        """int64 `[B]` and `[P]`. Of the newest token: id, position, slot, place among resident rows, slot again."""
        cut = [row.split([lists, lists, batch, lists, lists]) for row in self._spans]
        self._cut = dict(zip(self._layer_of, cut, strict=True))
        """Of each sliding window: starts and stops `[P]`, limits `[B]`, kept starts and stops `[P]`."""

    def hold(self, step: Step) -> None:
        """What this step's sequences are, where their rows and keys lie, and what each may see."""
        keys = [s.state.scoring_keys for s in step.batch]
        slots = [s.slots.newest for s in step.batch]
        self.rows.hold([s.blocks for s in step.batch])
        moved = self.keys.hold([own for own in keys if own is not None], slots)
        if moved is not None:
            copy_into(moved, self.keys.tables)
        sinks, recent, heads = self._policy.sinks, self._policy.recent, self._heads
        every = [slot for slot in slots for _ in range(heads)]
        kept_at = [place(slot, sinks, recent) for slot in slots]
        copy_into(torch.tensor([*step.tokens, *step.positions, *slots, *kept_at, *every]), self._newest)
        spans = []
        for layer in self._layer_of.values():
            seen = step.see(layer)
            kept = [span for visible in seen for span in [places(visible, sinks, recent)] * heads]
            numbers = Spans.numbers(seen, heads, self._rule)
            spans.append([*chain.from_iterable(numbers), *(span.start for span in kept), *(span.stop for span in kept)])
        copy_into(torch.tensor(spans, dtype=torch.int32), self._spans)

    def release(self) -> None:
        """Lets go of the sequences, until the next `hold`."""
        self.rows.release()
        self.keys.release()

    @property
    def static(self) -> bool:
        """Whether the launches of a step depend on nothing but these lists: no address in them is a sequence's own (as
        of columns chosen from its prompt)."""
        return not self._policy.wants_queries and not self.rows.working

    def spans(self, window: int | None) -> Spans:
        """What the layers of a sliding window select from."""
        starts, stops, limits, _, _ = self._cut[window]
        return Spans(starts, stops, limits, self.room, self._rule.most(self.room))

    def kept(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """First and behind the last place of the resident rows that they see, int32 `[P]`."""
        _, _, _, starts, stops = self._cut[window]
        return starts, stops


class BatchedStrategy:
    """See `Strategy`: one step, with `lists` that `hold` it. What it computes depends on nothing but them and the
    model; what it counts is entered in traces by `finish`."""

    def __init__(self, step: Step, lists: Lists, *, dense: bool = False) -> None:
        """dense: rows of dense layers are fetched as lists too."""
        self._step, self._lists, self._dense = step, lists, dense
        self.counted: list[Counted] = []
        self._newest = lists.rows.rows_of(lists.slots)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Strategy.inputs`."""
        return self._lists.tokens, self._lists.positions

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `Strategy.append`."""
        step, lists = self._step, self._lists
        k, v = (rows.transpose(0, 1).reshape(-1, rows.shape[2]) for rows in (k, v))
        lists.rows.append(layer, k, v, lists.places, self._newest)
        if step.selects(layer):
            lists.keys.append(layer, k, lists.every_slot)

    def fetch(self, layer: int, q: torch.Tensor) -> BatchedFetch:
        """See `Strategy.fetch`."""
        step, lists = self._step, self._lists
        tokens, counts = lists.keys.select(layer, q, lists.spans(step.geometry.windows[layer]))
        arriving = lists.rows.fetch(layer, tokens, counts, overlapping=step.sharing.overlapping)
        self.counted.append(Counted(layer, tokens, counts[:: lists.rows.heads], arriving.tally))
        return BatchedFetch(step, lists, layer, tokens, counts, arriving)

    def fetch_all(self, layer: int) -> BatchedFetch | None:
        """See `Strategy.fetch_all`: of `room` slots those that are candidates."""
        step, lists = self._step, self._lists
        if not self._dense:
            return None
        spans = lists.spans(step.geometry.windows[layer])
        slots = torch.arange(lists.room, device=spans.starts.device)
        tokens = (slots + spans.starts.unsqueeze(1)).clamp_(max=lists.room - 1)
        counts = spans.stops - spans.starts
        arriving = lists.rows.fetch(layer, tokens, counts, overlapping=False)
        return BatchedFetch(step, lists, layer, tokens, counts, arriving)

    def finish(self) -> None:
        """See `Strategy.finish`; the device is asked only for those who have to know."""
        step, rows = self._step, self._lists.rows
        for sequence in step.batch:
            sequence.trace.bytes_to_host += step.geometry.layers * rows.token_bytes
        for one in self.counted:
            self._tell(one)
        for layer in step.policy.dense_layers if self._dense else ():
            for sequence, visible in zip(step.batch, step.see(layer), strict=True):
                sequence.trace.bytes_asked += len(visible.candidates) * rows.token_bytes
                sequence.trace.rows(layer, visible, len(visible.candidates))

    def _tell(self, one: Counted) -> None:
        """Enters a layer's selection in traces and slots, and tells the recorder."""
        step, layer, rows = self._step, one.layer, self._lists.rows
        tallies = None if one.tally is None else one.tally.unbind()
        each = zip(step.batch, step.see(layer), one.counts.unbind(), strict=True)
        for b, (sequence, visible, count) in enumerate(each):
            crossing = Crossing(rows.heads, rows.pair_bytes, None if tallies is None else tallies[b])
            sequence.trace.crossing(layer, visible, count, crossing)
            if sequence.slots.listens or step.recorder is not None:
                slots = one.tokens[b * rows.heads : (b + 1) * rows.heads, : int(count)]
                sequence.slots.selected(layer, slots)
                if step.recorder is not None:
                    step.recorder.selected(sequence.position, layer, sequence.slots.positions(layer, slots))


@dataclass(frozen=True)
class Counted:
    """What a layer selected: tokens int64 `[P, n]`, how many of each KV head of a sequence `[B]`, `Arriving.tally`."""

    layer: int
    tokens: torch.Tensor
    counts: torch.Tensor
    tally: torch.Tensor | None


@dataclass(frozen=True)
class BatchedFetch:
    """Tokens `[P, n]` that a layer attends to, `counts` `[P]` of them meant, their rows on the way."""

    step: Step
    lists: Lists
    layer: int
    tokens: torch.Tensor
    counts: torch.Tensor
    arriving: Arriving

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """See `Fetched.attend`."""
        step, layer, lists = self.step, self.layer, self.lists
        k, v = self.arriving.wait()
        grouped = q.transpose(0, 1).reshape(len(k), -1, q.shape[2])
        spans, scale = lists.kept(step.geometry.windows[layer]), step.geometry.scales[layer]
        out, lse = attend_kept(grouped, lists.rows.resident(layer), *spans, k, v, self.counts, scale)
        for b, sequence in enumerate(step.batch):
            if sequence.trace.probing and step.selects(layer):
                step.link.storage.settle(sequence.blocks)  # the newest row may still be on its way to the pool
                keys = sequence.keys(layer, step.see(layer)[b].all)
                sequence.trace.miss(layer, lse.view(len(step.batch), -1)[b], scores_lse(q[:, b], keys, scale))
        return out.to(q.dtype).view(len(step.batch), -1)


KEPT = 8
"""Lists of so many batch sizes and buckets are kept: a few hundred bytes a sequence and layer, and their graphs."""


class StrategyCache:
    """Which way the layers of a step select. Keeps the lists of the latest batch sizes and buckets."""

    def __init__(self) -> None:
        self.lists: dict[tuple[int, int], Lists] = {}

    def of(self, step: Step) -> Strategy:
        """BatchedStrategy where policy and link can, else apart."""
        lists = self.holding(step)
        return PerSequenceStrategy(step) if lists is None else BatchedStrategy(step, lists)

    def holding(self, step: Step) -> Lists | None:
        """Lists that hold the step, where policy and link can select together."""
        rule, link = step.policy.rule, step.link.batched
        if rule is None or link is None or not suits(step):
            return None
        key = batch, room = len(step.batch), bucket(max(s.slots.context for s in step.batch))
        if key not in self.lists:
            self.lists[key] = Lists(step.policy, link.row_lists(batch, room), rule, step.geometry, batch, room)
        self.lists[key] = self.lists.pop(key)
        while len(self.lists) > KEPT:
            self.lists.pop(next(iter(self.lists)))
        self.lists[key].hold(step)
        return self.lists[key]

    def forget(self) -> None:
        """Lets go of the rows and keys of sequences that may have ended."""
        for lists in self.lists.values():
            lists.release()
