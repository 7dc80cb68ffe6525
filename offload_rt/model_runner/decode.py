"""One decode step of a batch: the layer loop, top to bottom.

While layer l computes, the KV of layer l + 1 is being fetched. The tokens to fetch are selected with a query predicted
from layer l's attention input, or from the residual after its attention (InfiniGen §4.3). If layer l + 1 is dense, it
attends to all tokens, so its fetch starts first and needs no prediction. `per_sequence.py` and `batched.py` implement
the selection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.dispatch import attend_runs
from ..kernels.segments import Run
from ..transfer.base import PendingFetch
from .attention import give_to_sinks
from .batch import DecodeBatch, LayerFetch, StepMode
from .per_sequence import PerSequenceFetch, SequenceFetch, enter_fetches
from .sequence import Sequence
from .shared_prefix import Segment


class DecodeStep:
    """Computes token `tokens[position]` of each sequence of a batch and returns the logits for the next token.

    Before the step, `slots.begin_step` must have reserved a slot for the token. After the step, the caller commits the
    token. The result of a sequence does not depend on the other sequences. Shared KV is fetched once. In layers that
    attend to all tokens, it is also read only once.
    """

    def __init__(self, batch: DecodeBatch, mode: StepMode) -> None:
        self.batch, self.mode = batch, mode
        self.adapter, self.transfer = batch.adapter.with_state(batch.state()), batch.transfer
        self.tokens, self.positions = mode.inputs()

    def run(self) -> torch.Tensor:
        """Run the step. Return float32 logits `[B, V]`."""
        self.begin()
        logits = self.compute()
        self.mode.finish()
        return logits

    def begin(self) -> None:
        """Record the start of the step in the traces, and evict tokens if the pool is full.

        Called before the first launch.
        """
        for sequence in self.batch.sequences:
            sequence.trace.begin_step()
            self._evict(sequence)

    def compute(self) -> torch.Tensor:
        """Run all layers and return float32 logits `[B, V]`."""
        adapter, mode = self.adapter, self.mode
        x = self._through_stages(-1, adapter.embed(self.tokens, self.positions))
        fetched = self._fetch_dense(0)
        for layer in range(self.batch.geometry.layers):
            attention_input = adapter.attention_input(layer, x)
            q, k, v = adapter.qkv(layer, attention_input, self.positions)
            mode.append(layer, k, v)
            fetched = fetched or mode.fetch(layer, q)

            upcoming = self._fetch_dense(layer + 1)
            source = self.batch.policy.query_source if self.batch.selects(layer + 1) else None
            if source == "attention_input":
                upcoming = self._fetch_speculated(layer + 1, attention_input)
            if source == "normed_input":
                upcoming = self._fetch_speculated(layer + 1, adapter.attention_input(layer + 1, x))

            attended = fetched.attend(q)
            residual = adapter.after_attention(layer, x, attended)
            if source == "residual":
                upcoming = self._fetch_speculated(layer + 1, adapter.attention_input(layer + 1, residual))
            x = self._through_stages(layer, adapter.mlp(layer, residual))
            fetched = upcoming
        return adapter.logits(x)

    def _through_stages(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Run the decoder layers without attention that follow attention layer `layer` on `x` `[B, D]`."""
        for stage in self.adapter.stages(layer):
            x = stage.run(x)
        return x

    def _evict(self, sequence: Sequence) -> None:
        """If the pool is full, move KV of the token that leaves the recent window to the slot of the evicted token.

        This happens in all layers before any layer selects.
        """
        for layer in range(self.batch.geometry.layers):
            if (moved := sequence.slots.displaced(layer)) is not None:
                self.transfer.storage.displace(sequence.blocks, layer, *moved)
                if self.batch.learns(layer):
                    sequence.state.on_moved(layer, *moved)

    def _fetch_speculated(self, layer: int, attention_input: torch.Tensor) -> LayerFetch:
        """Start fetching the tokens that `layer` selects with its predicted query.

        The query is computed from the predicted `attention_input` `[B, D]`.
        """
        guess = self.batch.policy.correct_guess(layer, attention_input)
        return self.mode.fetch(layer, self.adapter.query(layer, guess, self.positions))

    def _fetch_dense(self, layer: int) -> LayerFetch | None:
        """Start fetching all visible tokens of `layer`: shared segments first, then the private part of each sequence.

        Return None if `layer` does not exist or selects tokens.
        """
        batch = self.batch
        if layer >= batch.geometry.layers or batch.selects(layer):
            return None
        if (everything := self.mode.fetch_all(layer)) is not None:
            return everything
        visible, segments = batch.visible(layer), batch.sharing.segments
        block_tables = [s.blocks for s in batch.sequences]
        if batch.geometry.windows[layer] is not None or batch.geometry.softcap is not None:
            segments = ()  # Sliding windows differ between sequences, and segments do not support soft-capped scores.
        shared = [
            (segment, self.transfer.rows.fetch_range(block_tables[segment.first], layer, segment.tokens))
            for segment in segments
        ]
        for segment, pending in shared:
            batch.sequences[segment.first].trace.bytes_requested += pending.bytes
        own = [batch.sharing.own(b, seen) for b, seen in enumerate(visible)] if shared else visible
        each = zip(block_tables, own, strict=True)
        pending_fetches = [self.transfer.rows.fetch(blocks, layer, seen, None) for blocks, seen in each]
        fetches = enter_fetches(batch, layer, pending_fetches, [None] * len(pending_fetches))
        if shared:
            return SharedPrefixFetch(batch.geometry.scales[layer], self.adapter.sinks(layer), shared, fetches)
        return PerSequenceFetch(batch, layer, fetches)


@dataclass(frozen=True)
class SharedPrefixFetch:
    """A pending fetch for a layer that attends to all tokens: shared segments, and each sequence's private part."""

    scale: float
    sinks: torch.Tensor | None
    segments: list[tuple[Segment, PendingFetch]]
    own: list[SequenceFetch]

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """Return the attention output `[B, H * d]` of q `[H, B, d]`. Shared KV is read once."""
        pending_fetches = [(segment.first, segment.stop, pending) for segment, pending in self.segments]
        pending_fetches += [(b, b + 1, fetch.pending) for b, fetch in enumerate(self.own)]
        runs = [
            Run(first, stop, run.k, run.v)
            for first, stop, pending in pending_fetches
            for part in pending.wait()
            for run in part.runs
        ]
        out, lse = attend_runs(q, runs, self.scale)
        out = give_to_sinks(out, lse, None if self.sinks is None else self.sinks[:, None])
        return out.to(q.dtype).transpose(0, 1).flatten(1)
