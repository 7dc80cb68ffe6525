"""Exact prefill, layer-major: one layer at a time over all new tokens, its K and V leaving for the host as they come.

Device memory beside the weights: one hidden state `[T, D]`, changed in place slice by slice; one layer's K and V; and
one slice's queries, attention and MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..core import KVPart
from ..models.adapter import ModelAdapter
from ..models.exact_layer import keys_and_values, residual_after_attention, slices_of
from ..transfer.link import KVStorage
from .sequence import Sequence

LOGITS_AT_ONCE = 64
"""Tokens whose logits over the vocabulary are in memory together."""


class Prefill:
    """The prefill of tokens [block table.length, stop) of one sequence, one layer a call, so that running decodes need
    not wait for all of it. What the block table has already (a reused prefix) is loaded layer by layer, and its rows
    are made known to the policy if they are not yet. The pool must have room reserved. When the last layer is done,
    `logits` `[n, V]` holds what follows each of the last n tokens that was asked for, and the caller commits the block
    table."""

    def __init__(
        self,
        sequence: Sequence,
        stop: int,
        adapter: ModelAdapter,
        storage: KVStorage,
        *,
        slice_tokens: int,
        logits_of: int,
        before_layer: Callable[[int], None] = lambda layer: None,
        after_layer: Callable[[int], None] = lambda layer: None,
        every_logits: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        """logits_of: n, tokens of the last slice. `before_layer(layer)` is called before a layer is computed: the rows
        that the block table has already must be in the pool when it returns. `after_layer(layer)` is for the runner to
        call, when a layer is computed and, after the last one, committed. `every_logits(t, logits)`, if given, is
        called at the end with the logits `[m, V]` of what follows tokens t, t + 1, ..., a few at a time."""
        assert sequence.blocks.length < stop <= len(sequence.tokens)
        self.sequence, self.stop = sequence, stop
        self.layer = 0
        self.logits: torch.Tensor | None = None
        self.after_layer = after_layer
        self._adapter, self._storage = adapter, storage
        self._logits_of, self._before_layer, self._every_logits = logits_of, before_layer, every_logits
        self._start = sequence.blocks.length
        self._slices = slices_of(stop - self._start, slice_tokens)
        assert logits_of <= self._slices[-1].stop - self._slices[-1].start
        self._learn_from = 0 if sequence.unlearned else self._start
        self._positions = torch.arange(self._start, stop, device=adapter.device) + sequence.shift
        tokens = torch.tensor(sequence.tokens[self._start : stop], device=adapter.device)
        self._hidden = adapter.embed(tokens, self._positions)

    @property
    def tokens(self) -> int:
        """How many it computes."""
        return self.stop - self._start

    @property
    def done(self) -> bool:
        """Whether every layer has run."""
        return self.layer == self._adapter.geometry.layers

    def run_layer(self) -> None:
        """Computes one layer for all tokens."""
        last = self._adapter.geometry.layers - 1
        assert self.layer <= last
        self._before_layer(self.layer)
        layer = self._storage.prefill_layer(self.sequence.blocks, self.layer, self._start, self._keys_and_values())
        self.sequence.trace.bytes_requested += layer.bytes_to_device
        self.sequence.trace.bytes_to_host += layer.bytes_to_host
        self._attention_and_mlp(layer.kv, layer.first, last=self.layer == last)
        if self.layer == last and self._logits_of:
            self.logits = self._adapter.logits(self._hidden[-self._logits_of :])
        if self.layer == last and self._every_logits is not None:
            for s in slices_of(self.tokens, LOGITS_AT_ONCE):
                self._every_logits(self._start + s.start, self._adapter.logits(self._hidden[s]))
        self.layer += 1

    def _keys_and_values(self) -> Iterator[KVPart]:
        inputs = (self._adapter.attention_input(self.layer, self._hidden[s]) for s in self._slices)
        return keys_and_values(self._adapter, self.layer, inputs, (self._positions[s] for s in self._slices))

    def _attention_and_mlp(self, kv: KVPart, first: int, *, last: bool) -> None:
        """The layer's second half, over K and V of the tokens from `first` on. Of the last layer only the outputs
        of the last tokens, if any, are ever read. The policy hears nothing of sliding layers, which select nothing."""
        adapter, layer, state = self._adapter, self.layer, self.sequence.state
        slides = adapter.geometry.windows[layer] is not None
        for s in self._slices:
            attention_input = adapter.attention_input(layer, self._hidden[s])
            q = adapter.query(layer, attention_input, self._positions[s])
            if not slides:
                state.on_queries(layer, q, kv.k, self._start + s.start)
            if last and self._every_logits is None:
                if not self._logits_of or s.stop < self.tokens:
                    continue
                q, s = q[:, -self._logits_of :], slice(s.stop - self._logits_of, s.stop)
            residual = residual_after_attention(adapter, layer, self._hidden[s], q, kv, self._start + s.stop - first)
            self._hidden[s] = adapter.mlp(layer, residual)
        if not slides:
            state.on_keys(layer, kv.k[:, self._learn_from :], self._learn_from)
            state.on_values(layer, kv.v[:, self._learn_from :], self._learn_from)
