"""Disk tier with one file per KV block. Files are found by key, verified by checksum and written atomically."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import StoreOptions
from ..core import CHUNK
from ..kv_cache.disk.block_file import BlockFile
from ..kv_cache.disk.homes import Home
from ..kv_cache.prefix_tree import TOKEN_BYTES, chunk_key, root_key
from .chunk_file import ChunkHeader, checksum, data_offset
from .chunk_store import Document
from .documents import Documents
from .files import open_regular, read_header
from .folder import CHUNKS, StoreFolder, chunk_paths
from .writer import FileChunkWriter


@dataclass(frozen=True)
class DiskChunk:
    """A KV block found in a `DiskStore`, with its file and file header (`chunk_store.StoredChunk`)."""

    store: DiskStore
    key: bytes
    path: Path
    header: ChunkHeader
    count: int

    @property
    def layer_bytes(self) -> int:
        """Stored bytes per layer."""
        return self.header.layer_bytes

    def read_layer(self, layer: int, into: memoryview) -> bool:
        """Read the data of one layer into `into`. Return False for a miss (`DiskStore.read_layer`)."""
        return self.store.read_layer(self, layer, into)

    def home(self) -> Home | None:
        """Open the file for reading in place. Return None for a partial block or if the file cannot be opened."""
        # Only the layers of full blocks are padded to the disk alignment, which direct reads need.
        if self.count < CHUNK:
            return None
        try:
            return Home(BlockFile(open_regular(self.path)), self.header.data_offset, self.layer_bytes)
        except OSError:
            return None

    def check_layer(self, layer: int, home: Home, into: memoryview) -> bool:
        """Like `read_layer`, but read from the file opened by `home` into aligned memory."""
        return self.store.check_layer(self, layer, home.file.handle, into)


class DiskStore:
    """Store KV blocks and small documents in a folder of at most `options.limit` bytes (`chunk_store.StorageTier`).

    Each namespace (model, KV data type, layout) has a subfolder named by its digest. The file name of a block is its
    key, and the file header repeats the key. Damaged files, files with another key and files that vanish between two
    calls are misses. The writing process removes damaged files.

    One process writes, and any number of processes read. Readers need no shared index, because a file never changes
    after it gets its final name. A file is open only during a call, or while its `home` is in use. Thread-safe.

    Args:
        folder: Root folder of the store.
        namespace: Text that identifies the model, the KV data type and the layout.
        layers: Layers stored per block.
        options: Limit, eviction policy and time to live.
        read_only: Open without the write lock; nothing is written or evicted.
        clock: Returns nanoseconds since 1970.

    Raises:
        StoreError: The folder cannot be used, or another process writes to it.
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
        self._folder = StoreFolder(folder, self.options, read_only=read_only, clock=clock)
        self._own = folder / self.root.hex()
        self._documents = Documents(self._folder, self._own, self.options)

    @property
    def bytes_used(self) -> int:
        """Bytes of all files. Files being written count at full size."""
        return self._folder.bytes_used

    @property
    def last_error(self) -> str:
        """Message of the last failed write; empty if none failed."""
        return self._folder.last_error

    def __contains__(self, key: bytes) -> bool:
        return self._path(key) in self._folder

    # ---------------------------------------------------------------------------------------------------------- blocks

    def find(self, parent: bytes, provenance_key: str, tokens: bytes) -> DiskChunk | None:
        """Return the block with these tokens (little-endian int64) that follows `parent`, or None for a miss."""
        key = chunk_key(parent, provenance_key, tokens)
        path = self._path(key)
        if not self._folder.read_only and path not in self._folder:
            return None
        header = read_header(path)
        # The file name is no proof: the file may have been renamed, or written for another number of layers.
        if header is None or header.key != key or len(header.checksums) != self.layers:
            self._folder.discard(path)
            return None
        return DiskChunk(self, key, path, header, len(tokens) // TOKEN_BYTES)

    def read_layer(self, chunk: DiskChunk, layer: int, into: memoryview) -> bool:
        """Read one layer into `into`, a buffer of exactly `layer_bytes` bytes. Return False for a miss."""
        if len(into) != chunk.header.layer_bytes:
            return False
        try:
            handle = open_regular(chunk.path)
        except OSError:
            return False
        try:
            return self.check_layer(chunk, layer, handle, into)
        finally:
            os.close(handle)

    def check_layer(self, chunk: DiskChunk, layer: int, handle: int, into: memoryview) -> bool:
        """Like `read_layer`, but read from an open file. A damaged file is discarded."""
        header = chunk.header
        try:
            whole = os.preadv(handle, [into], header.data_offset + layer * header.layer_bytes) == header.layer_bytes
        except OSError:
            whole = False
        if whole and checksum(into) == header.checksums[layer]:
            return True
        self._folder.discard(chunk.path)
        return False

    def begin(self, parent: bytes, provenance_key: str, tokens: bytes, layer_bytes: int) -> FileChunkWriter | None:
        """Reserve space for a block and create its file.

        Returns None if the block is already stored, the limit leaves no space, or the file cannot be created
        (`last_error`).
        """
        assert not self._folder.read_only
        key = chunk_key(parent, provenance_key, tokens)
        path = self._path(key)
        size = data_offset(self.layers) + self.layers * layer_bytes
        temporary = self._folder.reserve(path, size)
        if temporary is None:
            return None
        try:
            self._folder.make_subfolder(path.parent)
            return FileChunkWriter(self._folder, key, self.layers, layer_bytes, temporary, path, size)
        except OSError as error:
            self._folder.give_up(temporary, size, error)
            return None

    def remove(self, keys: Iterable[bytes], space: str | None = None) -> None:
        """Remove blocks of this namespace or of the one with digest `space`. Unknown keys are ignored."""
        for key in keys:
            self._folder.discard(self._path(key, space))

    def retain(self, keys: Container[bytes], space: str | None = None) -> int:
        """Remove all blocks except `keys` from this namespace or from the one with digest `space`.

        Returns the number of freed bytes. Raises StoreError if a block cannot be removed.
        """
        own = self._own if space is None else self._folder.path / space
        return self._folder.remove(path for path in chunk_paths(own) if bytes.fromhex(path.stem) not in keys)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark `keys`, a path from the first block on, as used now. Later blocks are evicted before earlier ones.

        Has no effect with the fifo policy.
        """
        self._folder.touch([self._path(key) for key in keys])

    def expect(self, keys: Sequence[bytes]) -> None:
        """Set the complete list of keys that waiting turns will use, soonest first. Keys need not be stored.

        The lookahead policy evicts these blocks last, starting with the end of the list.
        """
        self._folder.expect([self._path(key) for key in keys])

    def pin(self, keys: Iterable[bytes]) -> None:
        """Protect `keys`, stored or not, from eviction. Pins are counted; each needs one `unpin`."""
        self._folder.pin(self._path(key) for key in keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Undo one `pin`."""
        self._folder.unpin(self._path(key) for key in keys)

    def _path(self, key: bytes, space: str | None = None) -> Path:
        name, folder = key.hex(), self._own if space is None else self._folder.path / space
        return folder / name[:2] / f"{name}{CHUNKS}"

    # ------------------------------------------------------------------------------------------------------- documents

    def put(self, name: str, data: bytes) -> None:
        """Write a small document atomically (`Documents.put`). Raises StoreError on failure."""
        self._documents.put(name, data)

    def get(self, name: str) -> Document | None:
        """Return a document, or None if it does not exist. Raises StoreError if no generation is intact."""
        return self._documents.get(name)

    def documents(self) -> dict[str, Document | None]:
        """Return the documents of all namespaces by "namespace digest/name"; None if no generation is intact."""
        return self._documents.documents()

    def delete(self, name: str, owns: Callable[[bytes], bool | None] | None = None) -> bool:
        """Delete a document of this namespace, or "namespace digest/name" (`Documents.delete`)."""
        return self._documents.delete(name, owns)

    def close(self) -> None:
        """Release the write lock. Only `close` may be called afterwards."""
        self._folder.close()

    def check_integrity(self) -> None:
        """Assert that the index, the files and the limit agree. No write may be in progress."""
        self._folder.check_integrity()
