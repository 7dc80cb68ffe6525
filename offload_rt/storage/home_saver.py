"""Saving chunks of a pool on disk: their rows are written once, to the store's files, and stay there."""

from __future__ import annotations

from ..core import CHUNK
from ..errors import DiskError
from ..kv_cache.disk.file_arena import FileArena
from ..kv_cache.pool import HostPool
from ..transfer.link import KVStorage
from .chunk_store import ChunkStore, NamedChunk
from .saver import WRITE_BUFFER, Saver, Saving, layer_block


class HomeSaver(Saver):
    """`Saver` for a pool on disk. A full chunk gets a home (`pool.homes`) when it is named: the file that its writer
    has begun, to which its layers then go as they are computed. One whose rows are all in memory when it is whole goes
    home then. Nothing of these is read: the worker waits until what is on its way has arrived, and commits. Other
    chunks (tails, what lies in the pool's own file already, what may not have another open file) are read when they are
    whole, and written.

    A store takes room, and begins files, on the thread that computes, which waits for the disk with its rows anyway.
    A chunk that has left its home is read too; one of which the disk did not take everything does not appear. A file
    that does not appear stays its chunk's home, without a name, unless its rows were never whole (`abort`).
    """

    def __init__(self, store: ChunkStore, pool: HostPool, rows: KVStorage, buffer_bytes: int = WRITE_BUFFER) -> None:
        assert pool.file is not None
        self._file: FileArena = pool.file
        self._last = len(pool.groups.group) - 1
        super().__init__(store, pool, rows, buffer_bytes)

    def layer_done(self, saving: Saving, layer: int) -> None:
        """`Saver.layer_done`. After the last layer chunks that were filled in parts go home, as far as they are in
        memory."""
        if layer == self._last:
            for i, (chunk, identity) in enumerate(zip(saving.chunks, saving.ids, strict=True)):
                if i not in saving.homes and chunk.count == CHUNK:
                    self._bring(saving, i, chunk, identity)
        super().layer_done(saving, layer)

    def abort(self, saving: Saving) -> None:
        """`Saver.abort`. What lies in homes of tokens that were not computed to the end is nobody's."""
        self.flush()
        unfinished = [
            saving.ids[i]
            for i in saving.homes
            if (saving.chunks[i].index + 1) * CHUNK > saving.blocks.length
            and self._identity(saving.blocks, saving.chunks[i]) == saving.ids[i]
        ]
        super().abort(saving)
        self._file.discard(unfinished)

    def _house(self, saving: Saving, i: int, chunk: NamedChunk, identity: int) -> bool:
        """Whether the i-th chunk has a home now: one of which nothing was computed, or is on its way from the store."""
        if chunk.count < CHUNK or identity < 0 or chunk.index * CHUNK < saving.blocks.length:
            return False
        if not self._file.blank(identity) or not self._begin_home(saving, i, chunk):
            return False
        return self._file.house(identity, saving.homes[i]) or self._no_home(saving, i)

    def _bring(self, saving: Saving, i: int, chunk: NamedChunk, identity: int) -> None:
        """The rows of the i-th chunk, which is whole, go home, if they are in memory."""
        if self._file.buffered(identity) and self._begin_home(saving, i, chunk):
            layers = len(self._pool.groups.layers_of(chunk.group))
            if not self._file.bring_home(identity, saving.homes[i], layers):
                self._no_home(saving, i)

    def _no_home(self, saving: Saving, i: int) -> bool:
        del saving.homes[i]
        saving.writers.pop(i).abort()
        return False

    def _begin_home(self, saving: Saving, i: int, chunk: NamedChunk) -> bool:
        """Whether the store has begun a file for the i-th chunk in which its rows can lie."""
        if i in saving.refused or (writer := self._begin_writer(saving, i, chunk)) is None:
            return False
        if (home := writer.home()) is None:
            saving.writers.pop(i).abort()
            return False
        saving.homes[i] = home
        return True

    def _write(self, saving: Saving, layer: int) -> None:
        """Saves every chunk when all its layers are done, parents first."""
        if saving.ended or layer < self._last:
            return
        self._rows.settle(saving.blocks)
        for i, chunk in enumerate(saving.chunks):
            try:
                self._save(saving, i, chunk)
            except DiskError:  # rows that cannot be read, or were not written: they are computed again
                if (writer := saving.writers.get(i)) is not None:
                    writer.abort()
        self._end(saving)

    def _save(self, saving: Saving, i: int, chunk: NamedChunk) -> None:
        home = saving.homes.get(i)
        if home is not None and self._file.home(saving.ids[i]) is not home:
            saving.writers.pop(i).abort()
            home = None
        if home is None:
            if i in saving.refused or (writer := self._begin_writer(saving, i, chunk)) is None:
                return
            for layer in self._pool.groups.layers_of(chunk.group):
                writer.write(self._pool.groups.place[layer], layer_block(self._pool, layer, saving.spans[i]))
        self._appear(saving, i, saving.writers[i])
