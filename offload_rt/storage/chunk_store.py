"""What the runtime asks of a storage tier below host memory. A further tier is one file that implements `StorageTier`
(or `ChunkStore` alone, where it never holds sessions)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..kv_cache.disk.homes import Home
from ..kv_cache.prefix_tree import chunk_key


@dataclass(frozen=True)
class NamedChunk:
    """A chunk of a sequence under its name in a store. index: its place in the block table; parent: the key of the
    chunk before it; lineage: how its rows were computed; tokens: little-endian int64, 8 bytes each; key: the digest of
    the three (`pool.prefix_tree.chunk_key`); group: whose layers' rows it holds (`pool.layer_groups`)."""

    index: int
    parent: bytes
    lineage: str
    tokens: bytes
    key: bytes
    group: int = 0

    @property
    def count(self) -> int:
        """Returns n, the tokens of the chunk (at most 64)."""
        return len(self.tokens) // 8

    def window(self, group: int) -> NamedChunk:
        """Returns the name of the same tokens' rows in a group of sliding layers."""
        lineage = f"{self.lineage} window {group}"
        key = chunk_key(self.key, lineage, self.tokens)
        return NamedChunk(self.index, self.key, lineage, self.tokens, key, group)


class StoredChunk(Protocol):
    """A chunk that a store has found. Reading a layer of it may still fail."""

    @property
    def key(self) -> bytes:
        """The chunk's key."""
        ...

    @property
    def count(self) -> int:
        """n, the tokens of the chunk (at most 64)."""
        ...

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's block."""
        ...

    def read_layer(self, layer: int, into: memoryview) -> bool:
        """Fills `into`, which has exactly `layer_bytes` bytes, with the block `[Hkv, n, 2 (K, V), width]` of `layer`.
        Returns whether they are the bytes that were written; False is a miss. Any thread may call."""
        ...

    def home(self) -> Home | None:
        """The chunk's file, open, for a pool on disk to read rows from as long as it likes, whatever becomes of the
        chunk here; None where there is none that can be read so."""
        ...

    def check_layer(self, layer: int, home: Home, into: memoryview) -> bool:
        """`read_layer` from what `home` gave, to whole blocks of memory (`disk.direct_file.aligned`)."""
        ...


class PlacedChunk(NamedTuple):
    """A stored chunk and where it belongs: its place in a block table, and the group whose layers' rows it holds."""

    place: int
    chunk: StoredChunk
    group: int = 0


class ChunkWriter(Protocol):
    """A chunk on its way into a store: one `write` for each layer, in any order and from any one thread, then `commit`
    or `abort`. Nobody finds the chunk before `commit`. A block is `[Hkv, n, 2 (K, V), width]`, and of a full chunk
    zeros up to whole blocks of a disk (`pool.file_layout.chunk_layer_bytes`)."""

    def home(self) -> Home | None:
        """The chunk's file, for a pool on disk to write layers to in place of `write` and to read them from as long as
        it likes, whatever becomes of the chunk here; None where there is none that can be used so."""
        ...

    def write(self, layer: int, block: memoryview) -> None:
        """Takes the block `[Hkv, n, 2 (K, V), width]` of `layer`, as bytes."""
        ...

    def commit(self) -> bool:
        """Makes the chunk durable, as far as the tier can, and then visible. Returns False where the tier refused, or a
        layer is missing."""
        ...

    def abort(self) -> None:
        """Gives the chunk up. Nothing happens after `commit`."""
        ...


class ChunkSink(Protocol):
    """What a `Saver` needs of a store."""

    @property
    def layers(self) -> int:
        """The blocks of every chunk: L, or where layers slide those of a group (`pool.layer_groups`)."""
        ...

    def begin(self, parent: bytes, lineage: str, tokens: bytes, layer_bytes: int) -> ChunkWriter | None:
        """Takes room for a chunk of `layer_bytes` bytes in each layer. Returns None where it is stored already, or
        where it cannot be."""
        ...


class ChunkStore(ChunkSink, Protocol):
    """Chunks of KV rows by key, each with one block of bytes for every layer. What is found is always what was written:
    damage, eviction and other content under the same key are misses. Any thread may call any method.
    """

    @property
    def root(self) -> bytes:
        """The parent key of first chunks: it stands for the model, the number format and the layout."""
        ...

    @property
    def bytes_used(self) -> int:
        """Bytes of everything stored, what is being written at its full size."""
        ...

    @property
    def last_error(self) -> str:
        """Why the tier last refused to write, for people; empty where it never did."""
        ...

    def __contains__(self, key: bytes) -> bool:
        """Whether the chunk with this key is stored, as far as is known without reading it."""
        ...

    def find(self, parent: bytes, lineage: str, tokens: bytes) -> StoredChunk | None:
        """Returns the chunk with exactly these tokens (little-endian int64) behind `parent`; None is a miss."""
        ...

    def remove(self, keys: Iterable[bytes]) -> None:
        """Removes chunks; unknown ones are ignored."""
        ...

    def retain(self, keys: Container[bytes], space: str | None = None) -> int:
        """Remove all chunks but `keys`, of this namespace or of the one with digest `space`. Return the bytes that were
        freed. Raise StoreError if a chunk cannot be removed."""
        ...

    def touch(self, keys: Iterable[bytes]) -> None:
        """Takes note that `keys`, a path from the first chunk on, was used now: its end leaves before its beginning."""
        ...

    def expect(self, keys: Sequence[bytes]) -> None:
        """Takes note that waiting turns will use `keys`, stored or not, soonest first, and nothing else."""
        ...

    def pin(self, keys: Iterable[bytes]) -> None:
        """Keeps `keys`, stored or not, from being evicted until as many `unpin`."""
        ...

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Takes a pin back."""
        ...

    def close(self) -> None:
        """Ends the use of the store. Nothing may be called after it but itself."""
        ...


@dataclass(frozen=True)
class Document:
    """A document that is whole. damage: empty for what was written last; else what is wrong with that (with its name),
    so that this is what was written before it."""

    data: bytes
    damage: str = ""


class DocumentStore(Protocol):
    """Small documents by name, which are never evicted: the histories of sessions. A name is a kind and a
    digest (`storage.folder.NAME`). It never contains what a user chose."""

    def put(self, name: str, data: bytes) -> None:
        """Writes a document, whole or not at all, and keeps what it was before. Raises StoreError."""
        ...

    def get(self, name: str) -> Document | None:
        """Returns a document, as it was before where what was written last is damaged; None where there is none. Raises
        StoreError where there is one and nothing of it is whole."""
        ...

    def documents(self) -> Mapping[str, Document | None]:
        """Returns all documents of every model: "namespace/name" -> document, None where nothing of it is whole."""
        ...

    def delete(self, name: str, owns: Callable[[bytes], bool | None] | None = None) -> bool:
        """Delete every generation and copy of the document `name`, or "namespace/name" as `documents` says it.

        owns: whether a document with this content is the one to delete, for every file of the namespace, because a
        file may have been renamed. None: the content does not say; then, as for unreadable files, the name decides.
        Return False if there was none. Raise StoreError if a file cannot be removed.
        """
        ...


class StorageTier(ChunkStore, DocumentStore, Protocol):
    """What sessions need of the tier below host memory: their chunks and their histories."""


def read_through(store: ChunkStore, name: NamedChunk) -> bool:
    """Reads every layer of the chunk `name`, so that the store notices damage. Returns whether it is there, whole."""
    chunk = store.find(name.parent, name.lineage, name.tokens)
    if chunk is None:
        return False
    block = memoryview(bytearray(chunk.layer_bytes))
    return all(chunk.read_layer(layer, block) for layer in range(store.layers))
