"""Saving of KV blocks to disk layer by layer, on a worker thread (CachedAttention §3.2.2)."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from ..core import BLOCK_SIZE, BlockTable, KVPart
from ..errors import DiskError
from ..kv_cache.disk.extents import StoredExtent
from ..kv_cache.disk.file_arena import FileArena
from ..kv_cache.disk.file_layout import block_layer_bytes
from ..kv_cache.layout import fill_planes
from ..kv_cache.pool import HostPool
from ..kv_cache.stored_rows import SlotSpan
from ..transfer.base import KVStorage
from .block_file import BlockWriter
from .disk_store import DiskStore
from .naming import NamedBlock
from .policies import recomputation_cost
from .swap_file import SwapFile

WRITE_BUFFER = 1 << 28
"""Maximum number of bytes that may be waiting to be written."""


@dataclass(eq=False)
class PendingBlock:
    """A block that is being saved.

    Attributes:
        pool_block: Id of the block in the pool when it was registered.
        cost: Recomputation cost of the block in tokens.
        extent: Location in the store if the KV pool writes the block directly to the store, or None.
        refused: Whether the store has refused the block.
        moved: Whether the block was replaced in the block table. If so, it is not committed.
    """

    block: NamedBlock
    pool_block: int
    span: SlotSpan
    cost: int
    for_prompt: bool
    writer: BlockWriter | None = None
    extent: StoredExtent | None = None
    refused: bool = False
    moved: bool = False

    def give_up(self) -> None:
        if self.writer is not None:
            self.writer.abort()
        self.writer = self.extent = None


@dataclass(eq=False)
class SaveHandle:
    """Blocks of one block table that are being saved.

    Attributes:
        pending: The blocks, in the order of the sequence.
        buffered: Number of blocks that are waiting in the write buffer.
        ended: Whether every block has been either committed or given up.
    """

    blocks: BlockTable
    pending: list[PendingBlock] = field(default_factory=list)
    buffered: int = 0
    ended: bool = False


Job = tuple[SaveHandle, int] | Callable[[], None] | None
"""A finished layer of a handle, a callback, or the end of the worker thread."""


class Saver:
    """Writes KV blocks from the pool to a store on a worker thread.

    `begin` registers blocks whose KV is about to be computed. After `layer_done`, the worker writes the finished layer
    of these blocks while the next layer is computed. Only `flush`, `wait_for`, `abort` and `close` wait for the disk.

    The owner must keep the blocks in the pool until it has called `flush` or `wait_for`. If blocks are replaced, it
    must call `cancel_replaced`. `begin` accepts blocks until `WRITE_BUFFER` bytes are pending, but always accepts at
    least one block if nothing is pending. The caller must pass the other blocks again later.

    If the pool is on disk, blocks are saved after their last layer. If, in addition, the store has a separate file per
    block, the pool writes full blocks directly to their files and also reads them from there (*stored extent*, see
    `kv_cache.disk.extents`):

    * A block whose KV has not been computed yet gets a stored extent in `begin`.
    * A complete block that is still in memory is written to a stored extent after its last layer.
    * All other blocks are copied: partial blocks, blocks in the pool's own file, blocks beyond the limit on open files,
    and blocks that have left their stored extent.

    If a write fails, the block is not committed: its file gets no name, but the pool can still use the stored extent.
    All methods except `notify` must be called on the compute thread.
    """

    def __init__(self, store: DiskStore | SwapFile, pool: HostPool, rows: KVStorage) -> None:
        self._store, self._pool, self._rows, self._file = store, pool, rows, pool.file
        self._last = len(pool.groups.group) - 1
        self._waiting = 0
        self._active: list[SaveHandle] = []
        self._failure: BaseException | None = None
        self._mutex = threading.Lock()
        self._jobs: queue.Queue[Job] = queue.Queue()
        self._worker = threading.Thread(target=self._work, name="offload-rt saver", daemon=True)
        self._worker.start()
        # Also called at exit, because a daemon thread that was in a call of C++ code would then abort the process.
        self.close = weakref.finalize(self, _end, self._jobs, self._worker)

    def begin(self, blocks: BlockTable, named: Seq[NamedBlock], *, for_prompt: bool = False) -> SaveHandle | None:
        """Start saving the first blocks of `named`, as many as fit in the write buffer.

        Return a handle for `layer_done`, or None if no block fits. For `for_prompt`, see `DiskStore.begin`.
        """
        with self._mutex:
            # An empty buffer accepts one block even if it exceeds the limit, as with OPT-66B in float32.
            most = max((WRITE_BUFFER - self._waiting) // self._pool.block_bytes, 0 if self._waiting else 1)
        saving = SaveHandle(blocks)
        for block in named:
            tokens = range(block.index * BLOCK_SIZE, block.index * BLOCK_SIZE + block.count)
            [span] = self._pool.spans(blocks, block.group, tokens)
            # If a block table contains only sliding-window blocks, its capacity is 0.
            cost = recomputation_cost(max(blocks.capacity, tokens.stop), tokens.start)
            pending = PendingBlock(block, self._pool_block_id(blocks, block), span, cost, for_prompt)
            if not self._attach_extent(saving, pending):
                if saving.buffered == most:
                    break
                saving.buffered += 1
            saving.pending.append(pending)
        if not saving.pending:
            return None
        with self._mutex:
            self._waiting += saving.buffered * self._pool.block_bytes
        self._active.append(saving)
        return saving

    def layer_done(self, saving: SaveHandle, layer: int) -> None:
        """Report that the KV of `layer` is complete. Call this in the order of the layers.

        If the transfer of the KV to the pool is still pending, the worker waits for it.
        """
        if self._file is not None:
            if layer < self._last:
                return
            for pending in saving.pending:
                self._move_to_store(self._file, pending)
        self._jobs.put((saving, layer))

    def _attach_extent(self, saving: SaveHandle, pending: PendingBlock) -> bool:
        file, block = self._file, pending.block
        if (
            file is None
            or block.count < BLOCK_SIZE
            or pending.pool_block < 0
            or block.index * BLOCK_SIZE < saving.blocks.length
        ):
            return False
        if file.is_empty(pending.pool_block) and (extent := self._begin_extent(pending)) is not None:
            if file.attach(pending.pool_block, extent):
                return True
            pending.give_up()
        return False

    def _move_to_store(self, file: FileArena, pending: PendingBlock) -> None:
        if pending.extent is not None or pending.block.count < BLOCK_SIZE or not file.is_buffered(pending.pool_block):
            return
        layers = self._pool.groups.used_storage_layers(pending.block.group)
        if (extent := self._begin_extent(pending)) is not None and not file.move_to(pending.pool_block, extent, layers):
            pending.give_up()

    def _begin_extent(self, pending: PendingBlock) -> StoredExtent | None:
        if (writer := self._begin_writer(pending)) is not None:
            pending.extent = writer.extent()
        if pending.extent is None:
            pending.give_up()
        return pending.extent

    def save(self, blocks: BlockTable, named: Seq[NamedBlock], *, for_prompt: bool = False) -> int:
        """Save all layers of complete blocks. Return how many of `named` were accepted."""
        saving = self.begin(blocks, named, for_prompt=for_prompt)
        if saving is None:
            return 0
        for layer in range(len(self._pool.groups.group)):
            self.layer_done(saving, layer)
        return len(saving.pending)

    def _pool_block_id(self, blocks: BlockTable, block: NamedBlock) -> int:
        found = self._pool.blocks_of(blocks, block.group, range(block.index, block.index + 1))
        return found[0] if found else -1

    def cancel_replaced(self) -> set[bytes]:
        """Stop saving blocks that were replaced in or released from their block table. Return their keys.

        Call this before the next write to the pool if a block was replaced with an equal block of the prefix tree, if a
        shared partial block was copied, or if a block has left the sliding window.
        """
        cancelled = set()
        with self._mutex:
            self._active = [saving for saving in self._active if not saving.ended]
            for saving in self._active:
                for pending in saving.pending:
                    if self._pool_block_id(saving.blocks, pending.block) != pending.pool_block:
                        pending.moved = True
                        cancelled.add(pending.block.key)
        return cancelled

    def abort(self, saving: SaveHandle) -> None:
        """Wait for pending writes, and stop saving blocks that are not complete.

        The pool drops the stored extents of incomplete blocks.
        """
        self.flush()
        unfinished = [
            pending.pool_block
            for pending in saving.pending
            if pending.extent is not None
            and (pending.block.index + 1) * BLOCK_SIZE > saving.blocks.length
            and self._pool_block_id(saving.blocks, pending.block) == pending.pool_block
        ]
        self._give_up(saving)
        if self._file is not None:
            self._file.discard(unfinished)

    def flush(self) -> None:
        """Wait until all complete layers are written. If the worker thread has raised an exception, re-raise it."""
        self._jobs.join()
        if (failure := self._failure) is not None:
            self._failure = None
            raise failure

    def wait_for(self, blocks: BlockTable) -> None:
        """Wait until no pending write reads from `blocks`, so that they may be freed. Raises like `flush`."""
        if any(saving.blocks is blocks and not saving.ended for saving in self._active):
            self.flush()

    def notify(self, written: Callable[[], None]) -> None:
        """Call `written` on the worker thread after all pending writes. If it raises, `flush` re-raises the error."""
        self._jobs.put(written)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, tuple):
                self._try_to_write(*job)
            else:
                self._call(job)
            self._jobs.task_done()
        self._jobs.task_done()

    def _call(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # `flush` re-raises this error, and the worker thread continues.
            self._failure = error

    def _try_to_write(self, saving: SaveHandle, layer: int) -> None:
        try:
            self._write(saving, layer)
        except DiskError:  # KV that cannot be read is recomputed when it is needed.
            self._give_up(saving)
        except BaseException as error:  # `flush` re-raises this error.
            self._failure = error
            self._give_up(saving)

    def _write(self, saving: SaveHandle, layer: int) -> None:
        if saving.ended:
            return
        self._rows.settle(saving.blocks)
        for pending in saving.pending:
            if self._file is not None:
                self._write_stored(self._file, pending)
            elif (writer := self._begin_writer(pending)) is not None:
                self._write_layers(writer, pending, [layer])
                if layer == self._last:
                    self._commit(writer, pending)
        if layer == self._last:
            self._finish(saving)

    def _write_stored(self, file: FileArena, pending: PendingBlock) -> None:
        try:
            if pending.extent is not None and file.extent(pending.pool_block) is not pending.extent:
                pending.give_up()
            if (writer := self._begin_writer(pending)) is not None:
                if pending.extent is None:
                    self._write_layers(writer, pending, range(self._last + 1))
                self._commit(writer, pending)
        except DiskError:  # KV that cannot be read or was not written is recomputed when it is needed.
            pending.give_up()

    def _write_layers(self, writer: BlockWriter, pending: PendingBlock, layers: Iterable[int]) -> None:
        groups = self._pool.groups
        for layer in layers:
            if layer in groups.kv_layers and groups.group[layer] == pending.block.group:
                for storage_layer, part in self._pool.view_storage_layers(layer, pending.span):
                    writer.write(storage_layer, layer_data(self._pool, part))

    def _begin_writer(self, pending: PendingBlock) -> BlockWriter | None:
        if pending.writer is None and not pending.refused:
            size = layer_bytes(self._pool, pending.block.count)
            pending.writer = self._store.begin(pending.block, size, pending.cost, for_prompt=pending.for_prompt)
            pending.refused = pending.writer is None
        return pending.writer

    def _commit(self, writer: BlockWriter, pending: PendingBlock) -> None:
        # If a stored block has more storage layers than its layer group uses, fill the unused layers with zeros.
        for storage_layer in range(self._pool.groups.used_storage_layers(pending.block.group), self._store.layers):
            writer.write(storage_layer, memoryview(bytes(layer_bytes(self._pool, pending.block.count))))
        with self._mutex:  # All KV has been read, so later changes to the block do no harm.
            moved = pending.moved
        writer.abort() if moved else writer.commit()

    def _give_up(self, saving: SaveHandle) -> None:
        for pending in saving.pending:
            pending.give_up()
        self._finish(saving)

    def _finish(self, saving: SaveHandle) -> None:
        if not saving.ended:
            saving.ended = True
            for pending in saving.pending:
                pending.extent = None  # This closes the file if it is no longer in use.
            with self._mutex:
                self._waiting -= saving.buffered * self._pool.block_bytes


def layer_bytes(pool: HostPool, tokens: int) -> int:
    return block_layer_bytes(tokens, pool.layout)


def layer_data(pool: HostPool, part: KVPart) -> memoryview:
    """Return the KV of one storage layer, `[Hkv, n, planes, width]`, as zero-padded bytes."""
    layout, size = pool.layout, part.k.shape[1]
    block = torch.zeros(block_layer_bytes(size, layout) // layout.itemsize, dtype=part.k.dtype)
    rows = block[: layout.planes * part.k.numel()].view(layout.kv_heads, size, layout.planes, -1)
    fill_planes(rows, 2, part.k, part.v)
    return block.view(torch.uint8).numpy().data.cast("B")


def _end(jobs: queue.Queue[Job], worker: threading.Thread) -> None:
    """End the worker thread after its pending writes."""
    if worker.is_alive():  # A forked process has no worker thread, and the queue may be locked.
        jobs.put(None)
        worker.join()
