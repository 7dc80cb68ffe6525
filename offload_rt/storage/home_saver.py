"""Saving blocks of an on-disk KV pool without a copy: the pool keeps using the files of the store."""

from __future__ import annotations

from ..core import CHUNK
from ..errors import DiskError
from ..kv_cache.disk.file_arena import FileArena
from ..kv_cache.pool import HostPool
from ..transfer.link import KVStorage
from .chunk_store import ChunkStore, NamedChunk
from .saver import WRITE_BUFFER, Saver, Saving, layer_block


class HomeSaver(Saver):
    """`Saver` for an on-disk KV pool.

    A home is the store file that holds the KV of a pool block (`kv_cache.disk.homes`). Blocks are saved in three ways:

    * A full block of which nothing is computed yet gets a home in `begin`. Its layers are then written directly to the
      file as they are computed.
    * A block that is complete and still in memory is written to a home after its last layer.
    * All other blocks are read from the pool and written to the store when they are complete. These are partial blocks,
      blocks that are already in the pool's own file, blocks that exceed the limit of open files, and blocks that have
      left their home.

    For blocks with a home, the worker only waits for pending writes and commits. A block is not committed if any of its
    writes failed. Its unnamed file remains the home of the pool block, unless the KV was never complete (`abort`).

    The files of homes are created on the compute thread, which waits for the disk in any case.
    """

    def __init__(self, store: ChunkStore, pool: HostPool, rows: KVStorage, buffer_bytes: int = WRITE_BUFFER) -> None:
        assert pool.file is not None
        self._file: FileArena = pool.file
        self._last = len(pool.groups.group) - 1
        super().__init__(store, pool, rows, buffer_bytes)

    def layer_done(self, saving: Saving, layer: int) -> None:
        """Mark `layer` as complete. After the last layer, write complete blocks that are in memory to their homes."""
        if layer == self._last:
            for i, (chunk, identity) in enumerate(zip(saving.chunks, saving.ids, strict=True)):
                if i not in saving.homes and chunk.count == CHUNK:
                    self._bring(saving, i, chunk, identity)
        super().layer_done(saving, layer)

    def abort(self, saving: Saving) -> None:
        """Give up blocks with incomplete layers, and discard the incomplete KV in their homes."""
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
        """Give the i-th block a home if it has no KV yet. Return whether it has one now."""
        if chunk.count < CHUNK or identity < 0 or chunk.index * CHUNK < saving.blocks.length:
            return False
        if not self._file.blank(identity) or not self._begin_home(saving, i, chunk):
            return False
        return self._file.house(identity, saving.homes[i]) or self._no_home(saving, i)

    def _bring(self, saving: Saving, i: int, chunk: NamedChunk, identity: int) -> None:
        """Write the i-th block, which is complete, to a home if its KV is in memory."""
        if self._file.buffered(identity) and self._begin_home(saving, i, chunk):
            layers = len(self._pool.groups.layers_of(chunk.group))
            if not self._file.bring_home(identity, saving.homes[i], layers):
                self._no_home(saving, i)

    def _no_home(self, saving: Saving, i: int) -> bool:
        del saving.homes[i]
        saving.writers.pop(i).abort()
        return False

    def _begin_home(self, saving: Saving, i: int, chunk: NamedChunk) -> bool:
        """Create a store file for the i-th block that can be its home. Return success."""
        if i in saving.refused or (writer := self._begin_writer(saving, i, chunk)) is None:
            return False
        if (home := writer.home()) is None:
            saving.writers.pop(i).abort()
            return False
        saving.homes[i] = home
        return True

    def _write(self, saving: Saving, layer: int) -> None:
        """Save the blocks after their last layer, parents first."""
        if saving.ended or layer < self._last:
            return
        self._rows.settle(saving.blocks)
        for i, chunk in enumerate(saving.chunks):
            try:
                self._save(saving, i, chunk)
            except DiskError:  # KV that cannot be read or was not written is recomputed
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
