"""Token selection for one sequence after the other."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial

import torch

from ..core import KVPart, Selection, VisibleTokens
from ..kernels.decode_attention import apply_sinks, attend, group_weights, scores_lse
from ..kernels.dispatch import attend_runs
from ..kernels.h2d_copy import to_device
from ..kernels.kv_runs import Run
from ..models.recurrent import RecurrentState
from ..transfer.base import PendingFetch
from ..transfer.plan import attended_tokens
from .batch import Attend, DecodeBatch, SharedRun
from .sequence import Sequence


class PerSequenceMode:
    """Selects tokens for one sequence after the other. It is used on a CPU and for policies without batched selection.

    KV in shared blocks is fetched only once.
    """

    def __init__(self, batch: DecodeBatch) -> None:
        self._batch = batch

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens and the positions of the step on the device, both int64 `[B]`."""
        batch, device = self._batch, self._batch.adapter.device
        return to_device(torch.tensor(batch.tokens), device), to_device(torch.tensor(batch.positions), device)

    def state(self) -> RecurrentState | None:
        """Return the recurrent state of the batch, or None if the model has none."""
        return self._batch.state()

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v `[Hkv, B, d]` of the newest tokens on the device, in the pool and in the policy states."""
        batch, slots = self._batch, self._batch.slots[layer]
        for b, sequence in enumerate(batch.sequences):
            slot, key, value = slots[b], k[:, b : b + 1], v[:, b : b + 1]
            sequence.trace.bytes_to_host += batch.transfer.storage.append(sequence.blocks, layer, slot, key, value)
            if layer in batch.policy_layers:
                sequence.state.on_kv(layer, key, value, slot)

    def fetch(self, layer: int, q: torch.Tensor) -> Attend:
        """Select tokens with the predicted or true queries q `[H, B, d]`, and start fetching their KV."""
        batch, rows, kv_layer = self._batch, self._batch.transfer.rows, self._batch.geometry.kv_layer(layer)
        visible, selections, present = batch.visible[layer], list[Selection | None](), list[Selection]()
        for b, sequence in enumerate(batch.sequences):
            if batch.dense[b]:
                selections.append(None)
                continue
            selection = sequence.state.select(kv_layer, q[:, b], visible[b])
            if sequence.slots.records_selected or sequence.trace.recorder is not None:
                selection = selection.known()  # This waits for the device.
            if sequence.slots.records_selected:
                sequence.slots.record_selected(kv_layer, selection.tokens)
            selections.append(selection)
            present.append(selection)
        shared_fetches = None
        if batch.sharing.overlapping and len(present) == len(selections):
            shared_fetches = rows.fetch_together(batch.block_tables, kv_layer, visible, present)
        fetches = self._start_fetches(layer, visible, selections, shared_fetches)
        return partial(self._attend_each, layer, selections, fetches)

    def fetch_all(self, layer: int) -> Attend:
        """Start fetching all visible tokens in `layer`, first for shared runs and then for each sequence's own part."""
        batch, rows, visible = self._batch, self._batch.transfer.rows, self._batch.visible[layer]
        shared_runs, kv_layer = batch.sharing.runs, batch.geometry.kv_layer(layer)
        if batch.geometry.windows[layer] is not None or batch.geometry.softcap is not None:
            shared_runs = ()  # Each sequence fetches all of its tokens itself.
        shared = [rows.fetch_range(batch.block_tables[s.first], kv_layer, s.tokens) for s in shared_runs]
        for run, pending in zip(shared_runs, shared, strict=True):
            batch.sequences[run.first].trace.bytes_requested += pending.bytes
            for b in range(run.first, run.stop):
                self._record_copies(layer, b, pending, len(run.tokens))
        if shared_runs:
            visible = [batch.sharing.private_part(b, tokens) for b, tokens in enumerate(visible)]
        selections = [None] * len(visible)
        fetches = self._start_fetches(layer, visible, selections)
        if shared_runs:
            return partial(self._attend_shared_runs, layer, shared_runs, shared, fetches)
        return partial(self._attend_each, layer, selections, fetches)

    def finish(self) -> None:
        pass  # no-op, because each fetch was recorded at its start

    def _start_fetches(
        self,
        layer: int,
        visible: Seq[VisibleTokens],
        selections: Seq[Selection | None],
        started: Seq[PendingFetch] | None = None,
    ) -> list[PendingFetch]:
        """Start one fetch per sequence, and record each fetch in the trace of its sequence.

        If the selection of a sequence is None, all of its `visible` tokens are fetched. If `started` is given, its
        fetches have already been started and are only recorded.
        """
        batch, rows, fetches = self._batch, self._batch.transfer.rows, list[PendingFetch]()
        kv_layer = batch.geometry.kv_layer(layer)
        for b, (sequence, selection) in enumerate(zip(batch.sequences, selections, strict=True)):
            fetch = rows.fetch(sequence.blocks, kv_layer, visible[b], selection) if started is None else started[b]
            fetches.append(fetch)
            sequence.trace.bytes_requested += fetch.bytes
            all_visible = batch.visible[layer][b]
            if selection is None:
                sequence.trace.record_fetch(layer, all_visible, len(all_visible.candidates))
                self._record_copies(layer, b, fetch, len(visible[b].candidates))
            else:
                counts = selection.counts
                sequence.trace.record_fetch(layer, all_visible, selection.count if counts is None else counts[0])
        return fetches

    def _record_copies(self, layer: int, b: int, fetch: PendingFetch, tokens: int) -> None:
        if fetch.copied_tokens is not None:
            heads, seen = self._batch.geometry.rows(layer).kv_heads, self._batch.visible[layer][b]
            self._batch.sequences[b].trace.record_copies(layer, seen, fetch.copied_tokens, tokens, heads)

    def _attend_each(
        self, layer: int, selections: Seq[Selection | None], fetches: Seq[PendingFetch], q: torch.Tensor
    ) -> torch.Tensor:
        outs = [self._attend(layer, b, q[:, b], selections[b], fetch) for b, fetch in enumerate(fetches)]
        return torch.stack(outs).flatten(1).to(q.dtype)

    def _attend(
        self, layer: int, b: int, q: torch.Tensor, selection: Selection | None, fetch: PendingFetch
    ) -> torch.Tensor:
        """Return the attention output `[H, d]` of one sequence, in float32 or a wider dtype."""
        batch, sequence, visible = self._batch, self._batch.sequences[b], self._batch.visible[layer][b]
        scale, softcap, trace = batch.geometry.scales[layer], batch.geometry.softcap, sequence.trace
        sinks, kv_layer = batch.adapter.sinks[layer], batch.geometry.kv_layer(layer)
        parts = fetch.wait()
        if selection is None:
            return apply_sinks(*attend(q, parts, scale, softcap), sinks)
        if fetch.savings is not None:
            trace.record_savings(layer, visible, selection.count, fetch.savings, fetch.bytes)
        extra = sequence.state.repair(kv_layer, q, visible, selection)
        if extra is not None:
            parts = parts + self._fetch_repair(layer, sequence, visible, extra)
            selection = Selection(torch.cat((selection.tokens, extra.tokens), dim=1))
        if trace.recorder is not None:
            trace.recorder.selected(sequence.position, layer, sequence.slots.positions(kv_layer, selection.tokens))
        out, lse = attend(q, parts, scale, softcap)
        if batch.policy.wants_weights and kv_layer == layer:
            tokens = attended_tokens(visible, selection.tokens)
            sequence.state.on_attended(layer, visible, tokens, group_weights(q, parts, scale, lse, softcap))
        if trace.measures_missed:
            full_lse = scores_lse(q, sequence.keys(kv_layer, visible.all), scale, softcap)
            trace.record_missed_mass(layer, lse, full_lse)
        out, lse = sequence.state.merge_approximate(kv_layer, q, visible, selection, out, lse)
        return out if sinks is None else apply_sinks(out, lse, sinks)

    def _fetch_repair(self, layer: int, sequence: Sequence, visible: VisibleTokens, extra: Selection) -> list[KVPart]:
        kv_layer = self._batch.geometry.kv_layer(layer)
        fetch = self._batch.transfer.rows.fetch_more(sequence.blocks, kv_layer, extra)
        sequence.trace.bytes_requested += fetch.bytes
        sequence.trace.record_fetch(layer, visible, extra.count)
        parts = fetch.wait()
        if fetch.savings is not None:
            sequence.trace.record_savings(layer, visible, extra.count, fetch.savings, fetch.bytes)
        return parts

    def _attend_shared_runs(
        self,
        layer: int,
        shared_runs: Seq[SharedRun],
        shared: Seq[PendingFetch],
        private: Seq[PendingFetch],
        q: torch.Tensor,
    ) -> torch.Tensor:
        """Return the attention output `[B, H * d]` of q `[H, B, d]`, reading the KV of shared runs only once.

        `shared` contains one fetch per shared run, and `private` contains one fetch per sequence, for its private part.
        """
        geometry, adapter = self._batch.geometry, self._batch.adapter
        fetches = [(s.first, s.stop, fetch) for s, fetch in zip(shared_runs, shared, strict=True)]
        fetches += [(b, b + 1, fetch) for b, fetch in enumerate(private)]
        runs = [
            Run(first, stop, run.k, run.v)
            for first, stop, fetch in fetches
            for part in fetch.wait()
            for run in part.runs
        ]
        out, lse = attend_runs(q, runs, geometry.scales[layer])
        sinks = adapter.sinks[layer]
        out = apply_sinks(out, lse, None if sinks is None else sinks[:, None])
        return out.to(q.dtype).transpose(0, 1).flatten(1)
