"""Resident KV on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from ..core import BlockTable, KVPart, ModelGeometry, VisibleTokens
from ..kv_cache.layout import fill_planes
from ..kv_cache.pool import HostPool


class Residency:
    """Resident KV of one sequence: `[planes, Hkv, s + w, d]` per layer, for s sinks and a window of w recent tokens.

    The planes are K and V, or only K if the keys contain the values. For a sliding-window layer, w is the length of its
    window. Layers that share KV also share this memory.

    The recent tokens form a ring buffer after the sinks. Sink t has index t, and recent token t has index
    s + (t - s) mod w, so a new token overwrites the token that leaves the window.

    `store` and `part` must be called in the compute stream.
    """

    def __init__(
        self, geometry: ModelGeometry, dtype: torch.dtype, device: torch.device, sinks: int, recent: int
    ) -> None:
        self._sizes = [geometry.resident(layer, sinks, recent) for layer in range(geometry.layers)]
        rows = [geometry.rows(layer) for layer in range(geometry.layers)]
        shapes = [(r.planes, r.kv_heads, s + w, r.head_dim) for r, (s, w) in zip(rows, self._sizes, strict=True)]
        own = {layer: torch.empty(shapes[layer], dtype=dtype, device=device) for layer in geometry.kv_layers}
        self._sources = [geometry.kv_layer(layer) for layer in range(geometry.layers)]
        self._rows = [own[source] for source in self._sources]

    def clone(self) -> Residency:
        twin = object.__new__(Residency)
        own = {layer: self._rows[layer].clone() for layer in set(self._sources)}
        twin._rows, twin._sizes, twin._sources = [own[layer] for layer in self._sources], self._sizes, self._sources
        return twin

    @property
    def nbytes(self) -> int:
        return sum(self._rows[layer].nbytes for layer in set(self._sources))

    def sizes(self, layer: int) -> tuple[int, int]:
        """Return how many sinks and how many recent tokens a layer has space for."""
        return self._sizes[layer]

    def lists(self, layer: int) -> torch.Tensor:
        """Return the resident KV `[planes * Hkv, s + w, d]`: K of all heads, then V of all heads."""
        return self._rows[layer].flatten(0, 1)

    def store(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the KV of those tokens in [start, start + m) that are resident. k and v are `[Hkv, m, d]`."""
        rows, (sinks, recent), stop = self._rows[layer], self._sizes[layer], start + k.shape[1]
        if start < sinks:
            head = min(sinks, stop)
            fill_planes(rows[:, :, start:head], 0, k[:, : head - start], v[:, : head - start])
        first = max(start, stop - recent, sinks)
        if first < stop:
            at, last = resident_index(first, sinks, recent), (k[:, first - start :], v[:, first - start :])
            if at + stop - first <= sinks + recent:  # always true for a single new token
                fill_planes(rows[:, :, at : at + stop - first], 0, *last)
                return
            indices = (torch.arange(first - sinks, stop - sinks, device=k.device) % recent).add_(sinks)
            for plane, own in zip(rows, last[: len(rows)], strict=True):
                plane.index_copy_(1, indices, own)

    def load(self, pool: HostPool, blocks: BlockTable, read: Callable[[int, range], Iterable[KVPart]]) -> None:
        """Load resident KV from the pool. `read(layer, tokens)` returns the KV of a token range."""
        for layer in sorted(set(self._sources)) if blocks.length else ():
            sinks, recent = self._sizes[layer]
            last = range(max(0, blocks.length - recent), blocks.length)
            for tokens in (range(min(sinks, blocks.length)), pool.stored_range(blocks, layer, last)):
                at = tokens.start
                for part in read(layer, tokens) if tokens else ():
                    own = part.map(partial(torch.Tensor.to, device=self._rows[layer].device))
                    self.store(layer, at, own.k, own.v)
                    at += part.k.shape[1]

    def row(self, layer: int, slot: int) -> torch.Tensor:
        """Return a copy `[planes, Hkv, d]` of the KV of the resident token in slot `slot`."""
        # `contiguous()` would not be enough: for a single resident token, it returns a view, which later compute work
        # overwrites.
        row = self._rows[layer][:, :, resident_index(slot, *self._sizes[layer])]
        return row.clone(memory_format=torch.contiguous_format)

    def move(self, layer: int, source: int, target: int) -> None:
        """If slot `target` is a sink, copy the KV of the recent token in slot `source` to it."""
        rows, (sinks, recent) = self._rows[layer], self._sizes[layer]
        if target < sinks:
            rows[:, :, target] = rows[:, :, resident_index(source, sinks, recent)]

    def part(self, layer: int, visible: VisibleTokens) -> list[KVPart]:
        """Return views of the resident KV of `visible`, in token order."""
        pieces = [self._rows[layer][:, :, run.start : run.stop] for run in self._runs(layer, visible) if run]
        return [KVPart.of(piece) for piece in pieces]

    def copy_to(self, layer: int, visible: VisibleTokens, rows: torch.Tensor) -> None:
        """Copy the resident KV of `visible`, in token order, to the start of `rows` `[planes, Hkv, n, d]`."""
        own, at = self._rows[layer], 0
        for run in self._runs(layer, visible):
            if size := len(run):
                rows.narrow(2, at, size).copy_(own.narrow(2, run.start, size))
                at += size

    def _runs(self, layer: int, visible: VisibleTokens) -> list[range]:
        (sinks, size), recent = self._sizes[layer], visible.recent
        first = max(recent.start, sinks)
        rounds = -(-(first - sinks) // size)
        ring_start = min(recent.stop, sinks + rounds * size)
        ring = [run for run in (range(first, ring_start), range(ring_start, recent.stop)) if run]
        starts = [resident_index(run.start, sinks, size) for run in ring]
        placed = [range(start, start + len(run)) for start, run in zip(starts, ring, strict=True)]
        return [visible.sinks, range(recent.start, min(recent.stop, sinks)), *placed]


def resident_index(token: int, sinks: int, recent: int) -> int:
    """Return the index of a resident token in the ring buffer of `Residency`."""
    return token if token < sinks else sinks + (token - sinks) % recent


def resident_range(visible: VisibleTokens, sinks: int, recent: int) -> range | None:
    """Return the index range of the resident tokens of `visible` in `Residency`, or None if it is not contiguous."""
    first, stop = visible.all.start, visible.recent.stop
    if first <= sinks or len(visible.recent) == recent:
        return range(min(first, sinks), min(stop, sinks + recent))
    start = resident_index(first, sinks, recent)  # After a truncation, a window may wrap around in the ring buffer.
    return range(start, start + stop - first) if start + stop - first <= sinks + recent else None
