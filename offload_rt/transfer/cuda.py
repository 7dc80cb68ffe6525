"""The link across PCIe: pinned host rows, a prefetch lane, a write-back lane, resident rows on the device.

Bytes per sparse layer and step and sequence: 2 * Hkv * n * d numbers in, 2 * Hkv * d out. On CUDA a selection's rows
are gathered by a kernel that reads the pinned rows across the link; its indices never leave the device. Rows of several
sequences at once (`fetch_together`), and rows for a device that cannot read the host's memory, are gathered into pinned
staging by the host, which has to know the indices: one host sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..core import KVPart, Lease, ModelGeometry, Selection, Visible
from ..kernels.dispatch import gather_rows
from ..pool.kv_format import KVFormat
from ..pool.pool import HostPool
from .lanes import CudaLane, Lane, Mark
from .link import PrefilledLayer, Ticket
from .plan import row_ids, union_rows
from .residency import Residency


@dataclass(frozen=True)
class _Ticket:
    """Fetched rows `staged` `[2, Hkv, n, width]`, in the pool's format, valid on the device behind `mark`, and the
    resident rows that go before them (read at `wait`: the newest is stored after the request). With `places`
    `[Hkv, n]`, `staged` is `[2, U, width]`, rows of several sequences, and `places` are this one's."""

    format: KVFormat
    lane: Lane
    mark: Mark
    staged: torch.Tensor
    bytes: int
    residency: Residency | None = None
    layer: int = 0
    visible: Visible | None = None
    places: torch.Tensor | None = None

    def wait(self) -> list[KVPart]:
        self.lane.hold_compute(self.mark, self.staged)
        rows = self.format.decode(self.staged if self.places is None else self.staged[:, self.places])
        parts = [KVPart(rows[0], rows[1])] if rows.shape[2] else []
        if self.residency is None or self.visible is None:
            return parts
        parts = [*self.residency.part(self.layer, self.visible), *parts]
        return [KVPart(torch.cat([p.k for p in parts], dim=1), torch.cat([p.v for p in parts], dim=1))]


class CudaLink:
    """`Link` for a device with memory of its own, and for any KV format: rows cross as they are stored and are decoded
    on the device. (On a CPU, with `InlineLane`, it serves the formats that cannot be attended to in place.)

    Order. Rows enter the pool only in the write-back lane, behind the compute that made them, and leave it only in the
    prefetch lane, behind the last write-back of their sequence; a chunk changes hands only after `close`, which waits
    for both lanes. Staged and written-back tensors are handed between streams through the caching allocator's
    `record_stream`. A pinned staging buffer is filled again only when the copy out of it has ended.
    """

    def __init__(
        self,
        pool: HostPool,
        geometry: ModelGeometry,
        device: torch.device,
        lanes: tuple[Lane, Lane] | None = None,
    ) -> None:
        self._pool, self._geometry, self._device = pool, geometry, device
        self._prefetch: Lane
        self._write_back: Lane
        self._prefetch, self._write_back = lanes or (CudaLane(device), CudaLane(device))
        self._pin = device.type == "cuda"
        self._reads_host = device.type == "cuda"
        self._format = pool.format
        self._pair_bytes = 2 * pool.layout.row_bytes
        self._token_bytes = pool.layout.kv_heads * self._pair_bytes
        self._residency: dict[int, Residency] = {}
        self._written: dict[int, Mark] = {}
        self._pinned: list[tuple[torch.Tensor, Mark]] = []
        self._bases: dict[int, tuple[list[int], torch.Tensor]] = {}

    @property
    def device_bytes(self) -> int:
        """Resident rows of all open sequences; staged rows belong to the allocator's peak."""
        return sum(residency.nbytes for residency in self._residency.values())

    def open(self, lease: Lease, sinks: int, recent: int) -> None:
        """See `Link.open`; the resident rows of a sequence that has tokens already are loaded."""
        residency = Residency(self._geometry, self._format.dtype, self._device, sinks, recent)
        self._residency[id(lease)] = residency
        for layer in range(self._geometry.layers if lease.length else 0):
            for tokens in (range(min(sinks, lease.length)), range(max(0, lease.length - recent), lease.length)):
                at = tokens.start
                for run in self._pool.runs(lease, layer, tokens):
                    residency.store(layer, at, run.k.to(self._device), run.v.to(self._device))
                    at += run.k.shape[1]

    def close(self, lease: Lease) -> None:
        """See `Link.close`; after it nothing reads or writes the lease's chunks any more."""
        self._prefetch.mark().synchronize()
        self._write_back.mark().synchronize()
        self._written.pop(id(lease), None)
        self._bases.pop(id(lease), None)
        del self._residency[id(lease)]

    def settle(self, lease: Lease) -> None:
        """See `Link.settle`."""
        if (written := self._written.get(id(lease))) is not None:
            written.synchronize()

    def append(self, lease: Lease, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        """See `Link.append`."""
        self._residency[id(lease)].store(layer, start, k, v)
        with self._write_back.behind_compute():
            at = 0
            stored_k, stored_v = self._format.encode(k), self._format.encode(v)
            for run in self._pool.stored(lease, layer, range(start, start + k.shape[1])):
                piece = slice(at, at + run.k.shape[1])
                _copy_heads(run.k, stored_k[:, piece])
                _copy_heads(run.v, stored_v[:, piece])
                at = piece.stop
            self._write_back.borrow(k, v)
            self._written[id(lease)] = self._write_back.mark()
        return k.shape[1] * self._token_bytes

    def move(self, lease: Lease, layer: int, source: int, target: int) -> None:
        """See `Link.move`: both rows are in the pool, so the copy stays on the host, behind the write-back of the row
        and the reads of the slot it overwrites; where that slot is a resident one, the device's copy moves too."""
        self.settle(lease)
        self._prefetch.mark().synchronize()
        self._pool.move(lease, layer, source, target)
        self._residency[id(lease)].move(layer, source, target)

    def fetch(self, lease: Lease, layer: int, visible: Visible, selection: Selection | None) -> Ticket:
        """See `Link.fetch`."""
        if selection is None:
            staged, mark = self._fetch_range(lease, layer, visible.candidates)
        else:
            staged, mark = self._fetch_rows(lease, layer, selection.tokens)
        residency = self._residency[id(lease)]
        return _Ticket(self._format, self._prefetch, mark, staged, self._bytes(staged), residency, layer, visible)

    def fetch_range(self, lease: Lease, layer: int, tokens: range) -> Ticket:
        """See `Link.fetch_range`."""
        staged, mark = self._fetch_range(lease, layer, tokens)
        return _Ticket(self._format, self._prefetch, mark, staged, self._bytes(staged))

    def fetch_together(
        self, leases: Sequence[Lease], layer: int, visible: Sequence[Visible], selections: Sequence[Selection]
    ) -> list[Ticket]:
        """See `Link.fetch_together`: the union is gathered and copied once; each sequence's rows are picked from it on
        the device."""
        layout = self._pool.layout
        rows = [
            row_ids(layout, self._pool.row_base(lease), layer, selection.tokens.cpu())[0]
            for lease, selection in zip(leases, selections, strict=True)
        ]
        union, places, counts = union_rows(rows)
        for lease in leases:
            self.settle(lease)
        staged, mark = self._fetch_ids(torch.stack((union, union + layout.plane_rows)))
        sizes = [count * self._pair_bytes for count in counts]
        return [
            _Ticket(
                self._format,
                self._prefetch,
                mark,
                staged,
                size,
                self._residency[id(lease)],
                layer,
                seen,
                place.to(self._device),
            )
            for lease, seen, place, size in zip(leases, visible, places, sizes, strict=True)
        ]

    def fetch_more(self, lease: Lease, layer: int, extra: Selection) -> Ticket:
        """See `Link.fetch_more`."""
        staged, mark = self._fetch_rows(lease, layer, extra.tokens)
        return _Ticket(self._format, self._prefetch, mark, staged, self._bytes(staged))

    def prefill_layer(self, lease: Lease, layer: int, start: int, slices: Iterable[KVPart]) -> PrefilledLayer:
        """See `Link.prefill_layer`."""
        fresh, stop, written = [], start, 0
        for part in slices:
            written += self.append(lease, layer, stop, part.k, part.v)
            fresh.append(part)
            stop += part.k.shape[1]
        loaded, mark = self._fetch_range(lease, layer, range(start))
        self._prefetch.hold_compute(mark, loaded)
        before = self._format.decode(loaded)
        k = torch.cat([before[0], *(part.k for part in fresh)], dim=1)
        v = torch.cat([before[1], *(part.v for part in fresh)], dim=1)
        return PrefilledLayer(KVPart(k, v), self._bytes(loaded), written)

    def _bytes(self, staged: torch.Tensor) -> int:
        return staged.shape[1] * staged.shape[2] * self._pair_bytes

    def _fetch_range(self, lease: Lease, layer: int, tokens: range) -> tuple[torch.Tensor, Mark]:
        """All rows of `tokens` as stored, `[2, Hkv, n, width]` on the device."""
        with self._prefetch.behind_compute():
            self._behind_write_back(lease)
            staged = self._staging(len(tokens))
            at = 0
            for run in self._pool.stored(lease, layer, tokens):
                piece = slice(at, at + run.k.shape[1])
                _copy_heads(staged[0, :, piece], run.k)
                _copy_heads(staged[1, :, piece], run.v)
                at = piece.stop
            return staged, self._prefetch.mark()

    def _fetch_rows(self, lease: Lease, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """Rows of `tokens` `[Hkv, n]` as stored, `[2, Hkv, n, width]` on the device."""
        if self._reads_host:
            return self._gather_across(lease, layer, tokens)
        ids = row_ids(self._pool.layout, self._pool.row_base(lease), layer, tokens.cpu())
        self.settle(lease)
        return self._fetch_ids(ids)

    def _gather_across(self, lease: Lease, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """`_fetch_rows` by a kernel that reads the pool's rows where they are. `tokens` is borrowed from the compute
        stream; ids and counts are made, used and freed in the prefetch lane."""
        base, tokens = self._device_base(lease), tokens.to(self._device)
        with self._prefetch.behind_compute():
            self._behind_write_back(lease)
            self._prefetch.borrow(tokens, base)
            ids = row_ids(self._pool.layout, base, layer, tokens).flatten(0, 1)
            staged = self._staging(tokens.shape[1])
            counts = torch.full((len(ids),), tokens.shape[1], dtype=torch.int32, device=self._device)
            gather_rows(self._pool.rows, ids, counts, staged.flatten(0, 1))
            return staged, self._prefetch.mark()

    def _device_base(self, lease: Lease) -> torch.Tensor:
        """`HostPool.row_base` on the device, copied anew when the lease's chunks have changed."""
        chunks, base = self._bases.get(id(lease), ([], None))
        if base is None or chunks != lease.chunks:
            base = self._pool.row_base(lease).to(self._device)
            self._bases[id(lease)] = (list(lease.chunks), base)
        return base

    def _fetch_ids(self, ids: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """The rows `ids`, of any shape, as stored, on the device: gathered by the host into pinned memory."""
        pinned = self._pinned_buffer(ids.numel())
        torch.index_select(self._pool.rows, 0, ids.reshape(-1), out=pinned)
        with self._prefetch.behind_compute():
            staged = torch.empty(*ids.shape, pinned.shape[1], dtype=self._format.storage, device=self._device)
            staged.view(-1, pinned.shape[1]).copy_(pinned, non_blocking=True)
            mark = self._prefetch.mark()
        self._pinned.append((pinned, mark))
        return staged, mark

    def _behind_write_back(self, lease: Lease) -> None:
        if (written := self._written.get(id(lease))) is not None:
            self._prefetch.wait_for(written)

    def _staging(self, tokens: int) -> torch.Tensor:
        shape = (2, self._geometry.kv_heads, tokens, self._format.width)
        return torch.empty(shape, dtype=self._format.storage, device=self._device)

    def _pinned_buffer(self, rows: int) -> torch.Tensor:
        """A pinned `[rows, width]` that no copy reads any more; two take turns: one fills while one empties."""
        width = self._format.width
        if len(self._pinned) >= 2:
            buffer, mark = self._pinned.pop(0)
            mark.synchronize()
            whole = buffer.untyped_storage().nbytes() // buffer.itemsize
            if whole >= rows * width:
                return buffer.as_strided((rows, width), (width, 1))
        return torch.empty(rows, width, dtype=self._format.storage, pin_memory=self._pin)


def _copy_heads(into: torch.Tensor, rows: torch.Tensor) -> None:
    """`[Hkv, m, d]` head by head: each is contiguous on both sides, so that each copy is asynchronous."""
    for target, source in zip(into, rows, strict=True):
        target.copy_(source, non_blocking=True)
