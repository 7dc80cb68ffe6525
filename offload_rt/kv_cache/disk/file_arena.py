"""KV storage in a file."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np
import torch

from ...core import BLOCK_SIZE, KVPart, ModelGeometry, ranges_of
from ...errors import DiskError, PoolFullError
from ...utils.allocator import RecycledMemory
from ...utils.units import format_size
from ..kv_format import KVFormat
from ..layout import ArenaLayout, fill_planes
from .direct_file import DirectFile, aligned
from .extents import Extents, StoredExtent
from .file_layout import DiskTier, FileLayout, MemoryBudget, disk_limit, round_up_to_page
from .requests import DISK_PAGE, DiskUse, Offsets, Requests, merge_reads
from .row_cache import RowCache
from .row_copy import RowCopies
from .write_behind import ExtentWrite, WriteBehind

AT_ONCE = 2  # layers that are read concurrently, so that the disk stays busy while one layer looks up its KV entries
# Two pieces are read in one request if the gap between them has at most this many bytes. Reading the gap takes less
# time than a second request (10 µs at 2 GB/s).
GAP = 4 * DISK_PAGE
LARGEST_READ = 1 << 20  # maximum bytes per request, so that copying from one request overlaps with reading the next


class FileArena:
    """KV storage in a file, with the interface of `Arena`. Methods raise DiskError if an I/O operation fails.

    The KV of a block is either in a memory buffer or in the block's extent on disk (see `extents.py`). A partly filled
    block stays in its buffer until another block needs the buffer. Full blocks are written asynchronously. KV entries
    that `gather` reads are cached (`RowCache`). Unlike in `Arena`, `view` and `planes_of` return copies.

    KV in a session store's files is never modified. Before a block in such a file is overwritten, its KV is copied to a
    buffer, and the block no longer uses the file.

    Thread-safe under three conditions: only one thread at a time fills a block or assigns it an extent, only one thread
    per layer calls `gather`, and no KV entry is read while it is being written.

    Args:
        limit: Limit on host memory in bytes.
    """

    def __init__(self, layout: ArenaLayout, dtype: torch.dtype, file: DirectFile, limit: int) -> None:
        assert dtype.itemsize == layout.itemsize
        self.layout, self.dtype, self.file_layout = layout, dtype, FileLayout(layout)
        self.file = file
        self.budget = MemoryBudget.divide(limit, self.file_layout)
        self.active, self.use = 0, DiskUse()
        self._cache = RowCache(self.budget.slots, layout.planes * layout.head_dim, dtype)
        self._writer = WriteBehind(file.folder, self.budget.staged)
        self._extents = Extents(file, self.file_layout)
        self._blocks = RecycledMemory(least=0)  # memory for sequential reads
        # One buffer `[layers, layer bytes]` (uint8) per partly filled block. The least recently filled block is first.
        self._buffers: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._written = np.zeros(layout.blocks, bool)  # blocks with KV in the pool's own file
        self._mutex = threading.RLock()
        # One staging buffer per concurrent reader. A thread waits until a buffer is available.
        self._staging: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(AT_ONCE):
            self._staging.put(aligned(self.budget.staged // AT_ONCE // DISK_PAGE * DISK_PAGE))

    @classmethod
    def create(
        cls, disk: DiskTier, geometry: ModelGeometry, format: KVFormat, host_bytes: int, slab_tokens: int
    ) -> FileArena:
        """Create the file of a KV cache that uses up to `host_bytes` of host memory.

        Raises ConfigError if the folder cannot be used, and MemoryLimitError if the limit on host memory or on disk
        space is too large or too small.
        """
        layout = FileLayout.fit(disk_limit(disk.folder, disk.limit, host_bytes), geometry, format, slab_tokens)
        MemoryBudget.divide(host_bytes, layout)  # checks the limit before the file is created
        return cls(layout.arena, format.storage, DirectFile(disk.folder), host_bytes)

    @property
    def host_bytes(self) -> int:
        """Size in bytes of the host memory that cached KV entries and block buffers use."""
        buffers = len(self._buffers) * (self.budget.blocks // self.budget.block_buffers)
        return self._cache.used * self.budget.slot_bytes + buffers

    def activate(self) -> None:
        """Allocate disk space for the next slab. Raise PoolFullError if there is not enough space."""
        assert self.active < self.layout.slabs
        slab = self.file_layout.slab_bytes
        try:
            self.file.allocate(self.active * slab, slab)
        except OSError as error:
            raise PoolFullError(
                f"cannot allocate {format_size(slab)} more for the KV cache on the disk of "
                f"{str(self.file.folder)!r} ({error.strerror or error}); {format_size(self.active * slab)} "
                f"are in use and remain valid: free space there, lower disk_limit, or shorten the prompts"
            ) from error
        self.active += 1

    @property
    def lost(self) -> set[int]:
        return self._writer.lost

    def discard(self, blocks: Sequence[int]) -> None:
        """Drop the KV of freed blocks, and any errors from writing it."""
        with self._mutex:
            for block in blocks:
                self._buffers.pop(block, None)
                self._extents.release(block)
            self._cache.remove_groups(blocks, self.file_layout.block_entries)
            self._written[blocks] = False
            self._writer.forget_errors(blocks)

    # ------------------------------------------------------------------------------------------------ stored extents

    def extent(self, block: int) -> StoredExtent | None:
        """Wait for a block's pending writes. Return its stored extent, or None if it has none. Raises DiskError."""
        self._wait(block)
        with self._mutex:
            return self._extents.get(block)

    def is_empty(self, block: int) -> bool:
        """Return whether `attach` accepts the block, which must have no KV. It must also be possible to open a file."""
        with self._mutex:
            nowhere = block not in self._extents and block not in self._buffers and not self._written[block]
            return nowhere and self._extents.can_open_file()

    def is_buffered(self, block: int) -> bool:
        """Return whether `move_to` accepts the block: its KV must be in a buffer, and a file can still be opened."""
        with self._mutex:
            return block in self._buffers and self._extents.can_open_file()

    def attach(self, block: int, extent: StoredExtent, storage_layers: range = range(0)) -> bool:
        """Let an empty block use a stored extent that already contains `storage_layers`.

        Return False if the block already has KV or if no more files can be opened.
        """
        with self._mutex:
            if blank := self.is_empty(block):
                self._forget_all(block)
                self._extents.assign(block, extent, storage_layers)
            return blank

    def move_to(self, block: int, extent: StoredExtent, layers: int) -> bool:
        """Move a full block from its buffer to a stored extent by writing its first `layers` storage layers.

        Return False if the block has no buffer or if no more files can be opened.
        """
        with self._mutex:
            if buffered := self.is_buffered(block):
                data = self._buffers.pop(block)
                self._written[block] = False
                self._extents.assign(block, extent)
                self._queue_block_write(block, data[:layers])
            return buffered

    # ------------------------------------------------------------------------------------------------------- writing

    def fill(self, slab: int, storage_layer: int, offset: int, k: torch.Tensor, v: torch.Tensor) -> None:
        done, total = 0, k.shape[1]
        while done < total:
            slot, first = divmod(offset + done, BLOCK_SIZE)
            block = slab * self.layout.slab_blocks + slot
            whole = 0 if first else self._count_writable(block, storage_layer, (total - done) // BLOCK_SIZE)
            count = whole * BLOCK_SIZE or min(BLOCK_SIZE - first, total - done)
            own_k, own_v = k[:, done : done + count], v[:, done : done + count]
            if whole:
                data = aligned(whole * self.file_layout.layer_bytes).view(whole, -1)
                by_block = [rows.unflatten(1, (whole, BLOCK_SIZE)).transpose(0, 1) for rows in (own_k, own_v)]
                fill_planes(self._as_vectors(data), 3, *by_block)
                with self._mutex:
                    for own in range(block, block + whole):
                        self._cache.remove(self.file_layout.layer_entry_ids(own, storage_layer))
                self._queue_layer_write(range(block, block + whole), storage_layer, data)
            else:
                with self._mutex:
                    rows = self._as_vectors(self._buffer_of(block))[storage_layer, :, first : first + count]
                    fill_planes(rows, 2, own_k, own_v)
                    for slot in range(first, first + count):
                        self._cache.remove(self.file_layout.layer_entry_ids(block, storage_layer)[slot::BLOCK_SIZE])
            done += count

    def copy(self, source: int, target: int, tokens: int) -> None:
        with self._mutex:
            data = self._read_block(source) if source in self._extents else self._buffer_of(source)
            rows = self._as_vectors(data)[:, :, :tokens].clone()
            self._as_vectors(self._buffer_of(target))[:, :, :tokens] = rows
            self._forget_all(target)

    def _count_writable(self, block: int, storage_layer: int, most: int) -> int:
        """Return how many consecutive blocks, starting at `block`, can be written to disk without a buffer.

        The result is at most `most`.
        """
        with self._mutex:
            following = range(block, block + most)
            blocked = (b in self._buffers or not self._extents.accepts(b, storage_layer) for b in following)
            return next((i for i, stop in enumerate(blocked) if stop), most)

    def _forget_all(self, block: int) -> None:
        self._cache.remove_groups([block], self.file_layout.block_entries)

    def _queue_layer_write(self, blocks: range, storage_layer: int, data: torch.Tensor) -> None:
        """Queue a write of one storage layer of full blocks. `data` is uint8 `[blocks, layer bytes]`."""
        with self._mutex:
            stored = [range(block, block + 1) for block in blocks if block in self._extents]
            own = list(ranges_of(block for block in blocks if block not in self._extents))
            pieces = []
            # Blocks with consecutive ids are adjacent in the pool's file, so one write covers them.
            for run in (*stored, *own):
                part = data[run.start - blocks.start : run.stop - blocks.start]
                pieces.append(ExtentWrite(*self._extents.target(run.start, storage_layer), part.flatten()))
            for run in own:
                self._written[run.start : run.stop] = True
            self.use.bytes_written += data.numel()
        self._writer.add([(block, storage_layer) for block in blocks], pieces)

    def _queue_block_write(self, block: int, data: torch.Tensor) -> None:
        for storage_layer, own in enumerate(data):
            self._queue_layer_write(range(block, block + 1), storage_layer, own[None])

    def _buffer_of(self, block: int) -> torch.Tensor:
        """Return the memory buffer of a block. If the block has KV on disk, the KV is read into the buffer.

        If there are too many buffers, the oldest is written to disk.
        """
        if block in self._buffers:
            self._buffers.move_to_end(block)
            return self._buffers[block]
        while len(self._buffers) >= self.budget.block_buffers:
            self._queue_block_write(*self._buffers.popitem(last=False))
        if self._written[block] or block in self._extents:
            self._buffers[block] = self._read_block(block)
            self._extents.release(block)
        else:
            layers = self.layout.layers
            self._buffers[block] = aligned(layers * self.file_layout.layer_bytes).view(layers, -1)
        return self._buffers[block]

    def _read_block(self, block: int) -> torch.Tensor:
        layers, size = self.layout.layers, self.file_layout.layer_bytes
        self._wait(block)
        at = np.arange(layers, dtype=np.int64)
        requests = Requests(self._extents.layer_positions(block, at), np.full(layers, size, np.int64), at * size)
        self._read(requests, data := aligned(layers * size))
        return data.view(layers, size)

    def _wait(self, block: int) -> None:
        self._writer.wait([(block, storage_layer) for storage_layer in range(self.layout.layers)])

    def _as_vectors(self, data: torch.Tensor) -> torch.Tensor:
        """View storage layers, uint8 `[n, layer bytes]`, as stored vectors `[n, Hkv, 64, planes, width]`."""
        own = data[:, : self.file_layout.layer_entries * self.file_layout.entry_bytes].view(self.dtype)
        return own.view(len(data), self.layout.kv_heads, BLOCK_SIZE, self.layout.planes, self.layout.head_dim)

    # ------------------------------------------------------------------------------------------------------- reading

    def view(self, slab: int, storage_layer: int, offset: int, size: int) -> KVPart:
        first, stop = offset // BLOCK_SIZE, -(-(offset + size) // BLOCK_SIZE)
        start, count, heads = slab * self.layout.slab_blocks + first, stop - first, self.layout.kv_heads
        with self._extents:
            with self._mutex:
                buffered = self._buffers.keys() & range(start, start + count)
                copies = {block: self._as_vectors(self._buffers[block])[storage_layer].clone() for block in buffered}
                on_disk = np.array([i for i in range(count) if start + i not in buffered], np.int64)
                self._writer.wait_layer(storage_layer, start + on_disk)
                offsets = self._extents.layer_positions(start + on_disk, storage_layer)
            width = self.layout.planes * self.layout.head_dim
            rows = self._blocks.empty((heads * count, BLOCK_SIZE * width), self.dtype)
            self._read_rows(offsets, on_disk[:, None] + np.arange(heads) * count, rows)
        stored = rows.view(heads, count, BLOCK_SIZE, self.layout.planes, -1)
        for block, own in copies.items():
            stored[:, block - start] = own
        return KVPart.of(stored.flatten(1, 2)[:, offset - first * BLOCK_SIZE :][:, :size], dim=2)

    def planes_of(self, slab: int, storage_layers: range, offset: int, size: int) -> torch.Tensor:
        parts = [self.view(slab, storage_layer, offset, size) for storage_layer in storage_layers]
        return torch.stack([torch.stack((part.k, part.v), dim=1) for part in parts]).flatten(0, 2)

    def gather(self, storage_layer: int, ids: Offsets, out: torch.Tensor, into: Offsets) -> None:
        """Read KV entries of one storage layer, from memory or from disk, into rows of `out`.

        Args:
            ids: Distinct ids of KV entries (`FileLayout.entry_ids`), int64 `[n]`.
            out: Contiguous output `[m, planes * width]`. A row receives K and V of one entry.
            into: Row of `out` for each entry, int64 `[n]`.
        """
        with self._extents:
            with self._mutex:
                self._cache.advance(1 / self.layout.layers)
                self.use.wanted += (wanted := len(ids))
                ids, into = self._from_buffers(*self._cache.lookup(ids, out, into), out)
                self._writer.wait_layer(storage_layer, ids // self.file_layout.block_entries)
                self.use.cached += wanted - len(ids)
                offsets = self._extents.entry_positions(ids, storage_layer)
            if len(ids):
                self._read_rows(offsets, into[:, None], out)
                with self._mutex:
                    self._cache.insert(ids, out, into)

    def _from_buffers(self, ids: Offsets, into: Offsets, out: torch.Tensor) -> tuple[Offsets, Offsets]:
        """Copy the entries of buffered blocks to `out`. Return the `ids` and `into` of the remaining entries."""
        blocks = ids // self.file_layout.block_entries
        for block in self._buffers.keys() & set(blocks.tolist()):
            here = blocks == block
            slots = torch.from_numpy(ids[here] % self.file_layout.block_entries)
            found = self._as_vectors(self._buffers[block]).flatten(0, 2)[slots]
            out.index_copy_(0, torch.from_numpy(into[here]), found.flatten(1))
            ids, into, blocks = ids[~here], into[~here], blocks[~here]
        return ids, into

    def _read_rows(self, offsets: Offsets, into: Offsets, out: torch.Tensor) -> None:
        """Read n pieces of r adjacent rows each, and copy row j of piece i to row `into[i, j]` of `out` `[m, width]`.

        `offsets` `[n]` contains the file position of each piece.
        """
        own, row, staging = into.shape[1], out.shape[1] * out.itemsize, self._staging.get()
        try:
            least = round_up_to_page(own * row) + DISK_PAGE  # A piece may begin within a disk block.
            buffer = staging if len(staging) >= least else aligned(least)
            largest = min(len(buffer), max(LARGEST_READ, least))
            for reads in merge_reads(offsets, own * row, GAP, largest).batches(len(buffer)):
                at = reads.starts[:, None] + np.arange(own) * row
                copies = RowCopies(reads.first * own, at.reshape(-1), into[reads.pieces].reshape(-1), out)
                self._read(reads.requests, buffer, copies)
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
        """Wait for pending writes. Then assert that the cache agrees with the disk and the buffers."""
        self._writer.drain()
        with self._mutex:
            self._cache.check_integrity()
            self._extents.check_integrity()
            self._blocks.check_integrity()
            assert len(self._buffers) <= self.budget.block_buffers
            assert not any(block in self._extents for block in self._buffers)
            slots = self._cache.occupied
            for storage_layer, which in self.file_layout.by_layer(owners := self._cache.owners(slots)):
                kept = self._cache.rows[torch.from_numpy(slots[which])]
                stored = torch.empty_like(kept)
                ids, into = self._from_buffers(owners[which], np.arange(len(which)), stored)
                self._read_rows(self._extents.entry_positions(ids, storage_layer), into[:, None], stored)
                assert torch.equal(kept.view(torch.uint8), stored.view(torch.uint8)), (
                    f"storage layer {storage_layer}: cache and disk differ"
                )
