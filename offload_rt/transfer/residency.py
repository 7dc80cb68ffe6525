"""The rows that stay on the device: sinks, and a ring of the most recent tokens; of a sliding layer its window."""

from __future__ import annotations

import torch

from ..core import KVPart, ModelGeometry, Visible


class Residency:
    """Resident rows of one sequence in all layers, on `device`.

    Of each layer `[2, Hkv, s + w, d]`. A sink t has place t; every other token t has place s + (t - s) mod w, so that a
    new row overwrites the one that leaves the window, and what there is always fills the first places. `store` and
    `part` are called on the compute stream; a row that is overwritten has been written back before it could become a
    candidate (the link orders that).
    """

    def __init__(
        self, geometry: ModelGeometry, dtype: torch.dtype, device: torch.device, sinks: int, recent: int
    ) -> None:
        self._sizes = [geometry.resident(layer, sinks, recent) for layer in range(geometry.layers)]
        shapes = [(2, geometry.kv_heads, s + w, geometry.head_dim) for s, w in self._sizes]
        self._rows = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]

    def clone(self) -> Residency:
        """An independent copy."""
        twin = object.__new__(Residency)
        twin._rows, twin._sizes = [rows.clone() for rows in self._rows], self._sizes
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(rows.nbytes for rows in self._rows)

    def sizes(self, layer: int) -> tuple[int, int]:
        """Sinks and recent tokens that a layer has room for."""
        return self._sizes[layer]

    def lists(self, layer: int) -> torch.Tensor:
        """The rows of a layer `[2 * Hkv, s + w, d]`, K of all heads, then V (`kernels.lists.keep_rows`)."""
        return self._rows[layer].flatten(0, 1)

    def store(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keeps what is resident of tokens [start, start + m), k and v `[Hkv, m, d]`."""
        rows, (sinks, recent), stop = self._rows[layer], self._sizes[layer], start + k.shape[1]
        if start < sinks:
            head = min(sinks, stop)
            rows[0, :, start:head] = k[:, : head - start]
            rows[1, :, start:head] = v[:, : head - start]
        first = max(start, stop - recent, sinks)
        if first < stop:
            at = place(first, sinks, recent)
            if at + stop - first <= sinks + recent:  # as one new token is
                rows[0, :, at : at + stop - first] = k[:, first - start :]
                rows[1, :, at : at + stop - first] = v[:, first - start :]
                return
            places = (torch.arange(first - sinks, stop - sinks, device=k.device) % recent).add_(sinks)
            rows[0].index_copy_(1, places, k[:, first - start :])
            rows[1].index_copy_(1, places, v[:, first - start :])

    def row(self, layer: int, slot: int) -> torch.Tensor:
        """A copy of the resident row of the token in `slot`, `[2, Hkv, d]`."""
        return self._rows[layer][:, :, place(slot, *self._sizes[layer])].contiguous()

    def move(self, layer: int, source: int, target: int) -> None:
        """The recent row in slot `source` also takes slot `target`, if that is a sink's."""
        rows, (sinks, recent) = self._rows[layer], self._sizes[layer]
        if target < sinks:
            rows[:, :, target] = rows[:, :, place(source, sinks, recent)]

    def part(self, layer: int, visible: Visible) -> list[KVPart]:
        """The resident rows of `visible` in token order, as views."""
        pieces = [self._rows[layer][:, :, run.start : run.stop] for run in self._runs(layer, visible) if run]
        return [KVPart(piece[0], piece[1]) for piece in pieces]

    def copy_to(self, layer: int, visible: Visible, rows: torch.Tensor) -> None:
        """The resident rows of `visible` in token order become the first of rows `[2, Hkv, n, d]`, K and V."""
        own, at = self._rows[layer], 0
        for run in self._runs(layer, visible):
            if size := len(run):
                rows.narrow(2, at, size).copy_(own.narrow(2, run.start, size))
                at += size

    def _runs(self, layer: int, visible: Visible) -> list[range]:
        """Neighbouring places of the resident tokens of `visible`, in token order."""
        (sinks, size), recent = self._sizes[layer], visible.recent
        first = max(recent.start, sinks)
        rounds = -(-(first - sinks) // size)
        ring_start = min(recent.stop, sinks + rounds * size)
        ring = [run for run in (range(first, ring_start), range(ring_start, recent.stop)) if run]
        starts = [place(run.start, sinks, size) for run in ring]
        placed = [range(start, start + len(run)) for start, run in zip(starts, ring, strict=True)]
        return [visible.sinks, range(recent.start, min(recent.stop, sinks)), *placed]


def place(token: int, sinks: int, recent: int) -> int:
    """Where the row of a resident token is."""
    return token if token < sinks else sinks + (token - sinks) % recent


def places(visible: Visible, sinks: int, recent: int) -> range:
    """Where the resident rows of `visible` are, in the order of places; a sliding window that hides more than sinks is
    no shorter than `recent`."""
    assert visible.all.start <= sinks or len(visible.recent) == recent
    return range(min(visible.all.start, sinks), min(visible.recent.stop, sinks + recent))
