"""KV storage in a file, with buffers and a cache in host memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np
import torch

from ...core import CHUNK, KVPart, ranges_of
from ...errors import DiskError, PoolFullError
from ...utils.allocator import RecycledMemory
from ...utils.units import format_size
from ..layout import ArenaLayout
from .direct_file import BLOCK, DirectFile, aligned
from .disk_use import DiskUse
from .extents import merged
from .file_layout import FileLayout
from .homes import Home, Homes
from .host_shares import HostShares
from .requests import Offsets, Requests
from .row_cache import RowCache
from .row_copy import RowCopies
from .speed import USUAL, DiskSpeed
from .write_behind import Piece, WriteBehind

AT_ONCE = 2  # layers that are read concurrently: keeps the disk busy while one layer looks up its KV entries


class FileArena:
    """Stores KV in a file, with the interface of `Arena`.

    Partly filled blocks are buffered in memory until another block needs the buffer. Full blocks are written
    asynchronously. KV entries read by `gather` are cached in memory (`RowCache`).

    A block may have a home (`homes.py`): a file of a store that holds its KV instead of the pool's own file. A layer
    that is written as a whole goes to the home, once. Before any other write, the block leaves its home and its KV is
    copied to a buffer, so a stored file is never modified. The KV of a block is in exactly one place: a buffer, its
    home, or the pool's file.

    Thread-safe, under conditions that the caller ensures: only one thread at a time fills a block or gives it a home,
    only one thread per layer calls `gather`, and no KV is read while it is written. Methods raise DiskError if an
    input or output operation fails.

    Args:
        layout: Shape of the arena.
        dtype: Data type of the stored elements.
        file: The pool's own file.
        limit: Bytes of host memory.
        speed: Speed of the disk.
    """

    def __init__(
        self, layout: ArenaLayout, dtype: torch.dtype, file: DirectFile, limit: int, speed: DiskSpeed = USUAL
    ) -> None:
        assert dtype.itemsize == layout.itemsize
        self.layout, self.dtype, self.places = layout, dtype, FileLayout(layout)
        self.file, self.gap = file, speed.gap
        self.shares = HostShares.of(limit, self.places)
        self.active, self.use = 0, DiskUse()
        self._cache = RowCache(self.shares.slots, 2 * layout.head_dim, dtype)
        self._writer = WriteBehind(file.folder, self.shares.staged)
        self._homes = Homes(file, self.places)
        self._blocks = RecycledMemory(least=0)  # for sequential reads; whole pages, because direct I/O needs alignment
        # Partly filled blocks, uint8 `[layers * Hkv * piece]` each, least recently filled first.
        self._buffers: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._written = np.zeros(layout.chunks, bool)  # blocks with KV in the pool's own file
        self._mutex = threading.RLock()
        self._staging: SimpleQueue[torch.Tensor] = SimpleQueue()  # one buffer per concurrent reader; others wait
        for _ in range(AT_ONCE):
            self._staging.put(aligned(self.shares.staged // AT_ONCE // BLOCK * BLOCK))

    @property
    def host_bytes(self) -> int:
        """Bytes of KV in memory: the cache and the buffers of partly filled blocks."""
        buffers = len(self._buffers) * (self.shares.chunks // self.shares.chunk_buffers)
        return self._cache.used * self.shares.slot_bytes + buffers

    def activate(self) -> None:
        """Allocate disk space for the next slab. Raise PoolFullError if there is none."""
        assert self.active < self.layout.slabs
        try:
            self.file.allocate(self.active * self.places.slab, self.places.slab)
        except OSError as error:
            raise PoolFullError(
                f"cannot allocate {format_size(self.places.slab)} more for the KV cache on the disk of "
                f"{str(self.file.folder)!r} ({error.strerror or error}); {format_size(self.active * self.places.slab)} "
                f"are in use and remain valid: free space there, lower disk_limit, or shorten the prompts"
            ) from error
        self.active += 1

    @property
    def lost(self) -> set[int]:
        """Blocks with KV that could not be written, until they are discarded."""
        return self._writer.lost

    def discard(self, chunks: Sequence[int]) -> None:
        """Drop the content of blocks that were freed, including pending writes and write errors."""
        with self._mutex:
            for chunk in chunks:
                self._buffers.pop(chunk, None)
                self._forget_all(chunk)
                self._homes.leave(chunk)
            self._written[chunks] = False
            self._writer.forgive(chunks)

    # --------------------------------------------------------------------------------------------------------- homes

    def home(self, chunk: int) -> Home | None:
        """Wait for pending writes of a block and return its home. Raise DiskError if a write failed."""
        self._writer.wait([(chunk, place) for place in range(self.layout.layers)])
        with self._mutex:
            return self._homes.get(chunk)

    def blank(self, chunk: int) -> bool:
        """Return whether a block has no KV yet and can get a home."""
        with self._mutex:
            nowhere = chunk not in self._homes and chunk not in self._buffers and not self._written[chunk]
            return nowhere and self._homes.room()

    def buffered(self, chunk: int) -> bool:
        """Return whether all KV of a block is in its buffer and the block can get a home."""
        with self._mutex:
            return chunk in self._buffers and self._homes.room()

    def house(self, chunk: int, home: Home, places: range = range(0)) -> bool:
        """Give a `blank` block a home that already holds the layers at `places`.

        Returns:
            False if the block is not blank any more.
        """
        with self._mutex:
            if blank := self.blank(chunk):
                self._forget_all(chunk)
                self._homes.enter(chunk, home, places)
            return blank

    def bring_home(self, chunk: int, home: Home, layers: int) -> bool:
        """Give a full, `buffered` block a home and write its first `layers` layers there.

        Returns:
            False if the block is not in its buffer any more.
        """
        with self._mutex:
            if buffered := self.buffered(chunk):
                rows = self._rows(self._buffers.pop(chunk))[:layers]
                self._written[chunk] = False
                self._homes.enter(chunk, home)
                for place, own in enumerate(rows):
                    self._write_homes(range(chunk, chunk + 1), place, own)
            return buffered

    # ------------------------------------------------------------------------------------------------------- writing

    def fill(self, slab: int, place: int, offset: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write encoded k, v `[Hkv, n, width]` to the slots of a slab from `offset` on, in one layer."""
        done, total = 0, k.shape[1]
        while done < total:
            slot, first = divmod(offset + done, CHUNK)
            chunk = slab * self.layout.slab_chunks + slot
            whole = 0 if first else self._taken_whole(chunk, place, (total - done) // CHUNK)
            count = whole * CHUNK or min(CHUNK - first, total - done)
            own_k, own_v = k[:, done : done + count], v[:, done : done + count]
            if whole:
                self._forget(range(chunk, chunk + whole), place)
                self._write_behind(range(chunk, chunk + whole), place, torch.stack((own_k, own_v), dim=2).cpu())
            else:
                with self._mutex:
                    rows = self._rows(self._buffered(chunk))[place, :, first : first + count]
                    rows[:, :, 0], rows[:, :, 1] = own_k, own_v
                    for slot in range(first, first + count):
                        self._cache.forget(self.places.ids_of_token(chunk, place, slot))
            done += count

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` slots of block `source` to block `target` in all layers."""
        with self._mutex:
            held = self._read_chunk(source) if source in self._homes else self._buffered(source)
            rows = self._rows(held)[:, :, :tokens].clone()
            self._rows(self._buffered(target))[:, :, :tokens] = rows
            self._forget_all(target)

    def _taken_whole(self, chunk: int, place: int, most: int) -> int:
        """Return how many of the `most` blocks from `chunk` on can be written as a whole in the layer at `place`.

        They have no buffer, and their home, if any, does not have the layer yet.
        """
        with self._mutex:
            takes = (chunk + i not in self._buffers and self._homes.takes(chunk + i, place) for i in range(most))
            return next((i for i, whole in enumerate(takes) if not whole), most)

    def _forget(self, chunks: range, place: int) -> None:
        with self._mutex:
            for chunk in chunks:
                self._cache.forget(self.places.ids_of(chunk, place))

    def _forget_all(self, chunk: int) -> None:
        """Remove all KV entries of a block from the cache."""
        pairs = self.places.chunk_pairs
        self._cache.forget(range(chunk * pairs, (chunk + 1) * pairs))

    def _write_behind(self, chunks: range, place: int, rows: torch.Tensor) -> None:
        """Write `[Hkv, chunks * 64, 2, width]` of full blocks asynchronously, to homes or to the pool's file."""
        for write, home in ((self._write_homes, True), (self._write_planes, False)):
            for run in ranges_of(chunk for chunk in chunks if (chunk in self._homes) == home):
                write(run, place, rows[:, (run.start - chunks.start) * CHUNK : (run.stop - chunks.start) * CHUNK])

    def _write_planes(self, chunks: range, place: int, rows: torch.Tensor) -> None:
        """Write full blocks to the pool's own file, one head at a time."""
        slab, slot = divmod(chunks.start, self.layout.slab_chunks)
        self._written[chunks.start : chunks.stop] = True
        for head, own in enumerate(rows):
            data = aligned(len(chunks) * self.places.piece)
            pieces = data.view(len(chunks), self.places.piece)
            pieces[:, : CHUNK * self.places.pair_bytes] = own.reshape(len(chunks), -1).view(torch.uint8)
            self.use.bytes_written += len(data)
            where = self.places.offset(slab, place, head, slot)
            self._writer.add([(chunk, place) for chunk in chunks], [Piece(self.file, where, data)])

    def _write_homes(self, chunks: range, place: int, rows: torch.Tensor) -> None:
        """Write one layer of full blocks to their homes."""
        blocks = aligned(len(chunks) * self.places.layer).view(len(chunks), -1)
        self._home_rows(blocks)[:] = rows.unflatten(1, (len(chunks), CHUNK)).transpose(0, 1)
        self.use.bytes_written += blocks.numel()
        with self._mutex:
            homes = [self._homes.give(chunk, place) for chunk in chunks]
        pieces = [Piece(home, home.at(place), block) for home, block in zip(homes, blocks, strict=True)]
        self._writer.add([(chunk, place) for chunk in chunks], pieces)

    def _buffered(self, chunk: int) -> torch.Tensor:
        """Return the buffer of a block, read from disk if needed. May write out the oldest buffers."""
        if chunk in self._buffers:
            self._buffers.move_to_end(chunk)
            return self._buffers[chunk]
        while len(self._buffers) >= self.shares.chunk_buffers:
            self._write_buffer(*self._buffers.popitem(last=False))
        if self._written[chunk] or chunk in self._homes:
            self._buffers[chunk] = self._read_chunk(chunk)
            self._homes.leave(chunk)
        else:
            self._buffers[chunk] = aligned(self.layout.layers * self.layout.kv_heads * self.places.piece)
        return self._buffers[chunk]

    def _write_buffer(self, chunk: int, data: torch.Tensor) -> None:
        heads, size, offsets = self.layout.kv_heads, self.places.piece, self.places.piece_offsets(chunk)
        self._written[chunk] = True
        self.use.bytes_written += len(data)
        pieces = [Piece(self.file, int(at), data[i * size : (i + 1) * size]) for i, at in enumerate(offsets)]
        for place in range(self.layout.layers):
            self._writer.add([(chunk, place)], pieces[place * heads : (place + 1) * heads])

    def _read_chunk(self, chunk: int) -> torch.Tensor:
        """Read a block from disk into a new buffer."""
        offsets = self.places.piece_offsets(chunk)
        data = aligned(len(offsets) * self.places.piece)
        self._writer.wait([(chunk, place) for place in range(self.layout.layers)])
        if at_home := self._homes.layers(range(chunk, chunk + 1), 0):
            size = self.layout.layers * self.places.layer
            one = np.array([[at_home[0]], [size], [0]], np.int64)
            self._read(Requests(*one), stored := aligned(size))
            self._rows(data)[:] = self._home_rows(stored.view(-1, self.places.layer))
            return data
        at = np.arange(len(offsets), dtype=np.int64) * self.places.piece
        self._read(Requests(offsets, np.full(len(offsets), self.places.piece, np.int64), at), data)
        return data

    def _home_rows(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return a view `[n, Hkv, 64, 2, width]` of n layers in the format of homes, uint8 `[n, layer]`."""
        own = blocks[:, : self.layout.kv_heads * CHUNK * self.places.pair_bytes].view(self.dtype)
        return own.view(len(blocks), self.layout.kv_heads, CHUNK, 2, self.layout.head_dim)

    def _rows(self, pieces: torch.Tensor) -> torch.Tensor:
        """Return a view `[layers, Hkv, 64, 2, width]` of a block's buffer."""
        return self._decoded(pieces).view(self.layout.layers, self.layout.kv_heads, CHUNK, 2, -1)

    def _decoded(self, pieces: torch.Tensor) -> torch.Tensor:
        """Return a view `[pieces, 64, 2, width]` of contiguous pieces (a layer and head of a block each)."""
        own = pieces.view(-1, self.places.piece)[:, : CHUNK * self.places.pair_bytes].view(self.dtype)
        return own.view(len(own), CHUNK, 2, self.layout.head_dim)

    # ------------------------------------------------------------------------------------------------------- reading

    def view(self, slab: int, place: int, offset: int, size: int) -> KVPart:
        """Return a copy of K and V `[Hkv, size, width]` of contiguous slots of a slab in one layer."""
        first, stop = offset // CHUNK, -(-(offset + size) // CHUNK)
        start = slab * self.layout.slab_chunks
        chunks = range(start + first, start + stop)
        with self._homes:
            with self._mutex:
                held = {
                    chunk: self._rows(self._buffers[chunk])[place].clone() for chunk in chunks if chunk in self._buffers
                }
                at_home = self._homes.layers(chunks, place)
                self._writer.wait([(chunk, place) for chunk in chunks if chunk not in held])
            planes = [i for i, chunk in enumerate(chunks) if chunk not in held and i not in at_home]
            rows = self._read_layer(chunks, place, range(planes[0], planes[-1] + 1) if planes else range(0), at_home)
        for chunk, own in held.items():
            rows[:, chunk - chunks.start] = own
        flat = rows.flatten(1, 2)[:, offset - first * CHUNK :][:, :size]
        return KVPart(flat[:, :, 0], flat[:, :, 1])

    def _read_layer(self, chunks: range, place: int, planes: range, at_home: dict[int, int]) -> torch.Tensor:
        """Read one layer of `chunks`, `[Hkv, chunks, 64, 2, width]`.

        `planes` are the indices of blocks to read from the pool's own file, `at_home` those to read from homes.
        """
        if not at_home:
            return self._read_planes(chunks, place, planes)
        count, heads = len(chunks), self.layout.kv_heads
        data = self._blocks.empty((heads * count * CHUNK * self.places.pair_bytes,), torch.uint8)
        stored = data.view(self.dtype).view(heads, count, CHUNK, 2, -1)
        if planes:
            own = slice(planes.start, planes.stop)
            stored[:, own] = self._read_planes(chunks, place, planes)[:, own]
        into = (np.array([*at_home])[:, None] + np.arange(heads) * count).reshape(-1)
        self._read_homes(np.array([*at_home.values()]), data.view(heads * count, -1), into)
        return stored

    def _read_planes(self, chunks: range, place: int, planes: range) -> torch.Tensor:
        """Read blocks `planes` from the pool's own file. Other blocks of the result are undefined."""
        count, heads, piece = len(chunks), self.layout.kv_heads, self.places.piece
        data = self._blocks.empty((heads * count * piece,), torch.uint8)
        if planes:
            slab, slot = divmod(chunks.start + planes.start, self.layout.slab_chunks)
            sizes = np.full(heads, len(planes) * piece, np.int64)
            offsets = np.array([self.places.offset(slab, place, head, slot) for head in range(heads)], np.int64)
            at = np.arange(planes.start, heads * count, count, dtype=np.int64) * piece
            self._read(Requests(offsets, sizes, at), data)
        return self._decoded(data).view(heads, count, CHUNK, 2, -1)

    def _read_homes(self, offsets: Offsets, out: torch.Tensor, into: Offsets) -> None:
        """Read layers at `offsets` `[n]` of homes into rows `into` `[n * Hkv]` of out `[m, 64 * pair_bytes]`.

        Works in batches of the size of the staging buffer.
        """
        layer, heads, staging = self.places.layer, self.layout.kv_heads, self._staging.get()
        try:
            buffer = staging if len(staging) >= layer else aligned(layer)
            for done in range(0, len(offsets), most := len(buffer) // layer):
                own = offsets[done : done + most]
                at = np.arange(len(own), dtype=np.int64) * layer
                row_at = (at[:, None] + np.arange(heads) * out.shape[1]).reshape(-1)
                first = np.arange(len(own) + 1, dtype=np.int64) * heads
                copies = RowCopies(first, row_at, into[done * heads :][: len(row_at)], out)
                self._read(Requests(own, np.full(len(own), layer, np.int64), at), buffer, copies)
        finally:
            self._staging.put(staging)

    def gather(self, place: int, ids: Offsets, out: torch.Tensor, into: Offsets) -> None:
        """Read KV entries of one layer from the cache, the buffers or the disk.

        Args:
            place: Index of the layer within a block.
            ids: int64 `[n]`, distinct entries (`FileLayout.ids`).
            out: `[m, 2 * width]`, contiguous.
            into: int64 `[n]`, row of `out` for each entry.
        """
        with self._homes:
            with self._mutex:
                self._cache.pass_time(1 / self.layout.layers)
                self.use.wanted += (wanted := len(ids))
                ids, into = self._from_buffers(*self._cache.take(ids, out, into), out)
                self._writer.wait_for(place, ids // self.places.chunk_pairs)
                self.use.cached += wanted - len(ids)
                bases = self._homes.bases(ids)
            if len(ids):
                self._read_rows(self._homes.offsets(ids, bases), into, out)
                with self._mutex:
                    self._cache.enter(ids, out, into)

    def _from_buffers(self, ids: Offsets, into: Offsets, out: torch.Tensor) -> tuple[Offsets, Offsets]:
        """Copy the KV entries of buffered blocks to `out`. Return the remaining `ids` and `into`."""
        chunks = ids // self.places.chunk_pairs
        for chunk in self._buffers.keys() & set(chunks.tolist()):
            here = chunks == chunk
            slots = torch.from_numpy(ids[here] % self.places.chunk_pairs)
            found = self._rows(self._buffers[chunk]).flatten(0, 2)[slots]
            out.index_copy_(0, torch.from_numpy(into[here]), found.flatten(1))
            ids, into, chunks = ids[~here], into[~here], chunks[~here]
        return ids, into

    def _read_rows(self, offsets: Offsets, into: Offsets, out: torch.Tensor) -> None:
        """Read KV entries at `offsets` into rows `into` of `out`, in batches of the staging buffer's size."""
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
                f"cannot read KV from {str(self.file.folder)!r}: {error.strerror or error}; the request that needs it "
                "is aborted"
            ) from error
        with self._mutex:
            self.use.requests += len(requests.size)
            self.use.bytes_read += int(requests.size.sum())

    def check_integrity(self) -> None:
        """Wait for pending writes, then assert that the cache agrees with the disk and the buffers."""
        self._writer.drain()
        with self._mutex:
            self._cache.check_integrity()
            self._homes.check_integrity()
            self._blocks.check_integrity()
            assert len(self._buffers) <= self.shares.chunk_buffers
            assert not any(chunk in self._homes for chunk in self._buffers)
            slots = self._cache.held
            for place, which in self.places.layers(owners := self._cache.owners(slots)):
                kept = self._cache.rows[torch.from_numpy(slots[which])]
                stored = torch.empty_like(kept)
                ids, into = self._from_buffers(owners[which], np.arange(len(which)), stored)
                self._read_rows(self._homes.offsets(ids, self._homes.bases(ids)), into, stored)
                assert torch.equal(kept.view(torch.uint8), stored.view(torch.uint8)), (
                    f"place {place}: cache and disk differ"
                )
