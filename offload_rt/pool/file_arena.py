"""The rows of a pool that lies in a file, and what of them is in host memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from queue import SimpleQueue

import numpy as np
import torch

from ..core import CHUNK, KVPart
from ..disk.direct_file import BLOCK, DirectFile, aligned
from ..disk.extents import merged
from ..disk.requests import Offsets, Requests
from ..disk.row_copy import RowCopies
from ..disk.speed import USUAL, DiskSpeed
from ..errors import DiskError, PoolFullError
from ..units import format_size
from .file_layout import FileLayout
from .host_shares import HostShares
from .layout import ArenaLayout
from .row_cache import RowCache
from .write_behind import WriteBehind

AT_ONCE = 2
"""Layers whose rows are read at the same time: a disk is not idle while the rows of one are looked up."""


@dataclass
class DiskUse:
    """What reading and writing rows has cost so far. `wanted`: rows (K and V of a token, layer and head) that were
    asked for one by one; `cached`: those of them that were in memory. `requests`: reads of the disk."""

    wanted: int = 0
    cached: int = 0
    requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def since(self, before: DiskUse) -> DiskUse:
        """What has come since `before`."""
        return DiskUse(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(self)))


class FileArena:
    """Places of rows, as `Arena`, in a file. Chunks that are being filled are in memory until others need their buffer;
    whole chunks are written behind. Rows that were gathered stay in memory as long as they are used (`RowCache`).

    `view` belongs to one thread at a time, `gather` to one for each layer, `fill` and `copy` to another, and no row is
    read while it is written: who calls orders that. Raises DiskError where the disk fails.
    """

    def __init__(
        self, layout: ArenaLayout, dtype: torch.dtype, file: DirectFile, limit: int, speed: DiskSpeed = USUAL
    ) -> None:
        """limit: bytes of host memory."""
        assert dtype.itemsize == layout.itemsize
        self.layout, self.dtype, self.places = layout, dtype, FileLayout(layout)
        self.file, self.gap = file, speed.gap
        self.shares = HostShares.of(limit, self.places)
        self.active = 0
        self.use = DiskUse()
        self._cache = RowCache(self.shares.slots, self.places.pairs, 2 * layout.head_dim, dtype)
        self._writer = WriteBehind(file, self.shares.staged)
        self._buffers: OrderedDict[int, torch.Tensor] = OrderedDict()
        """Chunks that are being filled, uint8 `[layers * Hkv * piece]` each, the least recently filled first."""
        self._written = np.zeros(layout.chunks, bool)
        """Chunks of which the file has something."""
        self._mutex = threading.RLock()
        self._staging: SimpleQueue[torch.Tensor] = SimpleQueue()
        """Of those that gather at the same time, one buffer each; others wait."""
        for _ in range(AT_ONCE):
            self._staging.put(aligned(self.shares.staged // AT_ONCE // BLOCK * BLOCK))

    @property
    def host_bytes(self) -> int:
        """Bytes of rows in memory: those that stay, and chunks that are being filled."""
        buffers = len(self._buffers) * (self.shares.chunks // self.shares.chunk_buffers)
        return self._cache.used * self.shares.slot_bytes + buffers

    def activate(self) -> None:
        """Takes the next slab's room from the disk. PoolFullError where there is none."""
        assert self.active < self.layout.slabs
        try:
            self.file.allocate(self.active * self.places.slab, self.places.slab)
        except OSError as error:
            raise PoolFullError(
                f"the disk of {str(self.file.folder)!r} gives no {format_size(self.places.slab)} more for rows "
                f"({error.strerror or error}); {format_size(self.active * self.places.slab)} are in use and what is in "
                f"them is kept: free room there, lower disk_limit, or shorten the prompts"
            ) from error
        self.active += 1

    @property
    def lost(self) -> set[int]:
        """Chunks of which something could not be written; the next holder of one begins anew."""
        return self._writer.lost

    def discard(self, chunks: Sequence[int]) -> None:
        """What these chunks have is nobody's any more: it need not be written, and never was lost."""
        with self._mutex:
            for chunk in chunks:
                self._buffers.pop(chunk, None)
            self._written[chunks] = False
            self._writer.forgive(chunks)

    # ------------------------------------------------------------------------------------------------------- writing

    def fill(self, slab: int, place: int, offset: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Rows k, v `[Hkv, n, width]`, as they are stored, take the slots of a slab from `offset` on, in one layer."""
        done, total = 0, k.shape[1]
        while done < total:
            slot, first = divmod(offset + done, CHUNK)
            chunk = slab * self.layout.slab_chunks + slot
            whole = 0 if first else self._unbuffered(chunk, (total - done) // CHUNK)
            count = whole * CHUNK or min(CHUNK - first, total - done)
            own_k, own_v = k[:, done : done + count], v[:, done : done + count]
            self._forget(range(chunk, chunk + max(1, whole)), place)
            if whole:
                self._write_behind(range(chunk, chunk + whole), place, torch.stack((own_k, own_v), dim=2).cpu())
            else:
                with self._mutex:
                    rows = self._rows(self._buffered(chunk))[place, :, first : first + count]
                    rows[:, :, 0], rows[:, :, 1] = own_k, own_v
            done += count

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies the first `tokens` slots of chunk `source` to chunk `target`, all layers."""
        with self._mutex:
            rows = self._rows(self._buffered(source))[:, :, :tokens].clone()
            self._rows(self._buffered(target))[:, :, :tokens] = rows
            for place in range(self.layout.layers):
                self._forget(range(target, target + 1), place)

    def _unbuffered(self, chunk: int, most: int) -> int:
        """How many chunks from `chunk` on, at most `most`, are not being filled."""
        with self._mutex:
            return next((i for i in range(most) if chunk + i in self._buffers), most)

    def _forget(self, chunks: range, place: int) -> None:
        with self._mutex:
            for chunk in chunks:
                self._cache.forget(self.places.ids_of(chunk, place))

    def _write_behind(self, chunks: range, place: int, rows: torch.Tensor) -> None:
        """Writes rows `[Hkv, chunks * 64, 2, width]` of whole chunks, a piece of a head at a time."""
        slab, slot = divmod(chunks.start, self.layout.slab_chunks)
        self._written[chunks.start : chunks.stop] = True
        for head, own in enumerate(rows):
            data = aligned(len(chunks) * self.places.piece)
            pieces = data.view(len(chunks), self.places.piece)
            pieces[:, : CHUNK * self.places.pair_bytes] = own.reshape(len(chunks), -1).view(torch.uint8)
            self.use.bytes_written += len(data)
            where = self.places.offset(slab, place, head, slot)
            self._writer.add([(chunk, place) for chunk in chunks], [(where, data)])

    def _buffered(self, chunk: int) -> torch.Tensor:
        """The buffer of a chunk, which is read where it is not there; another leaves where there are too many."""
        if chunk in self._buffers:
            self._buffers.move_to_end(chunk)
            return self._buffers[chunk]
        while len(self._buffers) >= self.shares.chunk_buffers:
            self._write_buffer(*self._buffers.popitem(last=False))
        if self._written[chunk]:
            self._buffers[chunk] = self._read_chunk(chunk)
        else:
            self._buffers[chunk] = aligned(self.layout.layers * self.layout.kv_heads * self.places.piece)
        return self._buffers[chunk]

    def _write_buffer(self, chunk: int, data: torch.Tensor) -> None:
        heads, offsets = self.layout.kv_heads, self._piece_offsets(chunk)
        self._written[chunk] = True
        self.use.bytes_written += len(data)
        pieces = [(int(at), data[i * self.places.piece :][: self.places.piece]) for i, at in enumerate(offsets)]
        for place in range(self.layout.layers):
            self._writer.add([(chunk, place)], pieces[place * heads : (place + 1) * heads])

    def _read_chunk(self, chunk: int) -> torch.Tensor:
        offsets = self._piece_offsets(chunk)
        data = aligned(len(offsets) * self.places.piece)
        self._writer.wait([(chunk, place) for place in range(self.layout.layers)])
        at = np.arange(len(offsets), dtype=np.int64) * self.places.piece
        self._read(Requests(offsets, np.full(len(offsets), self.places.piece, np.int64), at), data)
        return data

    def _piece_offsets(self, chunk: int) -> Offsets:
        """Where the pieces of a chunk are, layer by layer and head by head."""
        places, heads = np.divmod(np.arange(self.layout.layers * self.layout.kv_heads), self.layout.kv_heads)
        slab, slot = divmod(chunk, self.layout.slab_chunks)
        found: Offsets = slab * self.places.slab + (places * self.layout.kv_heads + heads) * self.places.plane
        return found + slot * self.places.piece

    def _rows(self, pieces: torch.Tensor) -> torch.Tensor:
        """`[layers, Hkv, 64, 2, width]` of a chunk's buffer."""
        return self._decoded(pieces).view(self.layout.layers, self.layout.kv_heads, CHUNK, 2, -1)

    def _decoded(self, pieces: torch.Tensor) -> torch.Tensor:
        """`[pieces, 64, 2, width]`, a view, of neighbouring pieces of a chunk each."""
        own = pieces.view(-1, self.places.piece)[:, : CHUNK * self.places.pair_bytes].view(self.dtype)
        return own.view(len(own), CHUNK, 2, self.layout.head_dim)

    # ------------------------------------------------------------------------------------------------------- reading

    def view(self, slab: int, place: int, offset: int, size: int) -> KVPart:
        """K and V `[Hkv, size, width]` of neighbouring slots of a slab in one layer, a copy."""
        first, stop = offset // CHUNK, -(-(offset + size) // CHUNK)
        count, heads = stop - first, self.layout.kv_heads
        chunks = range(slab * self.layout.slab_chunks + first, slab * self.layout.slab_chunks + stop)
        data = aligned(heads * count * self.places.piece)
        with self._mutex:
            held = {
                chunk: self._rows(self._buffers[chunk])[place].clone() for chunk in chunks if chunk in self._buffers
            }
            self._writer.wait([(chunk, place) for chunk in chunks if chunk not in held])
        if len(held) < count:
            sizes = np.full(heads, count * self.places.piece, np.int64)
            offsets = np.array([self.places.offset(slab, place, head, first) for head in range(heads)], np.int64)
            self._read(Requests(offsets, sizes, np.arange(heads, dtype=np.int64) * sizes), data)
        rows = self._decoded(data).view(heads, count, CHUNK, 2, -1)
        for chunk, own in held.items():
            rows[:, chunk - chunks.start] = own
        flat = rows.flatten(1, 2)[:, offset - first * CHUNK :][:, :size]
        return KVPart(flat[:, :, 0], flat[:, :, 1])

    def gather(self, place: int, ids: Offsets, out: torch.Tensor, into: Offsets) -> None:
        """Rows `ids` int64 `[n]` (`FileLayout.ids`) of one layer, no two of them the same, to the rows `into` int64
        `[n]` of out `[m, 2 * width]`, in one piece."""
        with self._mutex:
            self._cache.pass_time(1 / self.layout.layers)
            self.use.wanted += (wanted := len(ids))
            ids, into = self._from_buffers(*self._cache.take(ids, out, into), out)
            self._writer.wait_for(place, ids // self.places.chunk_pairs)
            self.use.cached += wanted - len(ids)
        if len(ids):
            self._read_rows(self.places.offsets(ids), into, out)
            with self._mutex:
                self._cache.enter(ids, out, into)

    def _from_buffers(self, ids: Offsets, into: Offsets, out: torch.Tensor) -> tuple[Offsets, Offsets]:
        """Takes those of the rows whose chunk is being filled; returns the others, and where they are to go."""
        chunks = ids // self.places.chunk_pairs
        for chunk in self._buffers.keys() & set(chunks.tolist()):
            here = chunks == chunk
            found = self._rows(self._buffers[chunk]).flatten(0, 2)[
                torch.from_numpy(ids[here] % self.places.chunk_pairs)
            ]
            out.index_copy_(0, torch.from_numpy(into[here]), found.flatten(1))
            ids, into, chunks = ids[~here], into[~here], chunks[~here]
        return ids, into

    def _read_rows(self, offsets: Offsets, into: Offsets, out: torch.Tensor) -> None:
        """Rows at `offsets` of the file to the rows `into` of out, as much at a time as the staging buffer takes."""
        staging = self._staging.get()
        try:
            room = len(staging)
            for own in merged(offsets, self.places.pair_bytes, self.gap, room).batches(room):
                copies = RowCopies(own.first, own.places, into[own.pieces], out)
                self._read(own.requests, staging, copies)
        finally:
            self._staging.put(staging)

    def _read(self, requests: Requests, buffer: torch.Tensor, copies: RowCopies | None = None) -> None:
        try:
            self.file.read(requests, buffer, copies)
        except OSError as error:
            raise DiskError(
                f"cannot read rows from {str(self.file.folder)!r}: {error.strerror or error}; the request that needs "
                "them cannot go on"
            ) from error
        with self._mutex:
            self.use.requests += len(requests.size)
            self.use.bytes_read += int(requests.size.sum())

    def check_integrity(self) -> None:
        """Asserts that rows that stay are those on disk, or of a chunk's buffer. Waits for what is being written."""
        self._writer.drain()
        with self._mutex:
            self._cache.check_integrity()
            assert len(self._buffers) <= self.shares.chunk_buffers
            slots = self._cache.held
            for place, which in self.places.layers(owners := self._cache.owners(slots)):
                kept = self._cache.rows[torch.from_numpy(slots[which])]
                stored = torch.empty_like(kept)
                ids, into = self._from_buffers(owners[which], np.arange(len(which)), stored)
                self._read_rows(self.places.offsets(ids), into, stored)
                same = torch.equal(kept.view(torch.uint8), stored.view(torch.uint8))
                assert same, f"a row that stays, of the layer at place {place}, is another one on disk"
