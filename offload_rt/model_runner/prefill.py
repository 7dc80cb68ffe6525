"""Exact prefill, which computes all new tokens one layer at a time. K and V are copied to the host in slices of tokens.

In addition to the weights, the device memory has to contain the hidden states `[T, D]` of all T new tokens, the K and V
of one layer, and temporary tensors for one slice. Each layer updates the hidden states in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import pairwise

import torch

from ..core import KVPart
from ..kernels.causal_blocks import BlockedAttention
from ..kv_cache.pool import HostPool
from ..kv_cache.state_pool import StatePool
from ..models.adapter import ModelAdapter
from ..models.full_attention import keys_and_values, residual_after_attention, slices_of
from ..models.recurrent import StateSlots
from ..policies.base import Policy, PolicyState
from ..transfer.base import KVStorage, PrefilledLayer
from .sequence import Sequence

LOGITS_AT_ONCE = 64  # maximum number of tokens whose logits are kept in memory at the same time


class StateCapture:
    """Copies the recurrent state of one sequence to snapshots during a prefill, layer by layer.

    Args:
        slots: Recurrent state of all sequences on the device.
        slot: Slot of the sequence in `slots`.
        pool: Host memory for the snapshots.
        targets: Slot in `pool` for each snapshot, by the number of tokens before the snapshot.
    """

    def __init__(self, slots: StateSlots, slot: int, pool: StatePool, targets: Mapping[int, int]) -> None:
        self._slots, self._slot, self._pool, self._targets = slots, slot, pool, dict(targets)
        self.positions = sorted(targets)

    def on_layer_finished(self, layer: int) -> None:
        """Copy the state of a decoder layer if the layer has just processed the last token before a snapshot."""
        if (target := self._targets.get(self._slots.processed[layer][self._slot])) is not None:
            self._pool.save(target, layer, *self._slots.layer_state(layer, self._slot))


class Prefill:
    """Prefill of the tokens [blocks.length, stop) of one sequence. Each call to `run_layer` computes one layer.

    Decode steps of other requests may run between the calls. The caller reserves the blocks before the first call, and
    commits the tokens after the last call. `logits` `[n, V]` then contains the logits of the last n tokens.

    If the KV cache is on disk, the KV of one layer may not fit in memory. The prompt is then divided into segments.
    Each segment passes through all layers, and attends to earlier KV block by block.

    Args:
        slice_tokens: Number of tokens whose attention and MLP are computed together.
        logits_to_keep: Number n of tokens at the end whose logits are kept, at most `slice_tokens`.
        segment_tokens: Maximum number of tokens per segment, a multiple of `slice_tokens`. None means a single segment.
        before_layer: Function that is called with a layer index before the layer runs. When it returns, the KV of
            earlier tokens must be in the pool.
        after_layer: Function that the runner calls after each layer. For the last layer, it is called after the tokens
            have been committed.
        on_logits: Function that is called as `on_logits(t, logits)` at the end of each segment, with the logits
            `[m, V]` of a few tokens, the first of which is t.
        capture: Takes snapshots of the recurrent state. Slices end at the positions of these snapshots.
    """

    def __init__(
        self,
        sequence: Sequence,
        stop: int,
        adapter: ModelAdapter,
        storage: KVStorage,
        *,
        slice_tokens: int,
        logits_to_keep: int,
        segment_tokens: int | None = None,
        before_layer: Callable[[int], None] = lambda layer: None,
        after_layer: Callable[[int], None] = lambda layer: None,
        on_logits: Callable[[int, torch.Tensor], None] | None = None,
        capture: StateCapture | None = None,
    ) -> None:
        assert sequence.blocks.length < stop <= len(sequence.tokens)
        self.sequence, self.stop = sequence, stop
        self.logits: torch.Tensor | None = None
        self.after_layer = after_layer
        slots = sequence.state_slots
        self._snapshot_positions: Seq[int] = [] if capture is None else capture.positions
        callbacks = [] if capture is None else [capture.on_layer_finished]
        self._adapter = adapter.with_state(None if slots is None else slots.view([sequence.state_slot], *callbacks))
        self._storage = storage
        self._logits_to_keep, self._before_layer, self._on_logits = logits_to_keep, before_layer, on_logits
        self._slice_tokens, self._segment_tokens = slice_tokens, segment_tokens or stop
        assert self._segment_tokens == stop or self._segment_tokens % slice_tokens == 0
        self._observe_from = sequence.observed if sequence.unobserved else sequence.blocks.length
        self._layer = 0
        self._started = False
        self._shared: dict[int, PrefilledLayer] = {}
        self._begin_segment(sequence.blocks.length)

    def _begin_segment(self, start: int) -> None:
        adapter, stop = self._adapter, min(self.stop, start + self._segment_tokens)
        self._start, self._segment_stop, self._layer, self._shared = start, stop, 0, {}
        bounds = [start, *(position for position in self._snapshot_positions if start < position < stop), stop]
        self._slices = [
            slice(first - start + s.start, first - start + s.stop)
            for first, end in pairwise(bounds)
            for s in slices_of(end - first, self._slice_tokens)
        ]
        positions = torch.arange(start, stop, device=adapter.device) + self.sequence.shift
        # All layers use the same tensor for a slice, because rotary tables are cached by tensor object.
        self._positions = [positions[s] for s in self._slices]
        self._tokens = torch.tensor(self.sequence.tokens[start:stop], device=adapter.device)
        self._hidden = adapter.embed(self._tokens, positions)

    @property
    def tokens(self) -> int:
        """Number of tokens in the current segment."""
        return self._segment_stop - self._start

    @property
    def _is_last_segment(self) -> bool:
        return self._segment_stop == self.stop

    @property
    def untouched(self) -> bool:
        return not self._started

    @property
    def layers(self) -> int:
        return self._adapter.geometry.layers

    @property
    def finished_layers(self) -> int:
        """Number of layers that have computed all tokens."""
        return self._layer if self._is_last_segment else 0

    @property
    def done(self) -> bool:
        return self.finished_layers == self.layers

    def run_layer(self) -> None:
        last = self._adapter.geometry.layers - 1
        assert self._layer <= last
        self._started = True
        if self._layer == 0:
            self._adapter.run_stages(-1, self._hidden, self._slices)
        self._before_layer(self._layer)
        self._attention_and_mlp(self._layer_kv(), last=self._layer == last)
        self._adapter.run_stages(self._layer, self._hidden, self._needed_slices(self._layer == last))
        self._layer += 1
        if self._layer > last:
            self._end_segment()

    def _end_segment(self) -> None:
        if self._on_logits is not None:
            for s in slices_of(self.tokens, LOGITS_AT_ONCE):
                self._on_logits(self._start + s.start, self._adapter.logits(self._hidden[s]))
        if not self._is_last_segment:
            self._observe_from = self._segment_stop
            self._begin_segment(self._segment_stop)
        elif self._logits_to_keep:
            self.logits = self._adapter.logits(self._hidden[-self._logits_to_keep :])

    def _layer_kv(self) -> PrefilledLayer:
        """Return the KV that the current layer attends to. If the layer has its own KV, the new KV is stored first."""
        geometry, trace = self._adapter.geometry, self.sequence.trace
        if (source := geometry.kv_layer(self._layer)) != self._layer:
            return self._shared[source]
        rows = self._storage.prefill_layer(self.sequence.blocks, self._layer, self._start, self._keys_and_values())
        trace.bytes_requested += rows.bytes_to_device
        trace.prefill_bytes += rows.bytes_to_device
        trace.bytes_to_host += rows.bytes_to_host
        if self._layer in geometry.shared_kv:
            self._shared[self._layer] = rows
        return rows

    def _query(self, s: slice, positions: torch.Tensor) -> torch.Tensor:
        adapter, layer = self._adapter, self._layer
        project = adapter.query if adapter.geometry.kv_layer(layer) == layer else adapter.lone_query
        return project(layer, adapter.attention_input(layer, self._hidden[s]), positions)

    def _keys_and_values(self) -> Iterator[KVPart]:
        inputs = (self._adapter.attention_input(self._layer, self._hidden[s]) for s in self._slices)
        return keys_and_values(self._adapter, self._layer, inputs, self._positions)

    def _attention_and_mlp(self, rows: PrefilledLayer, *, last: bool) -> None:
        adapter, layer, state, kv = self._adapter, self._layer, self.sequence.state, rows.kv
        # The policy selects no tokens in sliding-window layers. A layer that uses the KV of an earlier layer also uses
        # its policy state.
        learns = adapter.geometry.windows[layer] is None and adapter.geometry.kv_layer(layer) == layer
        if rows.past:
            self._attend_past(rows, self._needed_slices(last))
        for s, positions in zip(self._slices, self._positions, strict=True) if not rows.past else ():
            q = self._query(s, positions)
            if learns:
                state.on_queries(layer, q, kv.k, self._start + s.start)
            if s not in self._needed_slices(last):
                continue
            if last and self._on_logits is None and not self._keeps_state:
                q, s = q[:, -self._logits_to_keep :], slice(s.stop - self._logits_to_keep, s.stop)
            stop = self._start + s.stop - rows.first
            position = self._start + s.start + self.sequence.shift
            residual = residual_after_attention(adapter, layer, self._hidden[s], q, kv, stop, position)
            self._hidden[s] = adapter.mlp(layer, residual, self._tokens[s])
        if learns:
            pass_to_policy(state, layer, kv, rows.first, self._observe_from)

    @property
    def _keeps_state(self) -> bool:
        geometry = self._adapter.geometry
        return geometry.keeps_state(geometry.layers - 1)  # If so, every token must update the last layer's state.

    def _needed_slices(self, last: bool) -> list[slice]:
        if not last or self._on_logits is not None or self._keeps_state:
            return self._slices
        # In the last layer, only tokens with requested logits are needed.
        return self._slices[-1:] if self._logits_to_keep and self._is_last_segment else []

    def _attend_past(self, rows: PrefilledLayer, slices: list[slice]) -> None:
        """Compute attention and MLP of `slices`. Each part of earlier KV (`rows.past`) is read once for all slices."""
        adapter, layer, state, geometry = self._adapter, self._layer, self.sequence.state, self._adapter.geometry
        attentions = []
        for s, positions in zip(self._slices, self._positions, strict=True):
            if s not in slices:
                continue
            q = self._query(s, positions)
            attentions.append(
                BlockedAttention(q, geometry.rows(layer).kv_heads, geometry.scales[layer], geometry.softcap)
            )
        observe_from = self._observe_from if geometry.kv_layer(layer) == layer else rows.first
        if slices or observe_from < rows.first:
            attend_past_kv(rows.past, attentions, state, layer, observe_from)
        for s, attention in zip(slices, attentions, strict=True):
            attention.add_causal(rows.kv.k[:, : s.stop], rows.kv.v[:, : s.stop])
            attended = attention.result(adapter.sinks[layer]).transpose(0, 1).flatten(1)
            residual = adapter.after_attention(layer, self._hidden[s], attended)
            self._hidden[s] = adapter.mlp(layer, residual, self._tokens[s])


def attend_past_kv(
    parts: Iterable[KVPart], attentions: Iterable[BlockedAttention], state: PolicyState, layer: int, start: int
) -> None:
    """Attend to each part of a layer's KV with the queries of all `attentions`.

    The KV of tokens from `start` on is also passed to the policy's state.
    """
    first = 0
    for part in parts:
        for attention in attentions:
            attention.add(part.k, part.v)
        pass_to_policy(state, layer, part, first, start)
        first += part.k.shape[1]


def pass_to_policy(state: PolicyState, layer: int, rows: KVPart, first: int, start: int) -> None:
    """Pass the KV of the tokens from `start` on to the policy's state. `rows` contains the KV from token `first` on."""
    if (skip := max(0, start - first)) < rows.k.shape[1]:
        state.on_kv(layer, rows.k[:, skip:], rows.v[:, skip:], first + skip)


# Number of bytes that the hidden states, queries and outputs of one segment may take. With larger segments, earlier KV
# is read less often, but more memory is needed.
SEGMENT_BYTES = {"cpu": 32 << 20, "device": 512 << 20}


def segment_tokens(pool: HostPool, policy: Policy, adapter: ModelAdapter, slice_tokens: int) -> int | None:
    """Return the number of prompt tokens per segment, or None if the whole prompt is a single segment."""
    geometry = adapter.geometry
    # Policies that observe queries need all keys at once, and sliding-window layers keep only recent KV.
    if pool.file is None or policy.wants_queries or geometry.sliding:
        return None
    size = adapter.dtype.itemsize
    token_bytes = geometry.hidden * size + geometry.heads * geometry.head_dim * (size + 4)
    max_tokens = SEGMENT_BYTES["cpu" if adapter.device.type == "cpu" else "device"] // token_bytes
    return max(1, max_tokens // slice_tokens) * slice_tokens
