"""Link of the baseline "ideal": all KV is on the device, so there are no transfers.

The baseline corresponds to "Ideal" in Figure 18 of the paper. The difference to this baseline is the transfer cost of
a policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ...core import BlockTable, KVPart, ModelGeometry, Selection, VisibleTokens
from ...kv_cache.pool import HostPool
from ...transfer.link import PendingFetch, PrefilledLayer, Savings


@dataclass(frozen=True)
class _PendingFetch:
    """Pending fetch from KV `[2, Hkv, room, d]` of a layer: resident tokens and `selection`, or all of `all`."""

    rows: torch.Tensor
    all: range
    visible: VisibleTokens | None = None
    selection: Selection | None = None
    bytes: int = 0
    savings: Savings | None = None

    def wait(self) -> list[KVPart]:
        """Return the KV to attend to, by part, without waiting."""
        if self.selection is None:
            k, v = self.rows[:, :, self.all.start : self.all.stop]
            return [KVPart(k, v)]
        ranges = () if self.visible is None else (self.visible.sinks, self.visible.recent)
        resident = [KVPart(*self.rows[:, :, r.start : r.stop]) for r in ranges if r]
        tokens, room = self.selection.tokens, self.rows.shape[2]
        if not tokens.shape[1]:
            return resident
        heads = torch.arange(0, 2 * len(tokens) * room, room, device=tokens.device).view(2, -1, 1)
        picked = self.rows.flatten(0, 2).index_select(0, (heads + tokens).flatten()).view(2, *tokens.shape, -1)
        return [*resident, KVPart(picked[0], picked[1], self.selection.counts)]


class _Rows:
    """KV `[L, 2, Hkv, room, d]` of each open sequence on the device, by block table."""

    def __init__(self, pool: HostPool, geometry: ModelGeometry, device: torch.device, room: int) -> None:
        self._pool, self._geometry, self._device, self._room = pool, geometry, device, room
        self.of: dict[int, torch.Tensor] = {}

    def layer(self, blocks: BlockTable, layer: int) -> torch.Tensor:
        """Return the KV `[2, Hkv, room, d]` of a layer."""
        return self.of[id(blocks)][layer]

    def load(self, blocks: BlockTable) -> None:
        """Copy the KV of a sequence from the pool to the device."""
        geometry = self._geometry
        shape = (geometry.layers, 2, geometry.kv_heads, self._room, geometry.head_dim)
        rows = torch.empty(shape, dtype=self._pool.format.dtype, device=self._device)
        for layer in range(geometry.layers):
            at = 0
            for run in self._pool.runs(blocks, layer, range(blocks.length)):
                rows[layer, 0, :, at : at + run.k.shape[1]] = run.k.to(self._device)
                rows[layer, 1, :, at : at + run.k.shape[1]] = run.v.to(self._device)
                at += run.k.shape[1]
        self.of[id(blocks)] = rows


class IdealStorage:
    """`KVStorage` on the device, without write-back."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def open(self, blocks: BlockTable, sinks: int, recent: int, origin: BlockTable | None = None) -> None:
        """Copy the KV of the sequence to the device."""
        self._rows.load(blocks)

    def close(self, blocks: BlockTable) -> None:
        """Drop the KV of the sequence."""
        del self._rows.of[id(blocks)]

    def settle(self, blocks: BlockTable) -> None:
        """Do nothing, because there are no pending copies."""

    def append(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        """Store k, v `[Hkv, m, d]` on the device. Returns 0 bytes written back."""
        rows = self._rows.layer(blocks, layer)
        rows[0, :, start : start + k.shape[1]] = k
        rows[1, :, start : start + k.shape[1]] = v
        return 0

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Copy a KV entry on the device."""
        rows = self._rows.layer(blocks, layer)
        rows[:, :, target] = rows[:, :, source]

    def displace(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Copy a KV entry on the device."""
        self.move(blocks, layer, source, target)

    def prefill_layer(self, blocks: BlockTable, layer: int, start: int, slices: Iterable[KVPart]) -> PrefilledLayer:
        """Append the slices and return all KV of the layer."""
        stop = start
        for part in slices:
            self.append(blocks, layer, stop, part.k, part.v)
            stop += part.k.shape[1]
        k, v = self._rows.layer(blocks, layer)[:, :, :stop]
        return PrefilledLayer(KVPart(k, v), 0, 0, 0)

    def extend_layer(self, blocks: BlockTable, layer: int, start: int, new: KVPart) -> PrefilledLayer:
        """Append `new` like `prefill_layer`."""
        return self.prefill_layer(blocks, layer, start, [new])


class IdealRows:
    """`RowFetch` of KV that is already on the device."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def fetch(
        self, blocks: BlockTable, layer: int, visible: VisibleTokens, selection: Selection | None
    ) -> PendingFetch:
        """Return a pending fetch of zero bytes."""
        return _PendingFetch(self._rows.layer(blocks, layer), visible.all, visible, selection)

    def fetch_range(self, blocks: BlockTable, layer: int, tokens: range) -> PendingFetch:
        """Return a pending fetch of zero bytes."""
        return _PendingFetch(self._rows.layer(blocks, layer), tokens)

    def fetch_together(
        self,
        block_tables: Sequence[BlockTable],
        layer: int,
        visible: Sequence[VisibleTokens],
        selections: Sequence[Selection],
    ) -> list[PendingFetch]:
        """Return a pending fetch of zero bytes for each sequence."""
        each = zip(block_tables, visible, selections, strict=True)
        return [self.fetch(blocks, layer, seen, selection) for blocks, seen, selection in each]

    def fetch_more(self, blocks: BlockTable, layer: int, extra: Selection) -> PendingFetch:
        """Return a pending fetch of zero bytes."""
        return _PendingFetch(self._rows.layer(blocks, layer), range(0), None, extra)


class IdealLink:
    """`Link` that keeps the KV of each open sequence on the device.

    The KV is copied from the pool when a sequence is opened. New KV is not written to the pool.
    """

    def __init__(self, pool: HostPool, geometry: ModelGeometry, device: torch.device, room: int) -> None:
        """Create the link; `room` is the maximum number of tokens of a sequence."""
        self._held = _Rows(pool, geometry, device, room)
        self.storage = IdealStorage(self._held)
        self.rows = IdealRows(self._held)
        self.batched = None

    @property
    def device_bytes(self) -> int:
        """Size of the KV of all open sequences in bytes."""
        return sum(rows.nbytes for rows in self._held.of.values())

    def working_set_bytes(self, blocks: BlockTable) -> int:
        """Return 0, because there is no working set."""
        return 0

    def check_integrity(self) -> None:
        """Assert that the KV of all sequences has the same shape."""
        assert len({rows.shape for rows in self._held.of.values()}) <= 1
