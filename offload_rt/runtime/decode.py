"""One decode step of a batch: the layer loop of DESIGN section 3, top to bottom.

While layer l computes, the rows of layer l + 1 are on the link. What they are is speculated from what layer l knows
(InfiniGen §4.3): its attention input, or the residual after its attention. A dense layer needs no speculation and is
requested first of all.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from ..core import KVPart, Selection, Visible
from ..kernels.dispatch import attend_runs
from ..kernels.segments import Run
from ..models.adapter import ModelAdapter
from ..select.base import Policy
from ..transfer.lanes import sent
from ..transfer.link import Link, Ticket
from ..transfer.plan import attended_tokens
from .attention import attend, group_weights, scores_lse
from .recording import Recorder
from .segments import Segment, Sharing
from .sequence import Sequence


@dataclass(frozen=True)
class Fetch:
    """What one sequence attends to in one layer, on its way. `selection` None is everything visible."""

    visible: Visible
    selection: Selection | None
    ticket: Ticket


@dataclass(frozen=True)
class Fetched:
    """What a layer attends to: rows of each sequence, and rows of segments that several sequences share."""

    own: list[Fetch]
    shared: list[tuple[Segment, Ticket]]


class DecodeStep:
    """Computes the next token of each sequence of a batch: token `tokens[position]` of each goes in, logits come out.
    `slots.begin_step` must have made room for it; the caller commits it afterwards. Sequences never see each other:
    each gets what it would get alone, though what several have in common is fetched once for all, and in dense layers
    read once. `batch` is in the order of its `sharing`. A `recorder` is told what each layer selected."""

    def __init__(
        self,
        batch: Seq[Sequence],
        adapter: ModelAdapter,
        policy: Policy,
        link: Link,
        sharing: Sharing,
        recorder: Recorder | None = None,
    ) -> None:
        self.batch, self.adapter, self.policy, self.link = batch, adapter, policy, link
        self.sharing, self.recorder = sharing, recorder
        self.geometry = adapter.geometry
        self.positions = sent(torch.tensor([s.position + s.shift for s in batch]), adapter.device)
        self._visible: dict[int | None, list[Visible]] = {}

    def run(self) -> torch.Tensor:
        """float32 logits `[B, V]`."""
        adapter = self.adapter
        for sequence in self.batch:
            sequence.trace.begin_step()
            self._make_way(sequence)
        tokens = sent(torch.tensor([s.tokens[s.position] for s in self.batch]), adapter.device)
        x = adapter.embed(tokens, self.positions)
        fetched = self._fetch_dense(0)
        for layer in range(self.geometry.layers):
            attention_input = adapter.attention_input(layer, x)
            q, k, v = adapter.qkv(layer, attention_input, self.positions)
            self._append(layer, k, v)
            fetched = fetched or self._fetch_selected(layer, q)

            upcoming = self._fetch_dense(layer + 1)
            if self._speculates(layer + 1, "attention_input"):
                upcoming = self._fetch_speculated(layer + 1, attention_input)
            if self._speculates(layer + 1, "normed_input"):
                upcoming = self._fetch_speculated(layer + 1, adapter.attention_input(layer + 1, x))

            attended = self._attend(layer, q, fetched)
            residual = adapter.after_attention(layer, x, attended)
            if self._speculates(layer + 1, "residual"):
                upcoming = self._fetch_speculated(layer + 1, adapter.attention_input(layer + 1, residual))
            x = adapter.mlp(layer, residual)
            fetched = upcoming
        return adapter.logits(x)

    def _speculates(self, layer: int, moment: str) -> bool:
        selecting = layer < self.geometry.layers and layer not in self.policy.dense_layers
        return selecting and self.policy.moment == moment

    def _see(self, layer: int) -> list[Visible]:
        """What each sequence's newest token may see in `layer`; the same for all layers of one window."""
        window = self.geometry.windows[layer]
        if window not in self._visible:
            sinks, recent = self.policy.sinks, self.policy.recent
            self._visible[window] = [
                Visible.of(s.slots.context, sinks=sinks, recent=recent, window=window) for s in self.batch
            ]
        return self._visible[window]

    def _make_way(self, sequence: Sequence) -> None:
        """In a full pool the token that leaves the window moves to its victim's slot, in every layer, before any layer
        selects or fetches."""
        for layer in range(self.geometry.layers):
            if (moved := sequence.slots.displaced(layer)) is not None:
                self.link.move(sequence.lease, layer, *moved)
                if layer not in self.policy.dense_layers:
                    sequence.state.on_moved(layer, *moved)

    def _append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v `[Hkv, B, d]`: the newest token becomes resident, is written back, and is made known to the policy."""
        for b, sequence in enumerate(self.batch):
            key, value, slot = k[:, b : b + 1], v[:, b : b + 1], sequence.slots.newest
            sequence.trace.bytes_to_host += self.link.append(sequence.lease, layer, slot, key, value)
            if layer not in self.policy.dense_layers:
                sequence.state.on_keys(layer, key, slot)

    def _fetch_dense(self, layer: int) -> Fetched | None:
        """Requests everything, if `layer` exists and is dense: first what is shared, then what each has for itself."""
        if layer == self.geometry.layers or layer not in self.policy.dense_layers:
            return None
        seen, segments, leases = self._see(layer), self.sharing.segments, [s.lease for s in self.batch]
        if any(visible.all.start for visible in seen):
            segments = ()  # a sliding window, which begins elsewhere for each
        shared = [
            (segment, self.link.fetch_range(leases[segment.first], layer, segment.tokens)) for segment in segments
        ]
        for segment, ticket in shared:
            self.batch[segment.first].trace.bytes_asked += ticket.bytes
        own = [self.sharing.own(b, visible) for b, visible in enumerate(seen)] if shared else seen
        tickets = [self.link.fetch(lease, layer, visible, None) for lease, visible in zip(leases, own, strict=True)]
        return Fetched(self._count(layer, tickets, [None] * len(tickets)), shared)

    def _fetch_speculated(self, layer: int, attention_input: torch.Tensor) -> Fetched:
        """`attention_input` `[B, D]`: the guess of what layer `layer` will project."""
        return self._fetch_selected(layer, self.adapter.query(layer, attention_input, self.positions))

    def _fetch_selected(self, layer: int, q: torch.Tensor) -> Fetched:
        """q `[H, B, d]`: layer `layer`'s query, guessed or true. Each sequence selects for itself; of what they have in
        common, the union crosses the link."""
        seen, leases = self._see(layer), [s.lease for s in self.batch]
        selections = [self._select(layer, s, q[:, b], seen[b]) for b, s in enumerate(self.batch)]
        if self.sharing.overlapping:
            tickets = self.link.fetch_together(leases, layer, seen, selections)
        else:
            tickets = [self.link.fetch(ls, layer, v, s) for ls, v, s in zip(leases, seen, selections, strict=True)]
        return Fetched(self._count(layer, tickets, selections), [])

    def _select(self, layer: int, sequence: Sequence, q: torch.Tensor, visible: Visible) -> Selection:
        """q `[H, d]`. How many tokens were selected is asked of the device only for those who have to know."""
        selection = sequence.state.select(layer, q, visible)
        if sequence.slots.listens or self.recorder is not None:
            selection = selection.known()
        if sequence.slots.listens:
            sequence.slots.selected(layer, selection.tokens)
        return selection

    def _count(self, layer: int, tickets: Seq[Ticket], selections: Seq[Selection | None]) -> list[Fetch]:
        """Enters in each sequence's trace what it attends to in `layer`, and the bytes on the link."""
        fetches = []
        for sequence, visible, ticket, selection in zip(self.batch, self._see(layer), tickets, selections, strict=True):
            sequence.trace.bytes_asked += ticket.bytes
            fetched = len(visible.candidates) if selection is None else selection.count
            counts = None if selection is None else selection.counts
            sequence.trace.rows(layer, visible, fetched if counts is None else counts)
            fetches.append(Fetch(visible, selection, ticket))
        return fetches

    def _attend(self, layer: int, q: torch.Tensor, fetched: Fetched) -> torch.Tensor:
        """q `[H, B, d]`, true queries. Returns `[B, H * d]`."""
        if fetched.shared:
            tickets = [(segment.first, segment.stop, ticket) for segment, ticket in fetched.shared]
            tickets += [(b, b + 1, fetch.ticket) for b, fetch in enumerate(fetched.own)]
            runs = [Run(first, stop, part.k, part.v) for first, stop, ticket in tickets for part in ticket.wait()]
            out, _ = attend_runs(q, runs, self.geometry.scales[layer])
            return out.to(q.dtype).transpose(0, 1).flatten(1)
        outs = [self._attend_one(layer, s, q[:, b], fetched.own[b]) for b, s in enumerate(self.batch)]
        return torch.stack(outs).flatten(1)

    def _attend_one(self, layer: int, sequence: Sequence, q: torch.Tensor, fetch: Fetch) -> torch.Tensor:
        """q `[H, d]`. Returns `[H, d]`."""
        scale, parts = self.geometry.scales[layer], fetch.ticket.wait()
        if fetch.selection is None:
            return attend(q, parts, scale)[0]
        sequence.trace.spare(layer, fetch.visible, fetch.selection.count, fetch.ticket)
        selected = fetch.selection.tokens
        extra = sequence.state.repair(layer, q, fetch.visible, fetch.selection)
        if extra is not None:
            parts = parts + self._fetch_repair(layer, sequence, fetch.visible, extra)
            selected = torch.cat((selected, extra.tokens), dim=1)
        if self.recorder is not None:
            self.recorder.selected(sequence.position, layer, sequence.slots.positions(layer, selected))
        out, lse = attend(q, parts, scale)
        if self.policy.wants_weights:
            tokens = attended_tokens(fetch.visible, selected)
            sequence.state.on_attended(layer, tokens, group_weights(q, parts, scale, lse))
        if sequence.trace.probing:
            sequence.trace.miss(layer, lse, scores_lse(q, sequence.keys(layer, fetch.visible.all), scale))
        return out

    def _fetch_repair(self, layer: int, sequence: Sequence, visible: Visible, extra: Selection) -> list[KVPart]:
        ticket = self.link.fetch_more(sequence.lease, layer, extra)
        sequence.trace.bytes_asked += ticket.bytes
        sequence.trace.rows(layer, visible, extra.count)
        rows = ticket.wait()
        sequence.trace.spare(layer, visible, extra.count, ticket)
        return rows
