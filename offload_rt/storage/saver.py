"""Asynchronous, layer-wise saving of KV blocks to disk (CachedAttention §3.2.2)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from ..core import CHUNK, BlockTable
from ..errors import DiskError
from ..kv_cache.disk.extents import StoredExtent
from ..kv_cache.disk.file_arena import FileArena
from ..kv_cache.disk.file_layout import chunk_layer_bytes
from ..kv_cache.pool import HostPool
from ..kv_cache.stored_rows import Span
from ..transfer.link import KVStorage
from .chunk_store import ChunkSink, ChunkWriter, NamedChunk
from .disk_store import DiskChunkWriter

WRITE_BUFFER = 1 << 28
"""Maximum bytes waiting to be written."""


@dataclass(eq=False)
class Saving:
    """Blocks that are being saved. Dictionaries and sets are keyed by the position in `chunks`.

    Attributes:
        blocks: Block table that holds the KV.
        chunks: The blocks, parents first.
        ids: Pool id of each block.
        spans: Position of each block in the pool.
        writers: Store writers of the blocks.
        extents: Files to which the KV pool writes blocks directly.
        refused: Blocks that the store did not accept.
        buffered: Number of blocks that wait in the write buffer.
        begun: Whether the writers have been opened.
        moved: Blocks that the block table has replaced since. They are not committed.
        ended: Whether all blocks are committed or given up.
    """

    blocks: BlockTable
    chunks: list[NamedChunk] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    writers: dict[int, ChunkWriter] = field(default_factory=dict)
    extents: dict[int, StoredExtent] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    buffered: int = 0
    begun: bool = False
    moved: set[int] = field(default_factory=set)
    ended: bool = False


class Saver:
    """Write KV blocks from the pool to a store on a worker thread.

    `begin` registers blocks that are being computed, and `layer_done` marks one of their layers as complete. The worker
    writes that layer while the next one is computed. Only `flush`, `abort` and `close` wait for the disk.

    The pool itself is the write buffer: waiting KV stays in its blocks, and the owner of the block table must keep them
    until `flush`. The written slots of a block never change. If the block table replaces a block, `recheck` gives up
    its pending writes.

    At most `buffer_bytes` wait. `begin` accepts only as many blocks as fit, and the computation never waits for the
    rest. The caller submits the rest again later; sessions do so at the end of a turn and when they are saved.

    For a pool on disk, blocks are saved after their last layer. If the store keeps each block in a file of its own, the
    pool writes full blocks there directly, and goes on reading them there (`kv_cache.disk.extents`):

    * A full block of which nothing is computed yet gets its stored extent in `begin`.
    * A block that is complete and still in memory is written to one after its last layer.
    * All other blocks are read from the pool and written to the store: partial blocks, blocks that are already in the
      pool's own file, blocks beyond the limit of open files, and blocks that have left their stored extent.

    A block is not committed if any of its writes failed. Its unnamed file remains the extent of the pool block, unless
    the KV was never complete (`abort`). Files are created on the compute thread, which waits for the disk in any case.

    Call `begin`, `layer_done`, `flush`, `abort` and `close` on the compute thread. The worker reads the pool, after
    `KVStorage.settle`, and writes to the store.
    """

    def __init__(self, store: ChunkSink, pool: HostPool, rows: KVStorage, buffer_bytes: int = WRITE_BUFFER) -> None:
        self._store, self._pool, self._rows, self._file = store, pool, rows, pool.file
        self._last = len(pool.groups.group) - 1
        self._buffer_bytes = buffer_bytes
        self._waiting = 0
        self._active: list[Saving] = []
        self._failure: BaseException | None = None
        self._mutex = threading.Lock()
        self._jobs: queue.Queue[tuple[Saving, int] | None] = queue.Queue()
        self._worker = threading.Thread(target=self._work, name="offload-rt saver", daemon=True)
        self._worker.start()

    def begin(self, blocks: BlockTable, chunks: Seq[NamedChunk]) -> Saving | None:
        """Start saving the first of `chunks`, as many as fit in the buffer. Return None if none fits."""
        with self._mutex:
            room = max(0, (self._buffer_bytes - self._waiting) // self._pool.chunk_bytes)
        saving = Saving(blocks)
        for i, chunk in enumerate(chunks):
            identity = self._identity(blocks, chunk)
            if not self._attach(saving, i, chunk, identity):
                if saving.buffered == room:
                    break
                saving.buffered += 1
            tokens = range(chunk.index * CHUNK, chunk.index * CHUNK + chunk.count)
            saving.chunks.append(chunk)
            saving.ids.append(identity)
            saving.spans += self._pool.spans(blocks, chunk.group, tokens)
        if not saving.chunks:
            return None
        with self._mutex:
            self._waiting += saving.buffered * self._pool.chunk_bytes
        self._active.append(saving)
        return saving

    def layer_done(self, saving: Saving, layer: int) -> None:
        """Mark `layer` of the blocks as complete, or as complete once pending transfers end. Layers come in order."""
        if self._file is not None and layer < self._last:
            return
        for i, chunk in enumerate(saving.chunks if self._file is not None else ()):
            self._move(saving, i, chunk)
        self._jobs.put((saving, layer))

    def _attach(self, saving: Saving, i: int, chunk: NamedChunk, identity: int) -> bool:
        """Give the i-th block, with pool id `identity`, a stored extent if it is full and has no KV yet."""
        if self._file is None or chunk.count < CHUNK or identity < 0 or chunk.index * CHUNK < saving.blocks.length:
            return False
        if not self._file.blank(identity) or not self._begin_extent(saving, i, chunk):
            return False
        return self._file.attach(identity, saving.extents[i]) or self._no_extent(saving, i)

    def _move(self, saving: Saving, i: int, chunk: NamedChunk) -> None:
        """Write the i-th block, which is complete, to a stored extent if its KV is in memory."""
        if self._file is None or i in saving.extents or chunk.count < CHUNK:
            return
        if self._file.buffered(saving.ids[i]) and self._begin_extent(saving, i, chunk):
            layers = len(self._pool.groups.layers_of(chunk.group))
            if not self._file.move_to(saving.ids[i], saving.extents[i], layers):
                self._no_extent(saving, i)

    def _begin_extent(self, saving: Saving, i: int, chunk: NamedChunk) -> bool:
        """Create a file of the store for the i-th block. Return whether it can be a stored extent."""
        if i in saving.refused or (writer := self._begin_writer(saving, i, chunk)) is None:
            return False
        extent = writer.extent() if isinstance(writer, DiskChunkWriter) else None
        if extent is None:
            return self._no_extent(saving, i)
        saving.extents[i] = extent
        return True

    def _no_extent(self, saving: Saving, i: int) -> bool:
        saving.extents.pop(i, None)
        saving.writers.pop(i).abort()
        return False

    def save(self, blocks: BlockTable, chunks: Seq[NamedChunk]) -> int:
        """Save all layers of complete blocks. Return the number of accepted blocks."""
        saving = self.begin(blocks, chunks)
        if saving is None:
            return 0
        for layer in range(len(self._pool.groups.group)):
            self.layer_done(saving, layer)
        return len(saving.chunks)

    def _identity(self, blocks: BlockTable, chunk: NamedChunk) -> int:
        """Return the id of the pool block that holds the KV, or -1 if the block table no longer holds it."""
        held = self._pool.chunks_of(blocks, chunk.group, range(chunk.index, chunk.index + 1))
        return held[0] if held else -1

    def recheck(self) -> set[bytes]:
        """Give up blocks that their block table has replaced or released, and return their keys for resubmission.

        Blocks change when publishing exchanges a block for an equal one, when reserving copies a shared partial block,
        and when blocks leave the sliding window. Call this directly afterwards, before the next write to the pool.
        """
        given_up = set()
        with self._mutex:
            self._active = [saving for saving in self._active if not saving.ended]
            for saving in self._active:
                for i, (chunk, identity) in enumerate(zip(saving.chunks, saving.ids, strict=True)):
                    if self._identity(saving.blocks, chunk) != identity:
                        saving.moved.add(i)
                        given_up.add(chunk.key)
        return given_up

    def abort(self, saving: Saving) -> None:
        """Give up blocks with incomplete layers, and discard their KV in extents. Wait for pending writes first."""
        self.flush()
        unfinished = [
            saving.ids[i]
            for i in saving.extents
            if (saving.chunks[i].index + 1) * CHUNK > saving.blocks.length
            and self._identity(saving.blocks, saving.chunks[i]) == saving.ids[i]
        ]
        self._give_up(saving)
        if self._file is not None:
            self._file.discard(unfinished)

    def flush(self) -> None:
        """Wait until all completed layers are written. Re-raise an exception of the worker thread."""
        self._jobs.join()
        if (failure := self._failure) is not None:
            self._failure = None
            raise failure

    def close(self) -> None:
        """Write all completed layers and stop the worker thread."""
        self._jobs.put(None)
        self._worker.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._write(*job)
            except DiskError:  # unreadable KV is recomputed when it is needed
                self._give_up(job[0])
            except BaseException as error:  # `flush` re-raises it
                self._failure = error
                self._give_up(job[0])
            finally:
                self._jobs.task_done()
        self._jobs.task_done()

    def _write(self, saving: Saving, layer: int) -> None:
        """Write one layer of every block, or all layers for a pool on disk. Then commit the blocks, parents first."""
        if saving.ended:
            return
        self._rows.settle(saving.blocks)
        if self._file is not None:
            for i, chunk in enumerate(saving.chunks):
                self._write_stored(self._file, saving, i, chunk)
            self._end(saving)
            return
        if not saving.begun:
            saving.begun = True
            for i, chunk in enumerate(saving.chunks):
                self._begin_writer(saving, i, chunk)
        for i, writer in saving.writers.items():
            if saving.chunks[i].group == self._pool.groups.group[layer]:
                self._write_layer(writer, layer, saving.spans[i])
        if layer == self._last:
            for i, writer in saving.writers.items():
                self._appear(saving, i, writer)
            self._end(saving)

    def _write_stored(self, file: FileArena, saving: Saving, i: int, chunk: NamedChunk) -> None:
        """Commit the i-th block of a pool on disk, after copying its KV if it is not in the store's file."""
        writer = saving.writers.get(i)
        try:
            if i in saving.extents and file.extent(saving.ids[i]) is not saving.extents[i]:
                saving.writers.pop(i).abort()
                writer = None
            if writer is None:
                writer = None if i in saving.refused else self._begin_writer(saving, i, chunk)
                if writer is None:
                    return
                for layer in self._pool.groups.layers_of(chunk.group):
                    self._write_layer(writer, layer, saving.spans[i])
            self._appear(saving, i, writer)
        except DiskError:  # KV that cannot be read or was not written is recomputed
            if writer is not None:
                writer.abort()

    def _write_layer(self, writer: ChunkWriter, layer: int, span: Span) -> None:
        writer.write(self._pool.groups.place[layer], layer_block(self._pool, layer, span))

    def _begin_writer(self, saving: Saving, i: int, chunk: NamedChunk) -> ChunkWriter | None:
        """Open the writer of the i-th block. Return None if the store already has the block or does not accept it."""
        size = layer_bytes(self._pool, chunk.count)
        writer = self._store.begin(chunk.parent, chunk.lineage, chunk.tokens, size)
        if writer is None:
            saving.refused.add(i)
        else:
            saving.writers[i] = writer
        return writer

    def _appear(self, saving: Saving, i: int, writer: ChunkWriter) -> None:
        """Commit the i-th block after all its layers are written. Abort it if the block table has replaced it."""
        self._fill_up(writer, saving.chunks[i])
        with self._mutex:  # all KV has been read, so later changes are harmless
            moved = i in saving.moved
        writer.abort() if moved else writer.commit()

    def _fill_up(self, writer: ChunkWriter, chunk: NamedChunk) -> None:
        """Write zeros for the layers that a stored block has in addition to those of its group."""
        for place in range(len(self._pool.groups.layers_of(chunk.group)), self._store.layers):
            writer.write(place, memoryview(bytes(layer_bytes(self._pool, chunk.count))))

    def _give_up(self, saving: Saving) -> None:
        for writer in saving.writers.values():
            writer.abort()
        self._end(saving)

    def _end(self, saving: Saving) -> None:
        if not saving.ended:
            saving.ended = True
            saving.extents.clear()
            with self._mutex:
                self._waiting -= saving.buffered * self._pool.chunk_bytes


def layer_bytes(pool: HostPool, tokens: int) -> int:
    """Return the stored bytes per layer of a block of `tokens` tokens."""
    return chunk_layer_bytes(tokens, pool.layout)


def layer_block(pool: HostPool, layer: int, span: Span) -> memoryview:
    """Return a copy of the KV `[Hkv, n, 2 (K, V), width]` of one layer and span as bytes, including zero padding."""
    part, layout = pool.view(layer, span), pool.layout
    block = torch.zeros(chunk_layer_bytes(span.size, layout) // layout.itemsize, dtype=part.k.dtype)
    rows = block[: 2 * part.k.numel()].view(layout.kv_heads, span.size, 2, -1)
    rows[:, :, 0], rows[:, :, 1] = part.k, part.v
    return block.view(torch.uint8).numpy().data.cast("B")
