"""The rows that stay on the device: sinks, and a ring of the most recent tokens."""

from __future__ import annotations

import torch

from ..core import KVPart, ModelGeometry, Visible


class Residency:
    """Resident rows of one sequence in all layers, on `device`.

    sinks: `[L, 2, Hkv, s, d]`, token t in place t. ring: `[L, 2, Hkv, w, d]`, token t in place t mod w, so that a new
    row overwrites the one that leaves the window. `store` and `part` are called on the compute stream; a row that is
    overwritten has been written back before it could become a candidate (the link orders that).
    """

    def __init__(
        self, geometry: ModelGeometry, dtype: torch.dtype, device: torch.device, sinks: int, recent: int
    ) -> None:
        shape = (geometry.layers, 2, geometry.kv_heads)
        self._sinks = torch.empty(*shape, sinks, geometry.head_dim, dtype=dtype, device=device)
        self._ring = torch.empty(*shape, recent, geometry.head_dim, dtype=dtype, device=device)

    def clone(self) -> Residency:
        """An independent copy."""
        twin = object.__new__(Residency)
        twin._sinks, twin._ring = self._sinks.clone(), self._ring.clone()
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self._sinks.nbytes + self._ring.nbytes

    def store(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keeps what is resident of tokens [start, start + m), k and v `[Hkv, m, d]`."""
        stop = start + k.shape[1]
        sinks, recent = self._sinks.shape[3], self._ring.shape[3]
        if start < sinks:
            head = min(sinks, stop)
            self._sinks[layer, 0, :, start:head] = k[:, : head - start]
            self._sinks[layer, 1, :, start:head] = v[:, : head - start]
        first = max(start, stop - recent)
        places = torch.arange(first, stop, device=k.device) % recent
        self._ring[layer, 0].index_copy_(1, places, k[:, first - start :])
        self._ring[layer, 1].index_copy_(1, places, v[:, first - start :])

    def move(self, layer: int, source: int, target: int) -> None:
        """The recent row in slot `source` also takes slot `target`, if that is a sink's."""
        if target < self._sinks.shape[3]:
            self._sinks[layer, :, :, target] = self._ring[layer, :, :, source % self._ring.shape[3]]

    def part(self, layer: int, visible: Visible) -> list[KVPart]:
        """The resident rows of `visible` in token order, as views."""
        recent = self._ring.shape[3]
        cut = min(visible.recent.stop, -(-visible.recent.start // recent) * recent)
        ranges = [range(visible.recent.start, cut), range(cut, visible.recent.stop)]
        pieces = [self._sinks[layer, :, :, visible.sinks.start : visible.sinks.stop]]
        pieces += [self._ring[layer, :, :, r.start % recent : r.start % recent + len(r)] for r in ranges if r]
        return [KVPart(piece[0], piece[1]) for piece in pieces if piece.shape[2]]
