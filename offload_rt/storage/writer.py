"""Writer for the file of one KV block."""

from __future__ import annotations

import os
from pathlib import Path

from ..kv_cache.disk.block_file import BlockFile
from ..kv_cache.disk.homes import Home
from ..utils.private_files import open_private
from .chunk_file import ChunkHeader, checksum, data_offset
from .folder import StoreFolder


class FileChunkWriter:
    """Write one block to a temporary file for which `folder` has reserved space (`chunk_store.ChunkWriter`).

    Write each layer once with `write` or through `home`, in any order and from one thread at a time, then call
    `commit`. The block cannot be found before `commit`. If a write fails, the file is removed and `commit` returns
    False.

    Raises:
        OSError: The temporary file cannot be created.
    """

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
        """Write the data of one layer."""
        assert layer not in self._checksums and len(block) == self._layer_bytes
        self._checksums[layer] = checksum(block)
        if self._open:
            self._attempt(block, self._offset + layer * self._layer_bytes, sync=False)

    def home(self) -> Home | None:
        """Open the file with its disk space allocated, or return None if that fails.

        Each layer is written once, before `commit`, so the file never changes after it gets its final name.
        """
        try:
            file = BlockFile(os.open(self._temporary, os.O_RDWR | os.O_CLOEXEC))
            file.allocate(0, self._size)
        except OSError:
            return None
        return Home(file, self._offset, self._layer_bytes, self._note)

    def _note(self, layer: int, block: memoryview) -> None:
        self._checksums[layer] = checksum(block)

    def commit(self) -> bool:
        """Make the block durable, then visible. Return False if a write failed or a layer is missing."""
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
        """Stop writing and remove the temporary file. Has no effect after `commit`."""
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
