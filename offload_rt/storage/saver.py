"""Saving chunks to disk behind the computation, layer by layer (CachedAttention §3.2.2)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from ..core import CHUNK, BlockTable
from ..errors import DiskError
from ..kv_cache.disk.file_layout import chunk_layer_bytes
from ..kv_cache.disk.homes import Home
from ..kv_cache.pool import HostPool
from ..kv_cache.stored_rows import Span
from ..transfer.link import KVStorage
from .chunk_store import ChunkSink, ChunkWriter, NamedChunk

WRITE_BUFFER = 1 << 28
"""Bytes that may wait to be written."""


@dataclass(eq=False)
class Saving:
    """Chunks on their way: their places in the pool, and what writes them. homes: of those whose rows go where they are
    written to by themselves (`HomeSaver`); refused: those that the store did not want. buffered: how many wait in the
    write buffer."""

    blocks: BlockTable
    chunks: list[NamedChunk] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    writers: dict[int, ChunkWriter] = field(default_factory=dict)
    homes: dict[int, Home] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    buffered: int = 0
    begun: bool = False
    moved: set[int] = field(default_factory=set)
    ended: bool = False


class Saver:
    """A thread that writes what the pool holds. `begin` names chunks that are being computed, `layer_done` says that a
    layer of them is complete: the worker writes it while the next layer is computed. Nothing here waits for the disk
    but `flush` and `abort`.

    The write buffer is the pool itself: what waits to be written stays in its chunks, which the owner of the block
    table keeps until `flush`. A full chunk and the filled slots of a tail never change; where the block table exchanges
    a chunk for another one, `recheck` gives up what is waiting of it. At most `buffer_bytes` wait. Back-pressure:
    `begin` takes no more chunks than fit, from the first on; the caller hands over the others again later (every
    session does so at the end of a turn and when it is saved), and computation never waits for them.

    `begin`, `layer_done`, `flush`, `abort` and `close` belong to the thread that computes; the worker reads the pool,
    after `KVStorage.settle`, and writes the store.
    """

    def __init__(self, store: ChunkSink, pool: HostPool, rows: KVStorage, buffer_bytes: int = WRITE_BUFFER) -> None:
        self._store, self._pool, self._rows = store, pool, rows
        self._buffer_bytes = buffer_bytes
        self._waiting = 0
        self._active: list[Saving] = []
        self._failure: BaseException | None = None
        self._mutex = threading.Lock()
        self._jobs: queue.Queue[tuple[Saving, int] | None] = queue.Queue()
        self._worker = threading.Thread(target=self._work, name="offload-rt saver", daemon=True)
        self._worker.start()

    def begin(self, blocks: BlockTable, chunks: Seq[NamedChunk]) -> Saving | None:
        """Takes as many of `chunks`, from the first on, as the buffer has room for. Returns None where that is none."""
        with self._mutex:
            room = max(0, (self._buffer_bytes - self._waiting) // self._pool.chunk_bytes)
        saving = Saving(blocks)
        for i, chunk in enumerate(chunks):
            identity = self._identity(blocks, chunk)
            if not self._house(saving, i, chunk, identity):
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

    def _house(self, saving: Saving, i: int, chunk: NamedChunk, identity: int) -> bool:
        """Whether the i-th chunk, with this id in the pool, need not wait in the buffer."""
        return False

    def layer_done(self, saving: Saving, layer: int) -> None:
        """Takes note that layer `layer` of these chunks is in the pool, or will be when the link has settled. Layers
        come in order."""
        self._jobs.put((saving, layer))

    def save(self, blocks: BlockTable, chunks: Seq[NamedChunk]) -> int:
        """Saves all layers of chunks that are complete. Returns how many of them were taken."""
        saving = self.begin(blocks, chunks)
        if saving is None:
            return 0
        for layer in range(len(self._pool.groups.group)):
            self.layer_done(saving, layer)
        return len(saving.chunks)

    def _identity(self, blocks: BlockTable, chunk: NamedChunk) -> int:
        """The id of the pool's chunk that holds the rows; -1 where the block table no longer has it."""
        held = self._pool.chunks_of(blocks, chunk.group, range(chunk.index, chunk.index + 1))
        return held[0] if held else -1

    def recheck(self) -> set[bytes]:
        """Gives up chunks that a block table no longer has in the same place (publishing exchanges a chunk for an equal
        one, reserving copies a shared tail, sliding gives back what has left the windows): to be called directly after
        any of them, before anything else is written to the pool. Returns their keys, to be handed over again."""
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
        """Gives up chunks whose layers are not all done. Waits for the layer that is being written."""
        self.flush()
        self._give_up(saving)

    def flush(self) -> None:
        """Waits until everything that is done has been written. An exception of the worker is raised here."""
        self._jobs.join()
        if (failure := self._failure) is not None:
            self._failure = None
            raise failure

    def close(self) -> None:
        """Writes what is done and ends the thread."""
        self._jobs.put(None)
        self._worker.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._write(*job)
            except DiskError:  # rows that cannot be read: their chunks are computed again when they are wanted
                self._give_up(job[0])
            except BaseException as error:  # whoever waits for the worker hears of it, and waits no longer than that
                self._failure = error
                self._give_up(job[0])
            finally:
                self._jobs.task_done()
        self._jobs.task_done()

    def _write(self, saving: Saving, layer: int) -> None:
        """Writes one layer of every chunk; after the last one the chunks appear, parents first."""
        if saving.ended:
            return
        self._rows.settle(saving.blocks)
        if not saving.begun:
            saving.begun = True
            for i, chunk in enumerate(saving.chunks):
                self._begin_writer(saving, i, chunk)
        groups = self._pool.groups
        for i, writer in saving.writers.items():
            if saving.chunks[i].group == groups.group[layer]:
                writer.write(groups.place[layer], layer_block(self._pool, layer, saving.spans[i]))
        if layer == len(groups.group) - 1:
            for i, writer in saving.writers.items():
                self._appear(saving, i, writer)
            self._end(saving)

    def _begin_writer(self, saving: Saving, i: int, chunk: NamedChunk) -> ChunkWriter | None:
        """What writes the i-th chunk; None where the store refuses it, or has it."""
        size = layer_bytes(self._pool, chunk.count)
        writer = self._store.begin(chunk.parent, chunk.lineage, chunk.tokens, size)
        if writer is None:
            saving.refused.add(i)
        else:
            saving.writers[i] = writer
        return writer

    def _appear(self, saving: Saving, i: int, writer: ChunkWriter) -> None:
        """Commits the i-th chunk, of which every layer is written, unless it is no longer what its name says."""
        self._fill_up(writer, saving.chunks[i])
        with self._mutex:  # everything has been read: what moves after the question cannot matter
            moved = i in saving.moved
        writer.abort() if moved else writer.commit()

    def _fill_up(self, writer: ChunkWriter, chunk: NamedChunk) -> None:
        """Writes zeros where a chunk of the pool has room for more layers than its group has."""
        for place in range(len(self._pool.groups.layers_of(chunk.group)), self._store.layers):
            writer.write(place, memoryview(bytes(layer_bytes(self._pool, chunk.count))))

    def _give_up(self, saving: Saving) -> None:
        for writer in saving.writers.values():
            writer.abort()
        self._end(saving)

    def _end(self, saving: Saving) -> None:
        if not saving.ended:
            saving.ended = True
            saving.homes.clear()
            with self._mutex:
                self._waiting -= saving.buffered * self._pool.chunk_bytes


def layer_bytes(pool: HostPool, tokens: int) -> int:
    """Returns the bytes of one layer's block of a chunk of `tokens` tokens, as it is stored."""
    return chunk_layer_bytes(tokens, pool.layout)


def layer_block(pool: HostPool, layer: int, span: Span) -> memoryview:
    """Returns the block `[Hkv, n, 2 (K, V), width]` of one layer and span as bytes, a copy, with its zeros."""
    part, layout = pool.view(layer, span), pool.layout
    block = torch.zeros(chunk_layer_bytes(span.size, layout) // layout.itemsize, dtype=part.k.dtype)
    rows = block[: 2 * part.k.numel()].view(layout.kv_heads, span.size, 2, -1)
    rows[:, :, 0], rows[:, :, 1] = part.k, part.v
    return block.view(torch.uint8).numpy().data.cast("B")
