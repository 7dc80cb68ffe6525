"""Exact prefill, layer-major: one layer at a time over all new tokens, its K and V leaving for the host as they come.

Device memory beside the weights: one hidden state `[T, D]`, changed in place slice by slice; one layer's K and V; and
one slice's queries, attention and MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from ..core import KVPart
from ..kernels.causal_blocks import BlockedAttention
from ..models.adapter import ModelAdapter
from ..models.exact_layer import keys_and_values, residual_after_attention, slices_of
from ..policies.base import PolicyState
from ..transfer.link import KVStorage, PrefilledLayer
from .sequence import Sequence

LOGITS_AT_ONCE = 64
"""Tokens whose logits over the vocabulary are in memory together."""


class Prefill:
    """The prefill of tokens [block table.length, stop) of one sequence, one layer a call, so that running decodes need
    not wait for all of it. What the block table has already (a reused prefix) is loaded layer by layer, and its rows
    are made known to the policy if they are not yet. The pool must have room reserved. When the last layer is done,
    `logits` `[n, V]` holds what follows each of the last n tokens that was asked for, and the caller commits the block
    table.

    Where rows lie on disk, and a layer's need not fit in memory, it goes through the layers once for each segment of
    the prompt, and attends block by block to what was there before."""

    def __init__(
        self,
        sequence: Sequence,
        stop: int,
        adapter: ModelAdapter,
        storage: KVStorage,
        *,
        slice_tokens: int,
        logits_of: int,
        segment_tokens: int | None = None,
        before_layer: Callable[[int], None] = lambda layer: None,
        after_layer: Callable[[int], None] = lambda layer: None,
        every_logits: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        """logits_of: n, tokens of the last slice. segment_tokens: most tokens of a segment, whole slices; None is all
        of them. `before_layer(layer)` is called before a layer is computed: the rows
        that the block table has already must be in the pool when it returns. `after_layer(layer)` is for the runner to
        call, when a layer is computed and, after the last one, committed. `every_logits(t, logits)`, if given, is
        called at the end of each segment with the logits `[m, V]` of what follows tokens t, t + 1, ..., a few at a
        time."""
        assert sequence.blocks.length < stop <= len(sequence.tokens)
        self.sequence, self.stop = sequence, stop
        self.logits: torch.Tensor | None = None
        self.after_layer = after_layer
        self._adapter, self._storage = adapter, storage
        self._logits_of, self._before_layer, self._every_logits = logits_of, before_layer, every_logits
        self._slice_tokens, self._segment_tokens = slice_tokens, segment_tokens or stop
        assert self._segment_tokens == stop or self._segment_tokens % slice_tokens == 0
        self._learn_from = sequence.learned if sequence.unlearned else sequence.blocks.length
        self._layer = 0
        self._began = False
        self._begin_segment(sequence.blocks.length)

    def _begin_segment(self, start: int) -> None:
        """The next tokens, from `start` on, as they enter the first layer."""
        adapter, stop = self._adapter, min(self.stop, start + self._segment_tokens)
        self._start, self._segment_stop, self._layer = start, stop, 0
        self._slices = slices_of(stop - start, self._slice_tokens)
        self._positions = torch.arange(start, stop, device=adapter.device) + self.sequence.shift
        tokens = torch.tensor(self.sequence.tokens[start:stop], device=adapter.device)
        self._hidden = adapter.embed(tokens, self._positions)

    @property
    def tokens(self) -> int:
        """How many a layer computes now."""
        return self._segment_stop - self._start

    @property
    def _last(self) -> bool:
        return self._segment_stop == self.stop

    @property
    def untouched(self) -> bool:
        """Whether nothing has been computed."""
        return not self._began

    @property
    def layer(self) -> int:
        """Layers that have run for all tokens."""
        return self._layer if self._last else 0

    @property
    def done(self) -> bool:
        """Whether every layer has run."""
        return self.layer == self._adapter.geometry.layers

    def run_layer(self) -> None:
        """Computes one layer for all tokens of a segment."""
        last = self._adapter.geometry.layers - 1
        assert self._layer <= last
        self._began = True
        self._before_layer(self._layer)
        layer = self._storage.prefill_layer(self.sequence.blocks, self._layer, self._start, self._keys_and_values())
        self.sequence.trace.bytes_requested += layer.bytes_to_device
        self.sequence.trace.bytes_to_host += layer.bytes_to_host
        self._attention_and_mlp(layer, last=self._layer == last)
        self._layer += 1
        if self._layer > last:
            self._end_segment()

    def _end_segment(self) -> None:
        if self._every_logits is not None:
            for s in slices_of(self.tokens, LOGITS_AT_ONCE):
                self._every_logits(self._start + s.start, self._adapter.logits(self._hidden[s]))
        if not self._last:
            self._learn_from = self._segment_stop
            self._begin_segment(self._segment_stop)
        elif self._logits_of:
            self.logits = self._adapter.logits(self._hidden[-self._logits_of :])

    def _keys_and_values(self) -> Iterator[KVPart]:
        inputs = (self._adapter.attention_input(self._layer, self._hidden[s]) for s in self._slices)
        return keys_and_values(self._adapter, self._layer, inputs, (self._positions[s] for s in self._slices))

    def _attention_and_mlp(self, rows: PrefilledLayer, *, last: bool) -> None:
        """The layer's second half, over K and V of the tokens that it sees. Of the last layer only the outputs of the
        last tokens, if any, are ever read. The policy hears nothing of sliding layers, which select nothing."""
        adapter, layer, state, kv = self._adapter, self._layer, self.sequence.state, rows.kv
        slides = adapter.geometry.windows[layer] is not None
        if rows.past:
            self._attend_past(rows, self._read_slices() if last else self._slices)
        for s in self._slices if not rows.past else ():
            attention_input = adapter.attention_input(layer, self._hidden[s])
            q = adapter.query(layer, attention_input, self._positions[s])
            if not slides:
                state.on_queries(layer, q, kv.k, self._start + s.start)
            if last and s not in self._read_slices():
                continue
            if last and self._every_logits is None:
                q, s = q[:, -self._logits_of :], slice(s.stop - self._logits_of, s.stop)
            seen = self._start + s.stop - rows.first
            position = self._start + s.start + self.sequence.shift
            residual = residual_after_attention(adapter, layer, self._hidden[s], q, kv, seen, position)
            self._hidden[s] = adapter.mlp(layer, residual)
        if not slides:
            learn(state, layer, kv, rows.first, self._learn_from)

    def _read_slices(self) -> list[slice]:
        """Those of the segment's slices whose outputs of the last layer are read."""
        if self._every_logits is not None:
            return self._slices
        return self._slices[-1:] if self._logits_of and self._last else []

    def _attend_past(self, rows: PrefilledLayer, slices: list[slice]) -> None:
        """Attention and MLP of `slices` over a past that is gone through once for all of them, block by block; what of
        it the policy does not know yet, it learns."""
        adapter, layer, state, geometry = self._adapter, self._layer, self.sequence.state, self._adapter.geometry
        attending = []
        for s in slices:
            q = adapter.query(layer, adapter.attention_input(layer, self._hidden[s]), self._positions[s])
            attending.append(BlockedAttention(q, geometry.kv_heads, geometry.scales[layer], geometry.softcap))
        if slices or self._learn_from < rows.first:
            go_through(rows.past, attending, state, layer, self._learn_from)
        for s, each in zip(slices, attending, strict=True):
            each.add_own(rows.kv.k[:, : s.stop], rows.kv.v[:, : s.stop])
            attended = each.result(adapter.sinks(layer)).transpose(0, 1).flatten(1)
            self._hidden[s] = adapter.mlp(layer, adapter.after_attention(layer, self._hidden[s], attended))


def go_through(
    parts: Iterable[KVPart], attending: Iterable[BlockedAttention], state: PolicyState, layer: int, start: int
) -> None:
    """Rows of a layer from the first token on, part by part, each of which is there once: all of `attending` attend to
    it, and the policy's state hears of those from token `start` on."""
    at = 0
    for part in parts:
        for each in attending:
            each.add(part.k, part.v)
        learn(state, layer, part, at, start)
        at += part.k.shape[1]


def learn(state: PolicyState, layer: int, rows: KVPart, at: int, start: int) -> None:
    """The policy's state hears of a layer's rows, of the tokens from `at` on, those from token `start` on."""
    if (known := max(0, start - at)) < rows.k.shape[1]:
        state.on_keys(layer, rows.k[:, known:], at + known)
        state.on_values(layer, rows.v[:, known:], at + known)
