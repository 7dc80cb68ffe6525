"""One chunk on its way to disk."""

from __future__ import annotations

import os
from pathlib import Path

from ..kv_cache.disk.block_file import BlockFile
from ..kv_cache.disk.homes import Home
from ..utils.private_files import open_private
from .chunk_file import ChunkHeader, checksum, data_offset
from .folder import StoreFolder


class FileChunkWriter:
    """Writes one chunk to a temporary file in room that `folder` has reserved (`chunk_store.ChunkWriter`): every layer
    once, in any order and from any one thread, by `write` or through `home`, then `commit`. Until then nobody can find
    it. What the disk refuses ends the writing; `commit` then returns False. Raises OSError where not even the temporary
    file can be made."""

    def __init__(
        self,
        folder: StoreFolder,
        key: bytes,
        layers: int,
        layer_bytes: int,
        temporary: Path,
        path: Path,
        size: int,
    ) -> None:
        self._folder, self._key, self._layers, self._layer_bytes = folder, key, layers, layer_bytes
        self._temporary, self._path, self._size = temporary, path, size
        self._offset = data_offset(layers)
        self._checksums: dict[int, int] = {}
        self._open = True
        os.close(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL))

    def write(self, layer: int, block: memoryview) -> None:
        """Writes one layer's block."""
        assert layer not in self._checksums and len(block) == self._layer_bytes
        self._checksums[layer] = checksum(block)
        if self._open:
            self._attempt(block, self._offset + layer * self._layer_bytes, sync=False)

    def home(self) -> Home | None:
        """The file, with its room taken from the disk; None where that cannot be. It is never written to once it has
        its name: every layer goes there once."""
        try:
            file = BlockFile(os.open(self._temporary, os.O_RDWR | os.O_CLOEXEC))
            file.allocate(0, self._size)
        except OSError:
            return None
        return Home(file, self._offset, self._layer_bytes, self._note)

    def _note(self, layer: int, block: memoryview) -> None:
        self._checksums[layer] = checksum(block)

    def commit(self) -> bool:
        """Makes the chunk durable and visible, in this order. Returns False where the disk refused any of it, or its
        home has not taken every layer."""
        if len(self._checksums) < self._layers:
            self.abort()
            return False
        checksums = tuple(self._checksums[layer] for layer in range(self._layers))
        if self._open:
            self._attempt(ChunkHeader(self._key, self._layer_bytes, checksums).encode(), 0, sync=True)
        if self._open:
            try:
                self._folder.finish(self._temporary, self._path, self._size)
            except OSError as error:
                self._end(error)
        done, self._open = self._open, False
        return done

    def abort(self) -> None:
        """Ends the writing and removes what was written; nothing happens after `commit`."""
        if self._open:
            self._end(None)

    def _attempt(self, data: bytes | memoryview, offset: int, *, sync: bool) -> None:
        try:
            handle = os.open(self._temporary, os.O_WRONLY | os.O_CLOEXEC)
            try:
                view = memoryview(data)
                while view:
                    written = os.pwrite(handle, view, offset)
                    view, offset = view[written:], offset + written
                if sync:
                    os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError | None) -> None:
        self._open = False
        self._folder.give_up(self._temporary, self._size, error)
