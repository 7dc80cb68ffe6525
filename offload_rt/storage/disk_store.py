"""The disk tier: one file per chunk, found by key, compared by content, written whole or not at all."""

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
    """A chunk that a `DiskStore` has found (`chunk_store.StoredChunk`): its file and the file's header. count: n, the
    tokens of the chunk."""

    store: DiskStore
    key: bytes
    path: Path
    header: ChunkHeader
    count: int

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's block."""
        return self.header.layer_bytes

    def read_layer(self, layer: int, into: memoryview) -> bool:
        """Fills `into` with one layer's block; False is a miss (`DiskStore.read_layer`)."""
        return self.store.read_layer(self, layer, into)

    def home(self) -> Home | None:
        """The file, open to be read; None where it cannot be, or its layers are no whole blocks."""
        if self.count < CHUNK:
            return None
        try:
            return Home(BlockFile(open_regular(self.path)), self.header.data_offset, self.layer_bytes)
        except OSError:
            return None

    def check_layer(self, layer: int, home: Home, into: memoryview) -> bool:
        """`read_layer` of the file that `home` opened, to whole blocks of memory."""
        return self.store.check_layer(self, layer, home.file.handle, into)


class DiskStore:
    """Chunks and small documents in a folder (`chunk_store.StorageTier`), within `options.limit` bytes of files.

    Files of one namespace (model, number format, layout) lie in a folder of its digest. A chunk's file is named by its
    key and says the key in its header. Damage of any kind, a file of another key, and a file that vanishes between two
    calls are misses; the writer removes a damaged file.

    One process writes, any number read, without an index: a file is there or not, and is never changed after its name
    appeared. Files are open only during a call, or as long as somebody has the `home` of a chunk. Any thread may call.
    Raises StoreError where the folder cannot be used or another process writes to it.
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
        """layers: L, blocks of every chunk; clock: nanoseconds since 1970."""
        self.options = options or StoreOptions()
        self.namespace, self.layers = namespace, layers
        self.root = root_key(namespace)
        self._folder = StoreFolder(folder, self.options, read_only=read_only, clock=clock)
        self._own = folder / self.root.hex()
        self._documents = Documents(self._folder, self._own, self.options)

    @property
    def bytes_used(self) -> int:
        """Bytes of all files, those being written at their full size."""
        return self._folder.bytes_used

    @property
    def last_error(self) -> str:
        """What the disk last refused; empty where it never did."""
        return self._folder.last_error

    def __contains__(self, key: bytes) -> bool:
        return self._path(key) in self._folder

    # ---------------------------------------------------------------------------------------------------------- chunks

    def find(self, parent: bytes, lineage: str, tokens: bytes) -> DiskChunk | None:
        """Returns the chunk with exactly these tokens (little-endian int64) behind `parent`; None is a miss."""
        key = chunk_key(parent, lineage, tokens)
        path = self._path(key)
        if not self._folder.read_only and path not in self._folder:
            return None
        header = read_header(path)
        # The name of a file proves nothing: it may have been renamed, or written for another number of layers.
        if header is None or header.key != key or len(header.checksums) != self.layers:
            self._folder.discard(path)
            return None
        return DiskChunk(self, key, path, header, len(tokens) // TOKEN_BYTES)

    def read_layer(self, chunk: DiskChunk, layer: int, into: memoryview) -> bool:
        """Fills `into` (exactly one layer's bytes). Returns whether they are what was written; False is a miss."""
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
        """`read_layer` of a chunk's file that is open."""
        header = chunk.header
        try:
            whole = os.preadv(handle, [into], header.data_offset + layer * header.layer_bytes) == header.layer_bytes
        except OSError:
            whole = False
        if whole and checksum(into) == header.checksums[layer]:
            return True
        self._folder.discard(chunk.path)
        return False

    def begin(self, parent: bytes, lineage: str, tokens: bytes, layer_bytes: int) -> FileChunkWriter | None:
        """Takes room for a chunk and starts its file. Returns None where it is stored already, or where it cannot be:
        there is no room within the limit, or the disk refuses (`last_error`)."""
        assert not self._folder.read_only
        key = chunk_key(parent, lineage, tokens)
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
        """Removes chunks, of this namespace or the one with digest `space`; unknown ones are ignored."""
        for key in keys:
            self._folder.discard(self._path(key, space))

    def retain(self, keys: Container[bytes], space: str | None = None) -> int:
        """Remove all chunks but `keys`, of this namespace or of the one with digest `space`. Return the bytes that were
        freed. Raise StoreError if a chunk cannot be removed."""
        own = self._own if space is None else self._folder.path / space
        return self._folder.remove(path for path in chunk_paths(own) if bytes.fromhex(path.stem) not in keys)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Takes note that `keys`, a path from the first chunk on, was used now: its end leaves before its beginning.
        With policy fifo nothing changes."""
        self._folder.touch([self._path(key) for key in keys])

    def expect(self, keys: Sequence[bytes]) -> None:
        """Takes note that waiting turns will use `keys`, stored or not, soonest first, and nothing else: with policy
        lookahead these leave last, from the end on."""
        self._folder.expect([self._path(key) for key in keys])

    def pin(self, keys: Iterable[bytes]) -> None:
        """Keeps `keys`, stored or not, from being evicted until as many `unpin`."""
        self._folder.pin(self._path(key) for key in keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Takes a pin back."""
        self._folder.unpin(self._path(key) for key in keys)

    def _path(self, key: bytes, space: str | None = None) -> Path:
        name, folder = key.hex(), self._own if space is None else self._folder.path / space
        return folder / name[:2] / f"{name}{CHUNKS}"

    # ------------------------------------------------------------------------------------------------------- documents

    def put(self, name: str, data: bytes) -> None:
        """Writes a small document, whole or not at all (`Documents.put`). Raises StoreError."""
        self._documents.put(name, data)

    def get(self, name: str) -> Document | None:
        """Returns a document; None where there is none. Raises StoreError where none of its generations is whole."""
        return self._documents.get(name)

    def documents(self) -> dict[str, Document | None]:
        """Returns all documents of every namespace, "namespace digest/name" -> document, None where it is damaged."""
        return self._documents.documents()

    def delete(self, name: str, owns: Callable[[bytes], bool | None] | None = None) -> bool:
        """Delete a document of this namespace, or "namespace digest/name" (`Documents.delete`)."""
        return self._documents.delete(name, owns)

    def close(self) -> None:
        """Lets the next writer in. Nothing may be called after it but itself."""
        self._folder.close()

    def check_integrity(self) -> None:
        """Asserts that index, files and limit agree (nobody may be writing)."""
        self._folder.check_integrity()
