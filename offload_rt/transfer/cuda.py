"""The link across PCIe: pinned host rows, a prefetch lane, a write-back lane, resident rows on the device.

Bytes per sparse layer and step and sequence: 2 * Hkv * n * d numbers in, 2 * Hkv * d out, where n are the selected rows
that are neither resident nor in the working set. On CUDA a kernel gathers them that reads the pinned rows across the
link; which rows these are is never known to the host. (Without Triton, and on a CPU, the host gathers.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ..core import KVPart, Lease, ModelGeometry, Selection, Visible
from ..kernels.dispatch import gather_rows
from ..pool.kv_format import KVFormat
from ..pool.layout import ArenaLayout
from ..pool.pool import HostPool
from .lanes import CudaLane, Lane, Mark, sent
from .link import PrefilledLayer, Spared, Ticket
from .plan import first_askers, row_ids
from .residency import Residency
from .working_set import LookUp, WorkingSet


@dataclass(frozen=True)
class _Ticket:
    """Fetched rows `staged` `[2, Hkv, n, width]`, in the pool's format, valid on the device behind `mark`, and the
    resident rows that go before them (read at `wait`: the newest is stored after the request)."""

    format: KVFormat
    lane: Lane
    mark: Mark
    staged: torch.Tensor
    bytes: int
    spared: Spared | None = None
    counts: torch.Tensor | None = None
    residency: Residency | None = None
    layer: int = 0
    visible: Visible | None = None

    def wait(self) -> list[KVPart]:
        self.lane.hold_compute(self.mark, self.staged, *(() if self.spared is None else self.spared.tensors))
        rows = self.format.decode(self.staged)
        parts = [KVPart(rows[0], rows[1], self.counts)] if rows.shape[2] else []
        if self.residency is None or self.visible is None:
            return parts
        parts = [*self.residency.part(self.layer, self.visible), *parts]
        if self.counts is not None:
            return parts
        return [KVPart(torch.cat([p.k for p in parts], dim=1), torch.cat([p.v for p in parts], dim=1))]


@dataclass(frozen=True)
class _Fetched:
    """Rows of one sequence on their way: what its ticket is made of."""

    staged: torch.Tensor
    mark: Mark
    spared: Spared | None = None
    counts: torch.Tensor | None = None


@dataclass
class _Open:
    """What the device has of one sequence. `written` is behind its last write-back; `base` is `HostPool.row_base` of
    the chunks `chunks` on the device."""

    lease: Lease
    residency: Residency
    working: WorkingSet | None
    written: Mark | None = None
    chunks: list[int] = field(default_factory=list)
    base: torch.Tensor | None = None


@dataclass
class _Wanted:
    """What one sequence wants in one layer: tokens `[Hkv, n]`, of which `counts` are meant, `base` as in `_Open`. All
    methods belong to the prefetch lane: `look_up`, then the gather of `missing_ids`, then `exchange`."""

    tokens: torch.Tensor
    counts: torch.Tensor | None
    base: torch.Tensor
    working: WorkingSet | None
    found: LookUp | None = None
    meant: torch.Tensor | None = None

    @property
    def borrowed(self) -> list[torch.Tensor]:
        """What comes from the compute stream."""
        return [self.tokens, self.base, *(() if self.counts is None else (self.counts,))]

    def look_up(self, layer: int) -> None:
        """Asks the working set."""
        if self.counts is not None:
            self.meant = torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.counts[:, None]
        if self.working is not None and self.tokens.numel():
            self.found = self.working.look_up(layer, self.tokens, self.meant)

    def missing_ids(self, layout: ArenaLayout, layer: int) -> torch.Tensor:
        """Row ids `[2, Hkv, n]`, negative where no row is meant or the working set has it."""
        ids = row_ids(layout, self.base, layer, self.tokens)
        if self.meant is not None:
            ids = ids.masked_fill(~self.meant, -1)
        return ids if self.found is None else ids.masked_fill(self.found.slots >= 0, -1)

    def exchange(self, layer: int, rows: torch.Tensor) -> None:
        """Takes what the working set has into rows `[2, Hkv, n, width]`, and gives it the others."""
        if self.working is not None and self.found is not None:
            self.working.read(layer, self.found, rows)
            self.working.write(layer, self.found, rows)

    def spared(self, again: torch.Tensor | None) -> Spared | None:
        """What does not cross; flat `again` (K's half, then V's) says which rows others asked for before."""
        if self.counts is None and self.found is None and again is None:
            return None
        asked = torch.full((), self.tokens.numel(), device=self.tokens.device)
        sought = asked if self.counts is None else self.counts.sum()
        hits = torch.zeros_like(asked) if self.found is None else self.found.hits
        rows = asked - sought + hits
        if again is not None:
            rows = rows + (again[: self.tokens.numel()] >= 0).sum()
        return Spared(self.tokens.numel(), sought, rows, hits)


class CudaLink:
    """`Link` for a device with memory of its own, and for any KV format: rows cross as they are stored and are decoded
    on the device. (On a CPU, with `InlineLane`, it serves the formats that cannot be attended to in place, and working
    sets, which save bytes there only as they are counted.)

    Order. Rows enter the pool only in the write-back lane, behind the compute that made them, and leave it only in the
    prefetch lane, behind the last write-back of their sequence; a chunk changes hands only after `close`, which waits
    for both lanes. Working sets, rows and tables, belong to the prefetch lane alone. Staged and written-back tensors
    are handed between streams through the caching allocator's `record_stream`.
    """

    def __init__(
        self,
        pool: HostPool,
        geometry: ModelGeometry,
        device: torch.device,
        lanes: tuple[Lane, Lane] | None = None,
        working_set: int = 0,
    ) -> None:
        """working_set: rows per KV head that stay on the device in each layer that selects; 0 is none."""
        self._pool, self._geometry, self._device = pool, geometry, device
        self._prefetch: Lane
        self._write_back: Lane
        self._prefetch, self._write_back = lanes or (CudaLane(device), CudaLane(device))
        self._format = pool.format
        self._pair_bytes = 2 * pool.layout.row_bytes
        self._token_bytes = pool.layout.kv_heads * self._pair_bytes
        self._working_set = working_set
        self._open: dict[int, _Open] = {}

    @property
    def device_bytes(self) -> int:
        """Resident rows and working sets of all open sequences; staged rows belong to the allocator's peak."""
        return sum(one.residency.nbytes + self.working_set_bytes(one.lease) for one in self._open.values())

    def working_set_bytes(self, lease: Lease) -> int:
        """See `Link.working_set_bytes`."""
        working = self._open[id(lease)].working
        return 0 if working is None else working.nbytes

    def open(self, lease: Lease, sinks: int, recent: int, origin: Lease | None = None) -> None:
        """See `Link.open`; the resident rows of a sequence that has tokens already are copied or loaded."""
        if origin is not None:
            like = self._open[id(origin)]
            with self._prefetch.behind_compute():
                copied = None if like.working is None else like.working.clone()
            self._open[id(lease)] = _Open(lease, like.residency.clone(), copied)
            return
        residency = Residency(self._geometry, self._format.dtype, self._device, sinks, recent)
        self._open[id(lease)] = _Open(lease, residency, self._new_working_set())
        for layer in range(self._geometry.layers if lease.length else 0):
            for tokens in (range(min(sinks, lease.length)), range(max(0, lease.length - recent), lease.length)):
                at = tokens.start
                for run in self._pool.runs(lease, layer, tokens):
                    residency.store(layer, at, run.k.to(self._device), run.v.to(self._device))
                    at += run.k.shape[1]

    def _new_working_set(self) -> WorkingSet | None:
        if not self._working_set:
            return None
        heads, width = self._geometry.kv_heads, self._format.width
        return WorkingSet(heads, self._working_set, width, self._format.storage, self._device)

    def close(self, lease: Lease) -> None:
        """See `Link.close`; after it nothing reads or writes the lease's chunks any more."""
        self._prefetch.mark().synchronize()
        self._write_back.mark().synchronize()
        del self._open[id(lease)]

    def settle(self, lease: Lease) -> None:
        """See `Link.settle`."""
        if (written := self._open[id(lease)].written) is not None:
            written.synchronize()

    def append(self, lease: Lease, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        """See `Link.append`."""
        one = self._open[id(lease)]
        one.residency.store(layer, start, k, v)
        with self._write_back.behind_compute():
            at = 0
            stored_k, stored_v = self._format.encode(k), self._format.encode(v)
            for run in self._pool.stored(lease, layer, range(start, start + k.shape[1])):
                piece = slice(at, at + run.k.shape[1])
                _copy_heads(run.k, stored_k[:, piece])
                _copy_heads(run.v, stored_v[:, piece])
                at = piece.stop
            self._write_back.borrow(k, v)
            one.written = self._write_back.mark()
        return k.shape[1] * self._token_bytes

    def move(self, lease: Lease, layer: int, source: int, target: int) -> None:
        """See `Link.move`: both rows are in the pool, so the copy stays on the host, behind the write-back of the row
        and the reads of the slot it overwrites; where that slot is a resident one, the device's copy moves too, and
        the working set forgets what was there."""
        one = self._open[id(lease)]
        self.settle(lease)
        self._prefetch.mark().synchronize()
        self._pool.move(lease, layer, source, target)
        one.residency.move(layer, source, target)
        if one.working is not None:
            with self._prefetch.behind_compute():
                one.working.forget(layer, target)

    def fetch(self, lease: Lease, layer: int, visible: Visible, selection: Selection | None) -> Ticket:
        """See `Link.fetch`."""
        if selection is not None:
            return self.fetch_together([lease], layer, [visible], [selection])[0]
        return self._ticket(self._fetch_range(lease, layer, visible.candidates), lease, layer, visible)

    def fetch_range(self, lease: Lease, layer: int, tokens: range) -> Ticket:
        """See `Link.fetch_range`."""
        return self._ticket(self._fetch_range(lease, layer, tokens))

    def fetch_together(
        self, leases: Sequence[Lease], layer: int, visible: Sequence[Visible], selections: Sequence[Selection]
    ) -> list[Ticket]:
        """See `Link.fetch_together`: a row that a sequence before asks for too is copied on the device."""
        fetched = self._fetch_rows(leases, layer, selections)
        each = zip(fetched, leases, visible, strict=True)
        return [self._ticket(rows, lease, layer, seen) for rows, lease, seen in each]

    def fetch_more(self, lease: Lease, layer: int, extra: Selection) -> Ticket:
        """See `Link.fetch_more`."""
        [fetched] = self._fetch_rows([lease], layer, [extra])
        return self._ticket(fetched)

    def _ticket(
        self, fetched: _Fetched, lease: Lease | None = None, layer: int = 0, visible: Visible | None = None
    ) -> _Ticket:
        """Of fetched rows, with a lease behind its resident ones."""
        staged, residency = fetched.staged, None if lease is None else self._open[id(lease)].residency
        size = staged.shape[1] * staged.shape[2] * self._pair_bytes
        lane, spared = self._prefetch, fetched.spared
        return _Ticket(
            self._format, lane, fetched.mark, staged, size, spared, fetched.counts, residency, layer, visible
        )

    def prefill_layer(self, lease: Lease, layer: int, start: int, slices: Iterable[KVPart]) -> PrefilledLayer:
        """See `Link.prefill_layer`."""
        fresh, stop, written = [], start, 0
        for part in slices:
            written += self.append(lease, layer, stop, part.k, part.v)
            fresh.append(part)
            stop += part.k.shape[1]
        loaded = self._fetch_range(lease, layer, range(start))
        self._prefetch.hold_compute(loaded.mark, loaded.staged)
        before = self._format.decode(loaded.staged)
        k = torch.cat([before[0], *(part.k for part in fresh)], dim=1)
        v = torch.cat([before[1], *(part.v for part in fresh)], dim=1)
        return PrefilledLayer(KVPart(k, v), start * self._token_bytes, written)

    def _fetch_range(self, lease: Lease, layer: int, tokens: range) -> _Fetched:
        """All rows of `tokens` as stored."""
        with self._prefetch.behind_compute():
            self._behind_write_back(lease)
            shape = (2, self._geometry.kv_heads, len(tokens), self._format.width)
            staged = torch.empty(shape, dtype=self._format.storage, device=self._device)
            at = 0
            for run in self._pool.stored(lease, layer, tokens):
                piece = slice(at, at + run.k.shape[1])
                _copy_heads(staged[0, :, piece], run.k)
                _copy_heads(staged[1, :, piece], run.v)
                at = piece.stop
            return _Fetched(staged, self._prefetch.mark())

    def _fetch_rows(self, leases: Sequence[Lease], layer: int, selections: Sequence[Selection]) -> list[_Fetched]:
        """The selected rows of each lease, as stored: those of its working set from there, of those that several leases
        have in common all but the first one's from the first one's, the others from the pool.

        Tokens and counts are borrowed from the compute stream; all else is made, used and freed in the prefetch
        lane."""
        wanted = [self._wanted(lease, selection) for lease, selection in zip(leases, selections, strict=True)]
        with self._prefetch.behind_compute():
            for lease, one in zip(leases, wanted, strict=True):
                self._behind_write_back(lease)
                self._prefetch.borrow(*one.borrowed)
                one.look_up(layer)
            ids = torch.cat([one.missing_ids(self._pool.layout, layer).flatten() for one in wanted])
            staged = torch.empty(len(ids), self._format.width, dtype=self._format.storage, device=self._device)
            again = first_askers(ids) if len(wanted) > 1 else None
            _gather(self._pool.rows, ids if again is None else ids.masked_fill(again >= 0, -1), staged)
            if again is not None:
                _gather(staged, again, staged)
            sizes = [2 * one.tokens.numel() for one in wanted]
            shared = [None] * len(wanted) if again is None else again.split(sizes)
            fetched = []
            for one, rows, asked in zip(wanted, staged.split(sizes), shared, strict=True):
                block = rows.view(2, *one.tokens.shape, self._format.width)
                one.exchange(layer, block)
                fetched.append((block, one.spared(asked), one.counts))
            mark = self._prefetch.mark()
        return [_Fetched(block, mark, spared, counts) for block, spared, counts in fetched]

    def _wanted(self, lease: Lease, selection: Selection) -> _Wanted:
        counts = None if selection.counts is None else selection.counts.to(self._device)
        working = self._open[id(lease)].working
        return _Wanted(selection.tokens.to(self._device), counts, self._device_base(lease), working)

    def _device_base(self, lease: Lease) -> torch.Tensor:
        """`HostPool.row_base` on the device, copied anew when the lease's chunks have changed."""
        one = self._open[id(lease)]
        if one.base is None or one.chunks != lease.chunks:
            one.chunks, one.base = list(lease.chunks), sent(self._pool.row_base(lease), self._device)
        return one.base

    def _behind_write_back(self, lease: Lease) -> None:
        if (written := self._open[id(lease)].written) is not None:
            self._prefetch.wait_for(written)

    def check_integrity(self) -> None:
        """See `Link.check_integrity`."""
        self._prefetch.mark().synchronize()
        for one in self._open.values():
            self.settle(one.lease)
            if one.working is not None:
                one.working.check_integrity(self._stored_rows(one.lease))

    def _stored_rows(self, lease: Lease) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Reads rows `[2, Hkv, n, width]` of tokens `[Hkv, n]` from the pool."""
        base = self._pool.row_base(lease)
        return lambda layer, tokens: self._pool.rows[row_ids(self._pool.layout, base, layer, tokens.cpu())]


def _gather(rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    """Rows of ids int64 `[M]` into out `[M, width]`, but for negative ones."""
    counts = torch.full((1,), len(ids), dtype=torch.int32, device=ids.device)
    gather_rows(rows, ids.unsqueeze(0), counts, out.unsqueeze(0))


def _copy_heads(into: torch.Tensor, rows: torch.Tensor) -> None:
    """`[Hkv, m, d]` head by head: each is contiguous on both sides, so that each copy is asynchronous."""
    for target, source in zip(into, rows, strict=True):
        target.copy_(source, non_blocking=True)
