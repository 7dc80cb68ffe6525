"""Interfaces of the storage tiers below host memory. To add a tier, implement `StorageTier`."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..kv_cache.prefix_tree import block_key

STATE = -1
"""In place of a layer group: a block with a snapshot of recurrent state (hybrid models)."""


@dataclass(frozen=True)
class NamedBlock:
    """A KV block of a sequence with its key in a store.

    Attributes:
        index: Index in the block table.
        parent: Key of the preceding block.
        provenance_key: KV provenance, which describes how the KV was computed.
        tokens: Token ids as little-endian int64, 8 bytes each.
        key: Digest of parent, provenance_key and tokens (`kv_cache.prefix_tree.block_key`).
        group: Layer group whose KV the block holds (`kv_cache.layer_groups`), or `STATE`.
    """

    index: int
    parent: bytes
    provenance_key: str
    tokens: bytes
    key: bytes
    group: int = 0

    @property
    def count(self) -> int:
        """Number of tokens n, at most 64."""
        return len(self.tokens) // 8

    def window(self, group: int) -> NamedBlock:
        """Return the block that holds the KV of the same tokens in a group of sliding-window layers."""
        provenance_key = f"{self.provenance_key} window {group}"
        key = block_key(self.key, provenance_key, self.tokens)
        return NamedBlock(self.index, self.key, provenance_key, self.tokens, key, group)

    def state(self) -> NamedBlock:
        """Return the block that holds the recurrent state after these tokens."""
        provenance_key = f"{self.provenance_key} state"
        key = block_key(self.key, provenance_key, self.tokens)
        return NamedBlock(self.index, self.key, provenance_key, self.tokens, key, STATE)


class StoredBlock(Protocol):
    """A KV block found in a store. Reading one of its layers may still fail."""

    @property
    def key(self) -> bytes:
        """Key of the block."""
        ...

    @property
    def count(self) -> int:
        """Number of tokens n, at most 64."""
        ...

    @property
    def layer_bytes(self) -> int:
        """Stored bytes per layer."""
        ...

    def read_layer(self, layer: int, into: memoryview) -> bool:
        """Read the KV `[Hkv, n, 2 (K, V), width]` of `layer` into a buffer of exactly `layer_bytes` bytes.

        Thread-safe. Returns False, a miss, if the data does not match its checksum.
        """
        ...


class PlacedBlock(NamedTuple):
    """A stored block with its index in a block table and the layer group whose KV it holds."""

    place: int
    block: StoredBlock
    group: int = 0


class BlockWriter(Protocol):
    """Write one KV block to a store.

    Call `write` once per layer, in any order and from one thread at a time, then `commit` or `abort`. The block cannot
    be found before `commit`. The data of a layer is `[Hkv, n, 2 (K, V), width]`. For full blocks, it is zero-padded to
    the disk alignment (`kv_cache.disk.file_layout.block_layer_bytes`).
    """

    def write(self, layer: int, block: memoryview) -> None:
        """Write the KV `[Hkv, n, 2 (K, V), width]` of `layer`, as bytes."""
        ...

    def commit(self) -> bool:
        """Make the block durable, as far as the tier supports it, and then visible.

        Returns False if a write failed or a layer is missing.
        """
        ...

    def abort(self) -> None:
        """Discard the block. Has no effect after `commit`."""
        ...


class BlockSink(Protocol):
    """Part of a store that a `Saver` uses."""

    @property
    def layers(self) -> int:
        """Layers per stored block: L, or the layers of a group in sliding-window models (`kv_cache.layer_groups`)."""
        ...

    def begin(
        self,
        parent: bytes,
        provenance_key: str,
        tokens: bytes,
        layer_bytes: int,
        cost: int = 0,
        *,
        claim: bool = False,
    ) -> BlockWriter | None:
        """Reserve space for a block of `layer_bytes` bytes per layer.

        Args:
            parent: Key of the preceding block.
            provenance_key: KV provenance.
            tokens: Token ids as little-endian int64.
            layer_bytes: Bytes per layer.
            cost: Tokens to compute again without the block (`policies.recomputation_cost`), to choose what to evict.
            claim: Whether a prompt without a session uses the block (`StorageTier.claim`).

        Returns:
            A writer, or None if the block is already stored or cannot be stored.
        """
        ...


@dataclass(frozen=True)
class Document:
    """Content of an intact document.

    Attributes:
        data: Content of the document.
        damage: Empty if `data` is the newest generation. Otherwise, the reason why the newest generation cannot be
            read, and `data` is the generation before it.
    """

    data: bytes
    damage: str = ""


class StorageTier(BlockSink, Protocol):
    """Storage tier below host memory: KV blocks by key, and small named documents, such as session histories.

    Thread-safe. Lookups return only data that was written. Damaged, evicted or mismatching blocks are misses. Documents
    are never evicted. The name of a document consists of a kind and a digest (`storage.folder.NAME`). It never contains
    text chosen by a user.
    """

    @property
    def root(self) -> bytes:
        """Parent key of the first block of every sequence. Derived from the model, the KV data type and the layout."""
        ...

    @property
    def bytes_used(self) -> int:
        """Size in bytes of all stored data. Files being written count at full size."""
        ...

    @property
    def last_error(self) -> str:
        """Readable message of the last failed write; empty if none failed."""
        ...

    def __contains__(self, key: bytes) -> bool:
        """Return whether a block with this key is stored, without reading it."""
        ...

    def find(self, parent: bytes, provenance_key: str, tokens: bytes) -> StoredBlock | None:
        """Return the block with these tokens (little-endian int64) that follows `parent`, or None for a miss."""
        ...

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove blocks. Unknown keys are ignored."""
        ...

    def claim(self, keys: Iterable[bytes]) -> None:
        """Record that a prompt without a session uses these blocks. Keys that are not stored are ignored.

        The histories of sessions tell which blocks the sessions use. Nothing else tells which blocks a prompt uses, so
        the claim is stored with the block. It ends when the block is evicted or removed, or with `retain`.
        """
        ...

    def retain(self, keys: Container[bytes], space: str | None = None, *, claimed: bool = True) -> int:
        """Remove all blocks except `keys` and claimed blocks.

        Args:
            keys: Keys of the blocks to keep.
            space: Digest of the namespace to clean; defaults to this one.
            claimed: Whether to keep claimed blocks (`claim`). If not, the claims of the blocks `keys` end.

        Returns:
            The number of freed bytes.

        Raises:
            StoreError: A block cannot be removed.
        """
        ...

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark the blocks `keys` of a sequence, first block first, as used now. Later blocks are evicted first."""
        ...

    def expect(self, keys: Sequence[bytes]) -> None:
        """Set the complete list of keys that waiting turns will use, soonest first. Keys need not be stored."""
        ...

    def pin(self, keys: Iterable[bytes]) -> None:
        """Protect `keys`, stored or not, from eviction. Pins are counted; each needs one `unpin`."""
        ...

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Undo one `pin`."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a document atomically and keep the previous generation. Raises StoreError on failure."""
        ...

    def get(self, name: str) -> Document | None:
        """Return the newest intact generation of a document, or None if the document does not exist.

        Raises:
            StoreError: The document exists, but no generation is intact.
        """
        ...

    def documents(self) -> Mapping[str, Document | None]:
        """Return the documents of all models by "namespace/name"; None if no generation is intact."""
        ...

    def delete(self, name: str, owns: Callable[[bytes], bool | None] | None = None) -> bool:
        """Delete every generation and copy of a document.

        Args:
            name: Name of the document, or "namespace/name" as returned by `documents`.
            owns: Decides from the content of a file whether it belongs to the document. It is called for every file of
                the namespace, because files may have been renamed. If it returns None or the file is unreadable, the
                file name decides.

        Returns:
            False if the document did not exist.

        Raises:
            StoreError: A file cannot be removed.
        """
        ...

    def close(self) -> None:
        """Close the store. Only `close` may be called afterwards."""
        ...


def read_through(store: StorageTier, name: NamedBlock) -> bool:
    """Read every layer of a block so that the store detects damage. Return whether the block is stored and intact."""
    block = store.find(name.parent, name.provenance_key, name.tokens)
    if block is None:
        return False
    buffer = memoryview(bytearray(block.layer_bytes))
    return all(block.read_layer(layer, buffer) for layer in range(store.layers))
