"""Chunks in one file without a name, for KV that must not outlive the process: preempted sequences.

The kernel removes the file when the process ends, however it ends. Nothing of it can be found by name at any moment.
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
    """A chunk in a `NamelessStore` (`chunk_store.StoredChunk`). count: n, its tokens; offset: where layer 0 begins;
    checksums: xxh3-64 of the layers that are written."""

    store: NamelessStore
    key: bytes
    count: int
    offset: int
    layer_bytes: int
    checksums: dict[int, int]

    def read_layer(self, layer: int, into: memoryview) -> bool:
        """Fill `into` with one layer's block. Return False, a miss, if it is not what was written."""
        try:
            whole = os.preadv(self.store.handle, [into], self.offset + layer * self.layer_bytes) == self.layer_bytes
        except OSError:
            return False
        return whole and checksum(into) == self.checksums[layer]

    def home(self) -> Home | None:
        """Return None: no pool can read the chunk in place."""
        return None

    def check_layer(self, layer: int, home: Home, into: memoryview) -> bool:
        """Not called: there is no home."""
        raise AssertionError("a nameless chunk has no home")


class NamelessWriter:
    """A chunk on its way into a `NamelessStore` (`chunk_store.ChunkWriter`)."""

    def __init__(self, store: NamelessStore, chunk: NamelessChunk) -> None:
        self._store, self._chunk, self._open = store, chunk, True

    def home(self) -> Home | None:
        """Return None: the file is shared by all chunks."""
        return None

    def write(self, layer: int, block: memoryview) -> None:
        """Write the block of `layer`. If the disk refuses it, the chunk is given up."""
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
        """Make the chunk visible. Return False if the disk refused a layer, or one is missing."""
        if len(self._chunk.checksums) < self._store.layers:
            self.abort()
        done, self._open = self._open, False
        if done:
            self._store.enter(self._chunk)
        return done

    def abort(self) -> None:
        """Give the chunk's room back; nothing happens after `commit`."""
        if self._open:
            self._open = False
            self._store.give_up(self._chunk)


class NamelessStore:
    """Chunks by key in a nameless file in `folder`, within `limit` bytes (`chunk_store.ChunkSink`). Every chunk takes a
    slot of `slot_bytes`; nothing is evicted, and the file is emptied when no chunk is left. Calls must not overlap: the
    caller flushes the saver before it calls anything itself.

    Raises StoreError if the folder cannot be used.
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
        """Bytes of the slots of all chunks, those being written included."""
        return self._taken * self._slot_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._chunks

    def find(self, parent: bytes, lineage: str, tokens: bytes) -> NamelessChunk | None:
        """Return the chunk with these tokens behind `parent`, or None."""
        return self._chunks.get(chunk_key(parent, lineage, tokens))

    def begin(self, parent: bytes, lineage: str, tokens: bytes, layer_bytes: int) -> NamelessWriter | None:
        """Take a slot for a chunk. Return None if it is there, or there is no room within the limit."""
        assert self.layers * layer_bytes <= self._slot_bytes
        key = chunk_key(parent, lineage, tokens)
        if key in self._chunks or (self._limit is not None and self.bytes_used + self._slot_bytes > self._limit):
            return None
        slot = self._free.pop() if self._free else self._taken
        chunk = NamelessChunk(self, key, len(tokens) // TOKEN_BYTES, slot * self._slot_bytes, layer_bytes, {})
        self._pending.append(chunk)
        return NamelessWriter(self, chunk)

    def enter(self, chunk: NamelessChunk) -> None:
        """Make a chunk that was written visible."""
        self._pending.remove(chunk)
        self._chunks[chunk.key] = chunk

    def give_up(self, chunk: NamelessChunk) -> None:
        """Give back the slot of a chunk that was not entered."""
        self._pending.remove(chunk)
        self._release(chunk)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove chunks; unknown ones are ignored."""
        for key in keys:
            if (chunk := self._chunks.pop(key, None)) is not None:
                self._release(chunk)

    def _release(self, chunk: NamelessChunk) -> None:
        self._free.append(chunk.offset // self._slot_bytes)
        if not self._taken:
            self._free.clear()
            os.ftruncate(self.handle, 0)

    def close(self) -> None:
        """Close the file, which is gone then. A second call does nothing."""
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1

    def check_integrity(self) -> None:
        """Assert that every slot belongs to one chunk, or is free, and that the limit holds."""
        slots = [chunk.offset // self._slot_bytes for chunk in (*self._chunks.values(), *self._pending)] + self._free
        assert sorted(slots) == list(range(len(slots)))
        assert self._limit is None or self.bytes_used <= self._limit
