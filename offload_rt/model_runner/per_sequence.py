"""Selection sequence by sequence, without padding: on a CPU, and for policies without batched selection."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from ..core import KVPart, Selection, VisibleTokens
from ..kernels.h2d_copy import to_device
from ..transfer.base import PendingFetch
from ..transfer.plan import attended_tokens
from .attention import attend, give_to_sinks, group_weights, scores_lse
from .batch import DecodeBatch
from .sequence import Sequence


@dataclass(frozen=True)
class SequenceFetch:
    """A pending fetch of one sequence in one layer. If `selection` is None, it covers all visible tokens."""

    visible: VisibleTokens
    selection: Selection | None
    pending: PendingFetch


def enter_fetches(
    batch: DecodeBatch, layer: int, pending_fetches: Seq[PendingFetch], selections: Seq[Selection | None]
) -> list[SequenceFetch]:
    """Record the attended tokens and transferred bytes of `layer` in the trace of each sequence.

    Return the pending fetches, each with the visible tokens and the selection of its sequence.
    """
    fetches = []
    for sequence, visible, pending, selection in zip(
        batch.sequences, batch.visible(layer), pending_fetches, selections, strict=True
    ):
        sequence.trace.bytes_requested += pending.bytes
        fetched = len(visible.candidates) if selection is None else selection.count
        counts = None if selection is None else selection.counts
        sequence.trace.enter_rows(layer, visible, fetched if counts is None else counts)
        fetches.append(SequenceFetch(visible, selection, pending))
    return fetches


def append_each(batch: DecodeBatch, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store the newest k and v `[Hkv, B, d]` of a layer, sequence by sequence."""
    for b, (sequence, slot) in enumerate(zip(batch.sequences, batch.slots(layer), strict=True)):
        key, value = k[:, b : b + 1], v[:, b : b + 1]
        sequence.trace.bytes_to_host += batch.transfer.storage.append(sequence.blocks, layer, slot, key, value)
        if batch.learns(layer):
            sequence.state.on_keys(layer, key, slot)
            sequence.state.on_values(layer, value, slot)


class PerSequenceMode:
    """Selection mode that selects for one sequence after the other, with each sequence's own policy state."""

    def __init__(self, batch: DecodeBatch) -> None:
        self._batch = batch

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and positions on the device, int64 `[B]` each."""
        device = self._batch.adapter.device
        return to_device(torch.tensor(self._batch.tokens), device), to_device(
            torch.tensor(self._batch.positions), device
        )

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the newest k and v `[Hkv, B, d]`, sequence by sequence."""
        append_each(self._batch, layer, k, v)

    def fetch(self, layer: int, q: torch.Tensor) -> PerSequenceFetch:
        """Select tokens with q `[H, B, d]` and start one fetch per sequence.

        Tokens in shared blocks are fetched once.
        """
        batch, rows = self._batch, self._batch.transfer.rows
        visible, block_tables = batch.visible(layer), [s.blocks for s in batch.sequences]
        selections = [self._select(layer, s, q[:, b], visible[b]) for b, s in enumerate(batch.sequences)]
        chosen = [selection for selection in selections if selection is not None]
        if batch.sharing.overlapping and len(chosen) == len(selections):
            pending_fetches = rows.fetch_together(block_tables, layer, visible, chosen)
        else:
            each = zip(block_tables, visible, selections, strict=True)
            pending_fetches = [rows.fetch(blocks, layer, seen, selection) for blocks, seen, selection in each]
        return PerSequenceFetch(batch, layer, enter_fetches(batch, layer, pending_fetches, selections))

    def fetch_all(self, layer: int) -> None:
        """Return None, so that the decode step fetches layers that attend to all tokens, including shared prefixes."""

    def finish(self) -> None:
        """No-op, because fetches are recorded when they start."""

    def _select(self, layer: int, sequence: Sequence, q: torch.Tensor, visible: VisibleTokens) -> Selection | None:
        """Return the selection for the query q `[H, d]` of one sequence. None means to attend to all tokens.

        If eviction or a recorder needs the selected tokens, wait for the device.
        """
        if self._batch.sees_all(sequence):
            return None
        selection = sequence.state.select(layer, q, visible)
        if sequence.slots.listens or sequence.trace.recorder is not None:
            selection = selection.known()
        if sequence.slots.listens:
            sequence.slots.selected(layer, selection.tokens)
        return selection


@dataclass(frozen=True)
class PerSequenceFetch:
    """A `LayerFetch` that consists of one fetch per sequence."""

    batch: DecodeBatch
    layer: int
    fetches: list[SequenceFetch]

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """Return the attention output `[B, H * d]` of q `[H, B, d]`, sequence by sequence."""
        outs = [self._attend(s, q[:, b], self.fetches[b]) for b, s in enumerate(self.batch.sequences)]
        return torch.stack(outs).flatten(1).to(q.dtype)

    def _attend(self, sequence: Sequence, q: torch.Tensor, fetch: SequenceFetch) -> torch.Tensor:
        """Return the attention output `[H, d]` of one sequence for its query q `[H, d]`, in float32 or wider."""
        batch, layer = self.batch, self.layer
        scale, parts = batch.geometry.scales[layer], fetch.pending.wait()
        softcap, sinks = batch.geometry.softcap, batch.adapter.sinks(layer)
        if fetch.selection is None:
            return give_to_sinks(*attend(q, parts, scale, softcap), sinks)
        sequence.trace.enter_savings(layer, fetch.visible, fetch.selection.count, fetch.pending)
        selection = fetch.selection
        extra = sequence.state.repair(layer, q, fetch.visible, fetch.selection)
        if extra is not None:
            parts = parts + self._fetch_repair(sequence, fetch.visible, extra)
            selection = Selection(torch.cat((selection.tokens, extra.tokens), dim=1))
        if (recorder := sequence.trace.recorder) is not None:
            recorder.selected(sequence.position, layer, sequence.slots.positions(layer, selection.tokens))
        out, lse = attend(q, parts, scale, softcap)
        if batch.policy.wants_weights:
            tokens = attended_tokens(fetch.visible, selection.tokens)
            sequence.state.on_attended(layer, fetch.visible, tokens, group_weights(q, parts, scale, lse, softcap))
        if sequence.trace.measures_missed:
            whole = scores_lse(q, sequence.keys(layer, fetch.visible.all), scale, softcap)
            sequence.trace.enter_missed_mass(layer, lse, whole)
        out, lse = sequence.state.merge_approximate(layer, q, fetch.visible, selection, out, lse)
        return give_to_sinks(out, lse, sinks)

    def _fetch_repair(self, sequence: Sequence, visible: VisibleTokens, extra: Selection) -> list[KVPart]:
        pending = self.batch.transfer.rows.fetch_more(sequence.blocks, self.layer, extra)
        sequence.trace.bytes_requested += pending.bytes
        sequence.trace.enter_rows(self.layer, visible, extra.count)
        rows = pending.wait()
        sequence.trace.enter_savings(self.layer, visible, extra.count, pending)
        return rows
