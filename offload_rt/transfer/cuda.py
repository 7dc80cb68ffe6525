"""The link across PCIe: pinned host rows, a prefetch stream, a write-back stream, resident rows on the device.

Bytes per sparse layer and step and sequence: 2 * Hkv * n * d numbers in, 2 * Hkv * d out, where n are the selected rows
that are neither resident nor in the working set. On CUDA a kernel gathers them that reads the pinned rows across the
link; which rows these are is never known to the host. (Without Triton, and on a CPU, the host gathers.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..core import BlockTable, KVPart, ModelGeometry, Selection, Visible
from ..kernels.h2d_copy import to_device
from ..pool.kv_format import KVFormat
from ..pool.pool import HostPool
from .link import PrefilledLayer, Spared, Ticket
from .plan import row_ids
from .residency import Residency
from .row_lists import Open, RowLists
from .streams import CudaStream, Event, Stream
from .working_set import WorkingSet


@dataclass(frozen=True)
class _Ticket:
    """Fetched rows `staged` `[2, Hkv, n, width]`, in the pool's format, valid on the device behind `mark`, and the
    resident rows that go before them (read at `wait`: the newest is stored after the request)."""

    format: KVFormat
    stream: Stream
    mark: Event
    staged: torch.Tensor
    bytes: int
    spared: Spared | None = None
    counts: torch.Tensor | None = None
    residency: Residency | None = None
    layer: int = 0
    visible: Visible | None = None

    def wait(self) -> list[KVPart]:
        self.stream.hold_compute(self.mark, self.staged, *(() if self.spared is None else self.spared.tensors))
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
    mark: Event
    spared: Spared | None = None
    counts: torch.Tensor | None = None


class CudaLink:
    """`Link` for a device with memory of its own, and for any KV format: rows cross as they are stored and are decoded
    on the device. (On a CPU, with `InlineStream`, it serves the formats that cannot be attended to in place, and
    working sets, which save bytes there only as they are counted.)

    Order. Rows enter the pool only in the write-back stream, behind the compute that made them, and leave it only in
    the prefetch stream, behind the last write-back of their sequence; a chunk changes hands only after `close`, which
    waits for both streams. Working sets, rows and tables, belong to the prefetch stream alone. Staged and written-back
    tensors are handed between streams through the caching allocator's `record_stream`.
    """

    def __init__(
        self,
        pool: HostPool,
        geometry: ModelGeometry,
        device: torch.device,
        streams: tuple[Stream, Stream] | None = None,
        working_set: int = 0,
    ) -> None:
        """working_set: rows per KV head that stay on the device in each layer that selects; 0 is none."""
        self._pool, self._geometry, self._device = pool, geometry, device
        self._prefetch: Stream
        self._write_back: Stream
        self._prefetch, self._write_back = streams or (CudaStream(device), CudaStream(device))
        self._format = pool.format
        self._pair_bytes = 2 * pool.layout.row_bytes
        self._token_bytes = pool.layout.kv_heads * self._pair_bytes
        self._working_set = working_set
        self._open: dict[int, Open] = {}
        self._lists: dict[tuple[int, ...], RowLists] = {}

    @property
    def device_bytes(self) -> int:
        """Resident rows and working sets of all open sequences; staged rows belong to the allocator's peak."""
        return sum(one.residency.nbytes + self.working_set_bytes(one.blocks) for one in self._open.values())

    def working_set_bytes(self, blocks: BlockTable) -> int:
        """See `Link.working_set_bytes`."""
        working = self._open[id(blocks)].working
        return 0 if working is None else working.nbytes

    def open(self, blocks: BlockTable, sinks: int, recent: int, origin: BlockTable | None = None) -> None:
        """See `Link.open`; the resident rows of a sequence that has tokens already are copied or loaded."""
        if origin is not None:
            like = self._open[id(origin)]
            with self._prefetch.behind_compute():
                copied = None if like.working is None else like.working.clone()
            self._open[id(blocks)] = Open(blocks, like.residency.clone(), copied)
            return
        residency = Residency(self._geometry, self._format.dtype, self._device, sinks, recent)
        self._open[id(blocks)] = Open(blocks, residency, self._new_working_set())
        for layer in range(self._geometry.layers if blocks.length else 0):
            for tokens in (range(min(sinks, blocks.length)), range(max(0, blocks.length - recent), blocks.length)):
                at = tokens.start
                for run in self._pool.runs(blocks, layer, tokens):
                    residency.store(layer, at, run.k.to(self._device), run.v.to(self._device))
                    at += run.k.shape[1]

    def _new_working_set(self) -> WorkingSet | None:
        if not self._working_set:
            return None
        heads, width = self._geometry.kv_heads, self._format.width
        return WorkingSet(heads, self._working_set, width, self._format.storage, self._device)

    def close(self, blocks: BlockTable) -> None:
        """See `Link.close`; after it nothing reads or writes the block table's chunks any more."""
        self._prefetch.mark().synchronize()
        self._write_back.mark().synchronize()
        del self._open[id(blocks)]
        self._lists = {
            block_tables: lists for block_tables, lists in self._lists.items() if id(blocks) not in block_tables
        }

    def settle(self, blocks: BlockTable) -> None:
        """See `Link.settle`; from any thread: a block table that is being closed or opened anew has nothing on its
        way."""
        one = self._open.get(id(blocks))
        if one is not None and (written := one.written) is not None:
            written.synchronize()

    def append(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        """See `Link.append`."""
        one = self._open[id(blocks)]
        one.residency.store(layer, start, k, v)
        with self._write_back.behind_compute():
            at = 0
            stored_k, stored_v = self._format.encode(k), self._format.encode(v)
            for run in self._pool.stored(blocks, layer, range(start, start + k.shape[1])):
                piece = slice(at, at + run.k.shape[1])
                _copy_heads(run.k, stored_k[:, piece])
                _copy_heads(run.v, stored_v[:, piece])
                at = piece.stop
            self._write_back.borrow(k, v)
            one.written = self._write_back.mark()
        return k.shape[1] * self._token_bytes

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """See `Link.move`: both rows are in the pool, so the copy stays on the host, behind the write-back of the row
        and the reads of the slot it overwrites; where that slot is a resident one, the device's copy moves too, and
        the working set forgets what was there."""
        one = self._open[id(blocks)]
        self.settle(blocks)
        self._prefetch.mark().synchronize()
        self._pool.move(blocks, layer, source, target)
        one.residency.move(layer, source, target)
        if one.working is not None:
            with self._prefetch.behind_compute():
                one.working.forget(layer, target)

    def fetch(self, blocks: BlockTable, layer: int, visible: Visible, selection: Selection | None) -> Ticket:
        """See `Link.fetch`."""
        if selection is not None:
            return self.fetch_together([blocks], layer, [visible], [selection])[0]
        return self._ticket(self._fetch_range(blocks, layer, visible.candidates), blocks, layer, visible)

    def fetch_range(self, blocks: BlockTable, layer: int, tokens: range) -> Ticket:
        """See `Link.fetch_range`."""
        return self._ticket(self._fetch_range(blocks, layer, tokens))

    def fetch_together(
        self,
        block_tables: Sequence[BlockTable],
        layer: int,
        visible: Sequence[Visible],
        selections: Sequence[Selection],
    ) -> list[Ticket]:
        """See `Link.fetch_together`: a row that a sequence before asks for too is copied on the device."""
        each = zip(self._fetch_rows(block_tables, layer, selections), block_tables, visible, strict=True)
        return [self._ticket(rows, blocks, layer, seen) for rows, blocks, seen in each]

    def fetch_more(self, blocks: BlockTable, layer: int, extra: Selection) -> Ticket:
        """See `Link.fetch_more`."""
        [fetched] = self._fetch_rows([blocks], layer, [extra])
        return self._ticket(fetched)

    def _ticket(
        self, fetched: _Fetched, blocks: BlockTable | None = None, layer: int = 0, visible: Visible | None = None
    ) -> _Ticket:
        """Of fetched rows, with a block table behind its resident ones."""
        staged, residency = fetched.staged, None if blocks is None else self._open[id(blocks)].residency
        size = staged.shape[1] * staged.shape[2] * self._pair_bytes
        stream, spared = self._prefetch, fetched.spared
        return _Ticket(
            self._format, stream, fetched.mark, staged, size, spared, fetched.counts, residency, layer, visible
        )

    def prefill_layer(self, blocks: BlockTable, layer: int, start: int, slices: Iterable[KVPart]) -> PrefilledLayer:
        """See `Link.prefill_layer`."""
        fresh, stop, written = [], start, 0
        for part in slices:
            written += self.append(blocks, layer, stop, part.k, part.v)
            fresh.append(part)
            stop += part.k.shape[1]
        loaded = self._fetch_range(blocks, layer, range(start))
        self._prefetch.hold_compute(loaded.mark, loaded.staged)
        before = self._format.decode(loaded.staged)
        k = torch.cat([before[0], *(part.k for part in fresh)], dim=1)
        v = torch.cat([before[1], *(part.v for part in fresh)], dim=1)
        return PrefilledLayer(KVPart(k, v), start * self._token_bytes, written)

    def _fetch_range(self, blocks: BlockTable, layer: int, tokens: range) -> _Fetched:
        """All rows of `tokens` as stored."""
        with self._prefetch.behind_compute():
            self._behind_write_back(blocks)
            shape = (2, self._geometry.kv_heads, len(tokens), self._format.width)
            staged = torch.empty(shape, dtype=self._format.storage, device=self._device)
            at = 0
            for run in self._pool.stored(blocks, layer, tokens):
                piece = slice(at, at + run.k.shape[1])
                _copy_heads(staged[0, :, piece], run.k)
                _copy_heads(staged[1, :, piece], run.v)
                at = piece.stop
            return _Fetched(staged, self._prefetch.mark())

    def row_lists(self, batch: int, tokens: int) -> RowLists:
        """See `Link.row_lists`."""
        return RowLists(self._pool, (self._prefetch, self._write_back), self._device, batch, tokens)

    def hold(self, lists: RowLists, block_tables: Sequence[BlockTable]) -> None:
        """See `Link.hold`."""
        lists.hold([self._open[id(blocks)] for blocks in block_tables])

    def _fetch_rows(
        self, block_tables: Sequence[BlockTable], layer: int, selections: Sequence[Selection]
    ) -> list[_Fetched]:
        """The selected rows of each block table, as stored: those of its working set from there, of those that several
        block tables have in common all but the first one's from the first one's, the others from the pool."""
        tokens, counts = self._listed(selections)
        arriving = self._lists_of(block_tables).fetch(layer, tokens, counts, overlapping=len(block_tables) > 1)
        with self._prefetch.behind_compute():
            spared = [self._spared(arriving.tally, b, selection) for b, selection in enumerate(selections)]
            mark = self._prefetch.mark()
        heads, fetched = self._geometry.kv_heads, []
        for b, (selection, less) in enumerate(zip(selections, spared, strict=True)):
            staged = arriving.staged[:, b * heads : (b + 1) * heads, : selection.count]
            fetched.append(_Fetched(staged, mark, less, selection.counts))
        return fetched

    def _lists_of(self, block_tables: Sequence[BlockTable]) -> RowLists:
        """Lists of these sequences, kept until one of them closes or outgrows them."""
        key, room = tuple(id(blocks) for blocks in block_tables), max(blocks.capacity for blocks in block_tables)
        if key not in self._lists or self._lists[key].tokens < room:
            self._lists[key] = self.row_lists(len(block_tables), room + room // 8)
        self.hold(self._lists[key], block_tables)
        return self._lists[key]

    def _listed(self, selections: Sequence[Selection]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """tokens `[P, n]` for the largest n, and counts `[P]` where not all are meant."""
        counts = [one.counts for one in selections if one.counts is not None]
        assert len(counts) in (0, len(selections)), "the device knows all counts of a batch or none"
        if not counts and len({one.count for one in selections}) == 1:
            return torch.cat([one.tokens.to(self._device) for one in selections]), None
        if not counts:
            known = [len(one.tokens) * [one.count] for one in selections]
            counts = [to_device(torch.tensor(known, dtype=torch.int32).flatten(), self._device)]
        most = max(one.count for one in selections)
        padded = [F.pad(one.tokens.to(self._device), (0, most - one.count)) for one in selections]
        return torch.cat(padded), torch.cat([each.to(self._device) for each in counts])

    def _spared(self, tally: torch.Tensor | None, b: int, selection: Selection) -> Spared | None:
        """What of sequence b's selection does not cross; in the prefetch stream."""
        asked = selection.tokens.numel()
        if selection.counts is not None:
            self._prefetch.borrow(selection.counts)
            sought = selection.counts.to(self._device).sum()
        elif tally is not None:
            sought = torch.full_like(tally[b, 0], asked)
        else:
            return None
        if tally is None:
            return Spared(asked, sought, asked - sought, torch.zeros_like(sought))
        return Spared(asked, sought, asked - tally[b, 0], tally[b, 1])

    def _behind_write_back(self, blocks: BlockTable) -> None:
        if (written := self._open[id(blocks)].written) is not None:
            self._prefetch.wait_for(written)

    def check_integrity(self) -> None:
        """See `Link.check_integrity`."""
        self._prefetch.mark().synchronize()
        for one in self._open.values():
            self.settle(one.blocks)
            if one.working is not None:
                one.working.check_integrity(self._stored_rows(one.blocks))

    def _stored_rows(self, blocks: BlockTable) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Reads rows `[2, Hkv, n, width]` of tokens `[Hkv, n]` from the pool."""
        base = self._pool.row_base(blocks)
        return lambda layer, tokens: self._pool.rows[row_ids(self._pool.layout, base, layer, tokens.cpu())]


def _copy_heads(into: torch.Tensor, rows: torch.Tensor) -> None:
    """`[Hkv, m, d]` head by head: each is contiguous on both sides, so that each copy is asynchronous."""
    for target, source in zip(into, rows, strict=True):
        target.copy_(source, non_blocking=True)
