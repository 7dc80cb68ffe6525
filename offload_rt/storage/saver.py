"""Asynchronous, layer-wise saving of KV blocks to disk (CachedAttention §3.2.2)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from ..core import BLOCK_SIZE, BlockTable
from ..errors import DiskError
from ..kv_cache.disk.extents import StoredExtent
from ..kv_cache.disk.file_arena import FileArena
from ..kv_cache.disk.file_layout import block_layer_bytes
from ..kv_cache.pool import HostPool
from ..kv_cache.stored_rows import SlotSpan
from ..transfer.base import KVStorage
from .block_store import BlockSink, BlockWriter, NamedBlock
from .disk_store import DiskBlockWriter
from .policies import recomputation_cost

WRITE_BUFFER = 1 << 28
"""Maximum bytes waiting to be written."""


@dataclass(eq=False)
class Entry:
    """A block that is being saved.

    Attributes:
        block: The block with its key.
        identity: Pool id of the block.
        span: Position of the block in the pool.
        cost: Tokens to compute again without the block.
        claim: Whether a prompt without a session uses the block.
        writer: Open writer of the store, or None.
        extent: File of the store, if the KV pool writes the block directly to it.
        refused: Whether the store did not accept the block.
        moved: Whether the block table has since replaced the block. If so, it is not committed.
    """

    block: NamedBlock
    identity: int
    span: SlotSpan
    cost: int
    claim: bool
    writer: BlockWriter | None = None
    extent: StoredExtent | None = None
    refused: bool = False
    moved: bool = False

    def give_up(self) -> None:
        """Discard the data written to the store so far."""
        if self.writer is not None:
            self.writer.abort()
        self.writer = self.extent = None


@dataclass(eq=False)
class Saving:
    """Blocks that are being saved.

    Attributes:
        blocks: Block table that holds the KV.
        entries: The blocks, parents first.
        buffered: Number of blocks that wait in the write buffer.
        ended: Whether all blocks are committed or given up.
    """

    blocks: BlockTable
    entries: list[Entry] = field(default_factory=list)
    buffered: int = 0
    ended: bool = False


class Saver:
    """Write KV blocks from the pool to a store on a worker thread.

    `begin` registers blocks that are being computed, and `layer_done` marks one of their layers as complete. The worker
    writes that layer while the next one is computed. Only `flush`, `wait_for`, `abort` and `close` wait for the disk.

    The pool itself is the write buffer: waiting KV stays in its blocks, and the owner of the block table must keep them
    until `flush` or `wait_for`. The written slots of a block never change. If the block table replaces a block,
    `recheck` gives up its pending writes.

    At most `buffer_bytes` wait to be written. `begin` accepts only as many blocks as fit, so the computation never
    waits for the buffer. The caller submits the other blocks again later: sessions do so at the end of a turn and when
    they are saved.

    For a pool on disk, blocks are saved after their last layer. If the store keeps each block in a separate file, the
    pool writes full blocks directly to that file, and later reads them from it (`kv_cache.disk.extents`):

    * A full block without computed KV gets its stored extent in `begin`.
    * A block that is complete and still in memory is written to a stored extent after its last layer.
    * All other blocks are read from the pool and written to the store: partial blocks, blocks that are already in the
      pool's own file, blocks beyond the limit of open files, and blocks that have left their stored extent.

    A block is not committed if any of its writes failed. Its unnamed file remains the extent of the pool block, unless
    the KV was never complete (`abort`). The compute thread creates these files, because it waits for the disk anyway.

    Call all methods except `notify` on the compute thread. The worker reads the pool, after
    `KVStorage.settle`, and writes to the store.
    """

    def __init__(self, store: BlockSink, pool: HostPool, rows: KVStorage, buffer_bytes: int = WRITE_BUFFER) -> None:
        self._store, self._pool, self._rows, self._file = store, pool, rows, pool.file
        self._last = len(pool.groups.group) - 1
        self._buffer_bytes = buffer_bytes
        self._waiting = 0
        self._active: list[Saving] = []
        self._failure: BaseException | None = None
        self._mutex = threading.Lock()
        self._jobs: queue.Queue[tuple[Saving, int] | Callable[[], None] | None] = queue.Queue()
        self._worker = threading.Thread(target=self._work, name="offload-rt saver", daemon=True)
        self._worker.start()

    def begin(self, blocks: BlockTable, named: Seq[NamedBlock], *, claim: bool = False) -> Saving | None:
        """Start saving the first of `named`, as many as fit in the buffer. Return None if none fits.

        If `claim` is set, the store records that a prompt without a session uses them.
        """
        with self._mutex:
            room = max(0, (self._buffer_bytes - self._waiting) // self._pool.block_bytes)
        saving = Saving(blocks)
        for block in named:
            tokens = range(block.index * BLOCK_SIZE, block.index * BLOCK_SIZE + block.count)
            [span] = self._pool.spans(blocks, block.group, tokens)
            # The capacity of a block table that holds only window blocks is 0.
            cost = recomputation_cost(max(blocks.capacity, tokens.stop), tokens.start)
            entry = Entry(block, self._identity(blocks, block), span, cost, claim)
            if not self._attach(saving, entry):
                if saving.buffered == room:
                    break
                saving.buffered += 1
            saving.entries.append(entry)
        if not saving.entries:
            return None
        with self._mutex:
            self._waiting += saving.buffered * self._pool.block_bytes
        self._active.append(saving)
        return saving

    def layer_done(self, saving: Saving, layer: int) -> None:
        """Mark `layer` of the blocks as complete. Call in the order of the layers.

        Its KV may still be in transfer to the pool: the worker waits for pending transfers before it reads.
        """
        if self._file is not None:
            if layer < self._last:
                return
            for entry in saving.entries:
                self._move(self._file, entry)
        self._jobs.put((saving, layer))

    def _attach(self, saving: Saving, entry: Entry) -> bool:
        """Let the pool write the KV of a block directly to a new store file.

        Only blocks of 64 tokens whose KV is not computed yet qualify. Returns whether the block has such an extent now.
        """
        file, block = self._file, entry.block
        if (
            file is None
            or block.count < BLOCK_SIZE
            or entry.identity < 0
            or block.index * BLOCK_SIZE < saving.blocks.length
        ):
            return False
        if file.blank(entry.identity) and (extent := self._begin_extent(entry)) is not None:
            if file.attach(entry.identity, extent):
                return True
            entry.give_up()
        return False

    def _move(self, file: FileArena, entry: Entry) -> None:
        """Write a complete block to a stored extent if its KV is in memory."""
        if entry.extent is not None or entry.block.count < BLOCK_SIZE or not file.buffered(entry.identity):
            return
        layers = len(self._pool.groups.layers_of(entry.block.group))
        if (extent := self._begin_extent(entry)) is not None and not file.move_to(entry.identity, extent, layers):
            entry.give_up()

    def _begin_extent(self, entry: Entry) -> StoredExtent | None:
        """Create a file of the store that can be the extent of a block. Return None if that is not possible."""
        writer = self._begin_writer(entry)
        if isinstance(writer, DiskBlockWriter):
            entry.extent = writer.extent()
        if entry.extent is None:
            entry.give_up()
        return entry.extent

    def save(self, blocks: BlockTable, named: Seq[NamedBlock], *, claim: bool = False) -> int:
        """Save all layers of complete blocks. Return the number of accepted blocks. `claim`: As in `begin`."""
        saving = self.begin(blocks, named, claim=claim)
        if saving is None:
            return 0
        for layer in range(len(self._pool.groups.group)):
            self.layer_done(saving, layer)
        return len(saving.entries)

    def _identity(self, blocks: BlockTable, block: NamedBlock) -> int:
        """Return the id of the pool block that holds the KV, or -1 if the block table no longer holds it."""
        held = self._pool.blocks_of(blocks, block.group, range(block.index, block.index + 1))
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
                for entry in saving.entries:
                    if self._identity(saving.blocks, entry.block) != entry.identity:
                        entry.moved = True
                        given_up.add(entry.block.key)
        return given_up

    def abort(self, saving: Saving) -> None:
        """Give up blocks with incomplete layers, and discard their KV in extents. Wait for pending writes first."""
        self.flush()
        unfinished = [
            entry.identity
            for entry in saving.entries
            if entry.extent is not None
            and (entry.block.index + 1) * BLOCK_SIZE > saving.blocks.length
            and self._identity(saving.blocks, entry.block) == entry.identity
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

    def wait_for(self, blocks: BlockTable) -> None:
        """Wait until no pending write reads `blocks`, whose KV may then be freed. Raise as `flush` does."""
        if any(saving.blocks is blocks and not saving.ended for saving in self._active):
            self.flush()

    def notify(self, written: Callable[[], None]) -> None:
        """Call `written` on the worker thread when all completed layers are written. It must not raise."""
        self._jobs.put(written)

    def close(self) -> None:
        """Write all completed layers and stop the worker thread."""
        self._jobs.put(None)
        self._worker.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, tuple):
                self._try_to_write(*job)
            else:
                job()
            self._jobs.task_done()
        self._jobs.task_done()

    def _try_to_write(self, saving: Saving, layer: int) -> None:
        try:
            self._write(saving, layer)
        except DiskError:  # unreadable KV is recomputed when it is needed
            self._give_up(saving)
        except BaseException as error:  # `flush` re-raises it
            self._failure = error
            self._give_up(saving)

    def _write(self, saving: Saving, layer: int) -> None:
        """Write one layer of every block, or all layers for a pool on disk. Then commit the blocks, parents first."""
        if saving.ended:
            return
        self._rows.settle(saving.blocks)
        for entry in saving.entries:
            if self._file is not None:
                self._write_stored(self._file, entry)
            elif (writer := self._begin_writer(entry)) is not None:
                self._write_layers(writer, entry, [layer])
                if layer == self._last:
                    self._appear(writer, entry)
        if layer == self._last:
            self._end(saving)

    def _write_stored(self, file: FileArena, entry: Entry) -> None:
        """Commit a block of a pool on disk. First copy its KV if it is not in the store's file."""
        try:
            if entry.extent is not None and file.extent(entry.identity) is not entry.extent:
                entry.give_up()
            if (writer := self._begin_writer(entry)) is not None:
                if entry.extent is None:
                    self._write_layers(writer, entry, range(self._last + 1))
                self._appear(writer, entry)
        except DiskError:  # KV that cannot be read or was not written is recomputed
            entry.give_up()

    def _write_layers(self, writer: BlockWriter, entry: Entry, layers: Iterable[int]) -> None:
        """Write the `layers` that belong to the group of a block."""
        groups = self._pool.groups
        for layer in layers:
            if groups.group[layer] == entry.block.group:
                writer.write(groups.place[layer], layer_block(self._pool, layer, entry.span))

    def _begin_writer(self, entry: Entry) -> BlockWriter | None:
        """Return the writer of a block, opened if needed, or None if the store has the block or does not accept it."""
        if entry.writer is None and not entry.refused:
            block, size = entry.block, layer_bytes(self._pool, entry.block.count)
            entry.writer = self._store.begin(
                block.parent, block.provenance_key, block.tokens, size, entry.cost, claim=entry.claim
            )
            entry.refused = entry.writer is None
        return entry.writer

    def _appear(self, writer: BlockWriter, entry: Entry) -> None:
        """Commit a block after all its layers are written. Abort it if the block table has replaced it."""
        # Write zeros for the layers that a stored block has in addition to the layers of its group.
        for place in range(len(self._pool.groups.layers_of(entry.block.group)), self._store.layers):
            writer.write(place, memoryview(bytes(layer_bytes(self._pool, entry.block.count))))
        with self._mutex:  # all KV has been read, so later changes are harmless
            moved = entry.moved
        writer.abort() if moved else writer.commit()

    def _give_up(self, saving: Saving) -> None:
        for entry in saving.entries:
            entry.give_up()
        self._end(saving)

    def _end(self, saving: Saving) -> None:
        if not saving.ended:
            saving.ended = True
            for entry in saving.entries:
                entry.extent = None  # closes files that are no longer in use
            with self._mutex:
                self._waiting -= saving.buffered * self._pool.block_bytes


def layer_bytes(pool: HostPool, tokens: int) -> int:
    """Return the stored bytes per layer of a block of `tokens` tokens."""
    return block_layer_bytes(tokens, pool.layout)


def layer_block(pool: HostPool, layer: int, span: SlotSpan) -> memoryview:
    """Return a copy of the KV `[Hkv, n, 2 (K, V), width]` of one layer and span as bytes, including zero padding."""
    part, layout = pool.view(layer, span), pool.layout
    block = torch.zeros(block_layer_bytes(span.size, layout) // layout.itemsize, dtype=part.k.dtype)
    rows = block[: 2 * part.k.numel()].view(layout.kv_heads, span.size, 2, -1)
    rows[:, :, 0], rows[:, :, 1] = part.k, part.v
    return block.view(torch.uint8).numpy().data.cast("B")
