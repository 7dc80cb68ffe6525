"""Store KV blocks of preempted sequences in one unnamed file that does not outlive the process.

The file never has a name in the file system. The kernel removes it when the process ends, even after a crash.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import StoreError
from ..kv_cache.disk.direct_file import nameless_file
from ..kv_cache.disk.homes import Home
from ..kv_cache.prefix_tree import TOKEN_BYTES, chunk_key, root_key
from .chunk_file import checksum


@dataclass(eq=False)
class NamelessChunk:
    """A KV block in a `NamelessStore` (`chunk_store.StoredChunk`).

    Attributes:
        store: The store that holds the block.
        key: Key of the block.
        count: Number of tokens n.
        offset: Byte offset of layer 0 in the file.
        layer_bytes: Stored bytes per layer.
        checksums: xxh3-64 of each written layer, by layer index.
    """

    store: NamelessStore
    key: bytes
    count: int
    offset: int
    layer_bytes: int
    checksums: dict[int, int]

    def read_layer(self, layer: int, into: memoryview) -> bool:
        """Read the data of one layer into `into`. Return False, a miss, if it differs from what was written."""
        try:
            whole = os.preadv(self.store.handle, [into], self.offset + layer * self.layer_bytes) == self.layer_bytes
        except OSError:
            return False
        return whole and checksum(into) == self.checksums[layer]

    def home(self) -> Home | None:
        """Return None: blocks cannot be read in place."""
        return None

    def check_layer(self, layer: int, home: Home, into: memoryview) -> bool:
        """Raise AssertionError, because blocks of this store have no home."""
        raise AssertionError("a nameless chunk has no home")


class NamelessWriter:
    """Write one block to a `NamelessStore` (`chunk_store.ChunkWriter`)."""

    def __init__(self, store: NamelessStore, chunk: NamelessChunk) -> None:
        self._store, self._chunk, self._open = store, chunk, True

    def home(self) -> Home | None:
        """Return None: all blocks share one file."""
        return None

    def write(self, layer: int, block: memoryview) -> None:
        """Write the data of `layer`. If the write fails, the block is given up."""
        chunk, offset = self._chunk, self._chunk.offset + layer * self._chunk.layer_bytes
        chunk.checksums[layer] = checksum(block)
        try:
            while self._open and block:
                written = os.pwrite(self._store.handle, block, offset)
                block, offset = block[written:], offset + written
        except OSError as error:
            self._store.last_error = f"cannot write preempted KV: {error.strerror or error}"
            self.abort()

    def commit(self) -> bool:
        """Make the block visible. Return False if a write failed or a layer is missing."""
        if len(self._chunk.checksums) < self._store.layers:
            self.abort()
        done, self._open = self._open, False
        if done:
            self._store.enter(self._chunk)
        return done

    def abort(self) -> None:
        """Discard the block and free its slot. Has no effect after `commit`."""
        if self._open:
            self._open = False
            self._store.give_up(self._chunk)


class NamelessStore:
    """Store KV blocks by key in an unnamed file (`chunk_store.ChunkSink`).

    Blocks are never evicted. The file is truncated when it holds no block. Not thread-safe: the caller must flush the
    saver before it calls the store.

    Args:
        folder: Folder on the file system that holds the file.
        namespace: Text that identifies the model, the KV data type and the layout.
        layers: Layers stored per block.
        slot_bytes: Bytes of the file reserved per block.
        limit: Maximum total size in bytes; None for no limit.

    Raises:
        StoreError: The folder cannot be used.
    """

    def __init__(self, folder: Path, namespace: str, layers: int, slot_bytes: int, limit: int | None = None) -> None:
        self.layers, self.root, self.last_error = layers, root_key(namespace), ""
        self._slot_bytes, self._limit = slot_bytes, limit
        self._chunks: dict[bytes, NamelessChunk] = {}
        self._pending: list[NamelessChunk] = []
        self._free: list[int] = []
        try:
            self.handle = nameless_file(folder)
        except OSError as error:
            raise StoreError(
                f"cannot use the folder {str(folder)!r} for preempted requests: {error.strerror or error}; give a "
                "folder on a disk with room where you may write"
            ) from error

    @property
    def _taken(self) -> int:
        return len(self._chunks) + len(self._pending)

    @property
    def bytes_used(self) -> int:
        """Bytes of the slots of all blocks, including blocks being written."""
        return self._taken * self._slot_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._chunks

    def find(self, parent: bytes, provenance_key: str, tokens: bytes) -> NamelessChunk | None:
        """Return the block with these tokens that follows `parent`, or None."""
        return self._chunks.get(chunk_key(parent, provenance_key, tokens))

    def begin(self, parent: bytes, provenance_key: str, tokens: bytes, layer_bytes: int) -> NamelessWriter | None:
        """Reserve a slot for a block. Return None if the block is already stored or the limit is reached."""
        assert self.layers * layer_bytes <= self._slot_bytes
        key = chunk_key(parent, provenance_key, tokens)
        if key in self._chunks or (self._limit is not None and self.bytes_used + self._slot_bytes > self._limit):
            return None
        slot = self._free.pop() if self._free else self._taken
        chunk = NamelessChunk(self, key, len(tokens) // TOKEN_BYTES, slot * self._slot_bytes, layer_bytes, {})
        self._pending.append(chunk)
        return NamelessWriter(self, chunk)

    def enter(self, chunk: NamelessChunk) -> None:
        """Make a written block visible."""
        self._pending.remove(chunk)
        self._chunks[chunk.key] = chunk

    def give_up(self, chunk: NamelessChunk) -> None:
        """Free the slot of a block that was not committed."""
        self._pending.remove(chunk)
        self._release(chunk)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove blocks. Unknown keys are ignored."""
        for key in keys:
            if (chunk := self._chunks.pop(key, None)) is not None:
                self._release(chunk)

    def _release(self, chunk: NamelessChunk) -> None:
        self._free.append(chunk.offset // self._slot_bytes)
        if not self._taken:
            self._free.clear()
            os.ftruncate(self.handle, 0)

    def close(self) -> None:
        """Close and thereby delete the file. A second call has no effect."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1

    def check_integrity(self) -> None:
        """Assert that every slot is free or belongs to one block, and that the limit holds."""
        slots = [chunk.offset // self._slot_bytes for chunk in (*self._chunks.values(), *self._pending)] + self._free
        assert sorted(slots) == list(range(len(slots)))
        assert self._limit is None or self.bytes_used <= self._limit
