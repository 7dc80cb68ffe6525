"""Disk tier that stores each KV block in a file.

Files are found by key, verified by checksum and written atomically.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from pathlib import Path

from ..core import BLOCK_SIZE
from ..kv_cache.disk.direct_file import BlockFile, write_all
from ..kv_cache.disk.extents import StoredExtent
from ..kv_cache.prefix_tree import TOKEN_BYTES, block_key, root_key
from ..utils.private_files import open_private
from .block_file import BlockHeader, FileBlock, FileBlockWriter, data_offset
from .documents import NamespaceDocuments
from .files import open_regular, read_header
from .folder import BLOCKS, StoreFolder, block_paths
from .options import StoreOptions


class DiskBlock(FileBlock):
    """A KV block stored as one file."""

    def extent(self) -> StoredExtent | None:
        """Open the file, so that a KV pool on disk can read KV directly from it.

        The file can be read even after the block is evicted. Return None for a partial block, or if the file cannot be
        opened.
        """
        # Direct reads need layers that are padded to the disk alignment. Only the layers of full blocks are padded.
        if self.count < BLOCK_SIZE:
            return None
        try:
            return StoredExtent(BlockFile(self.open()), self.offset, self.layer_bytes)
        except OSError:
            return None


class DiskBlockWriter(FileBlockWriter):
    """Write one KV block as one file."""

    def extent(self) -> StoredExtent | None:
        """Open the file, so that a KV pool on disk can write layers directly to it. `write` is not called then.

        The file can be read even after the block is evicted. Return None if its disk space cannot be allocated.
        """
        try:
            file = BlockFile(self._file())
            file.allocate(0, self.offset + self.layers * self.layer_bytes)
        except OSError:
            return None
        return StoredExtent(file, self.offset, self.layer_bytes, self.note)


class DiskStore(NamespaceDocuments):
    """Store KV blocks and small documents in a folder of at most `options.limit` bytes (`block_store.StorageTier`).

    Each namespace (model, KV data type, layout) has a subfolder, which is named by the digest of the namespace. The
    file name of a block is its key, and the file header repeats the key. Damaged files, files with another key and
    files that vanish between two calls count as missing. The writing process removes damaged files.

    Only one process writes, and any number of processes read. Readers need no shared index, because the key and the KV
    in a file never change after it has its final name. A file is open only during a call, or while its `extent` is in
    use. Thread-safe.

    Args:
        folder: Root folder of the store.
        namespace: Text that identifies the model, the KV data type and the layout.
        layers: Number of layers per block.
        options: Limit, eviction policy and time to live.
        read_only: Open the folder without the write lock. No file is written or evicted.
        clock: Returns the time in nanoseconds since 1970.

    Raises:
        StoreError: The folder cannot be used.
        StoreInUseError: Another process writes to the folder.
    """

    def __init__(
        self,
        folder: Path,
        namespace: str,
        layers: int,
        options: StoreOptions | None = None,
        *,
        read_only: bool = False,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.options = options or StoreOptions()
        self.namespace, self.layers = namespace, layers
        self.root = root_key(namespace)
        store = StoreFolder(folder, self.options, read_only=read_only, clock=clock)
        self._index = store.index
        super().__init__(store, folder / self.root.hex(), self.options)

    @property
    def bytes_used(self) -> int:
        return self._index.bytes_used

    @property
    def last_error(self) -> str:
        return self._folder.last_error

    def __contains__(self, key: bytes) -> bool:
        return self._path(key) in self._index

    # ---------------------------------------------------------------------------------------------------------- blocks

    def find(self, parent: bytes, provenance_key: str, tokens: bytes) -> DiskBlock | None:
        key = block_key(parent, provenance_key, tokens)
        path = self._path(key)
        if not self._folder.read_only and path not in self._index:
            return None
        header = read_header(path)
        # Check the header too: the file may have been renamed, or written for another number of layers.
        if header is None or header.key != key or len(header.checksums) != self.layers:
            self._folder.discard(path)
            return None
        count, opened = len(tokens) // TOKEN_BYTES, partial(open_regular, path)
        damaged = partial(self._folder.discard, path)
        return DiskBlock(key, count, header.layer_bytes, header.checksums, header.data_offset, opened, damaged)

    def begin(
        self,
        parent: bytes,
        provenance_key: str,
        tokens: bytes,
        layer_bytes: int,
        cost: int = 0,
        *,
        claim: bool = False,
    ) -> DiskBlockWriter | None:
        """Reserve space for a block and create its file.

        Returns None if the block is already stored, the limit leaves no space, the file cannot be created
        (`last_error`), or the store is read-only.
        """
        if self._folder.read_only:
            return None
        key, offset = block_key(parent, provenance_key, tokens), data_offset(self.layers)
        path, size = self._path(key), offset + self.layers * layer_bytes
        temporary = self._folder.reserve(path, size, cost, claim=claim)
        if temporary is None:
            return None

        def finish(checksums: Sequence[int]) -> None:
            handle = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC)
            try:
                write_all(handle, 0, memoryview(BlockHeader(key, layer_bytes, tuple(checksums)).encode(claimed=claim)))
                os.fsync(handle)
            finally:
                os.close(handle)
            self._folder.finish(temporary, path, size, cost, claimed=claim)

        give_up = partial(self._folder.give_up, temporary, size)
        try:
            self._folder.make_subfolder(path.parent)
            os.close(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except OSError as error:
            give_up(error)
            return None
        opened = partial(os.open, temporary, os.O_RDWR | os.O_CLOEXEC)
        return DiskBlockWriter(self.layers, layer_bytes, offset, opened, finish, give_up)

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._folder.discard(self._path(key))

    def claim(self, keys: Iterable[bytes]) -> None:
        self._folder.claim(self._path(key) for key in keys)

    def retain(self, keys: Container[bytes], space: str | None = None, *, claimed: bool = True) -> int:
        own, folder = self._own if space is None else self._folder.path / space, self._folder
        others = (path for path in block_paths(own) if bytes.fromhex(path.stem) not in keys)
        if claimed:
            return folder.remove(path for path in others if not folder.is_claimed(path))
        freed = folder.remove(others)
        folder.disclaim(block_paths(own))
        return freed

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark the blocks `keys` as used now (`StorageTier.touch`). The policy "fifo" ignores uses."""
        if not self._folder.read_only:
            self._index.use([self._path(key) for key in keys])

    def expect(self, keys: Sequence[bytes]) -> None:
        """Set the keys that waiting turns will use (`StorageTier.expect`). Only the policy "lookahead" uses them."""
        self._index.window([self._path(key) for key in keys])

    def pin(self, keys: Iterable[bytes]) -> None:
        self._index.pin(self._path(key) for key in keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        self._index.unpin(self._path(key) for key in keys)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._own / name[:2] / f"{name}{BLOCKS}"

    def close(self) -> None:
        self._folder.close()

    def check_integrity(self) -> None:
        """Assert that the index matches the files, and that the limit holds. No write may be in progress."""
        self._folder.check_integrity()
