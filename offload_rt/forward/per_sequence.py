"""Layers that select, sequence by sequence: the host knows how many rows each one takes, and nothing is padded. So it
is on a CPU, and for policies that have to know."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from ..core import KVPart, Selection, Visible
from ..kernels.h2d_copy import to_device
from ..transfer.link import Ticket
from ..transfer.plan import attended_tokens
from .attention import attend, group_weights, join_tail, scores_lse
from .batch import Step
from .sequence import Sequence


@dataclass(frozen=True)
class Fetch:
    """What one sequence attends to in one layer, on its way. `selection` None is everything visible."""

    visible: Visible
    selection: Selection | None
    ticket: Ticket


def count(step: Step, layer: int, tickets: Seq[Ticket], selections: Seq[Selection | None]) -> list[Fetch]:
    """Enters in each sequence's trace what it attends to in `layer`, and the bytes on the link."""
    fetches = []
    for sequence, visible, ticket, selection in zip(step.batch, step.see(layer), tickets, selections, strict=True):
        sequence.trace.bytes_asked += ticket.bytes
        fetched = len(visible.candidates) if selection is None else selection.count
        counts = None if selection is None else selection.counts
        sequence.trace.rows(layer, visible, fetched if counts is None else counts)
        fetches.append(Fetch(visible, selection, ticket))
    return fetches


class PerSequenceStrategy:
    """See `Strategy`."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Strategy.inputs`."""
        device = self._step.adapter.device
        return to_device(torch.tensor(self._step.tokens), device), to_device(torch.tensor(self._step.positions), device)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `Strategy.append`."""
        for b, sequence in enumerate(self._step.batch):
            key, value, slot = k[:, b : b + 1], v[:, b : b + 1], sequence.slots.newest
            sequence.trace.bytes_to_host += self._step.link.storage.append(sequence.blocks, layer, slot, key, value)
            if self._step.selects(layer):
                sequence.state.on_keys(layer, key, slot)
                sequence.state.on_values(layer, value, slot)

    def fetch(self, layer: int, q: torch.Tensor) -> PerSequenceFetch:
        """See `Strategy.fetch`."""
        step, rows = self._step, self._step.link.rows
        seen, block_tables = step.see(layer), [s.blocks for s in step.batch]
        selections = [self._select(layer, s, q[:, b], seen[b]) for b, s in enumerate(step.batch)]
        if step.sharing.overlapping:
            tickets = rows.fetch_together(block_tables, layer, seen, selections)
        else:
            tickets = [rows.fetch(ls, layer, v, s) for ls, v, s in zip(block_tables, seen, selections, strict=True)]
        return PerSequenceFetch(step, layer, count(step, layer, tickets, selections))

    def fetch_all(self, layer: int) -> None:
        """See `Strategy.fetch_all`."""

    def finish(self) -> None:
        """See `Strategy.finish`: everything has been entered."""

    def _select(self, layer: int, sequence: Sequence, q: torch.Tensor, visible: Visible) -> Selection:
        """q `[H, d]`. How many tokens were selected is asked of the device only for those who have to know."""
        selection = sequence.state.select(layer, q, visible)
        if sequence.slots.listens or self._step.recorder is not None:
            selection = selection.known()
        if sequence.slots.listens:
            sequence.slots.selected(layer, selection.tokens)
        return selection


@dataclass(frozen=True)
class PerSequenceFetch:
    """Each sequence attends to its own fetch."""

    step: Step
    layer: int
    fetches: list[Fetch]

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """See `Fetched.attend`."""
        outs = [self._attend(s, q[:, b], self.fetches[b]) for b, s in enumerate(self.step.batch)]
        return torch.stack(outs).flatten(1)

    def _attend(self, sequence: Sequence, q: torch.Tensor, fetch: Fetch) -> torch.Tensor:
        """q `[H, d]`. Returns `[H, d]`."""
        step, layer = self.step, self.layer
        scale, parts = step.geometry.scales[layer], fetch.ticket.wait()
        if fetch.selection is None:
            return attend(q, parts, scale)[0]
        sequence.trace.spare(layer, fetch.visible, fetch.selection.count, fetch.ticket)
        selection = fetch.selection
        extra = sequence.state.repair(layer, q, fetch.visible, fetch.selection)
        if extra is not None:
            parts = parts + self._fetch_repair(sequence, fetch.visible, extra)
            selection = Selection(torch.cat((selection.tokens, extra.tokens), dim=1))
        if step.recorder is not None:
            step.recorder.selected(sequence.position, layer, sequence.slots.positions(layer, selection.tokens))
        out, lse = attend(q, parts, scale)
        if step.policy.wants_weights:
            tokens = attended_tokens(fetch.visible, selection.tokens)
            sequence.state.on_attended(layer, tokens, group_weights(q, parts, scale, lse))
        if sequence.trace.probing:
            step.link.storage.settle(sequence.blocks)  # the newest row may still be on its way to the pool
            sequence.trace.miss(layer, lse, scores_lse(q, sequence.keys(layer, fetch.visible.all), scale))
        tail = sequence.state.tail(layer, q, fetch.visible, selection)
        return out if tail is None else join_tail(out, lse, *tail)

    def _fetch_repair(self, sequence: Sequence, visible: Visible, extra: Selection) -> list[KVPart]:
        ticket = self.step.link.rows.fetch_more(sequence.blocks, self.layer, extra)
        sequence.trace.bytes_asked += ticket.bytes
        sequence.trace.rows(self.layer, visible, extra.count)
        rows = ticket.wait()
        sequence.trace.spare(self.layer, visible, extra.count, ticket)
        return rows
