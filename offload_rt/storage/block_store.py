"""Interfaces of storage tiers for KV blocks, below host memory. To add a tier, implement `StorageTier`."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..kv_cache.prefix_tree import block_key

STATE = -1
"""In place of a layer group: a block with a snapshot of recurrent state (hybrid models)."""


@dataclass(frozen=True)
class NamedBlock:
    """Name of a KV block: its place in a sequence, and its key in a store.

    Attributes:
        index: Index of the block in the block table.
        parent: Key of the preceding block.
        provenance_key: KV provenance key, which describes how the KV was computed.
        tokens: Token ids of the block as little-endian int64, 8 bytes each.
        key: Key of the block: digest of parent, provenance_key and tokens (`kv_cache.prefix_tree.block_key`).
        group: Layer group whose KV the block contains (`kv_cache.layer_groups`). `STATE` for a snapshot of recurrent
            state.
    """

    index: int
    parent: bytes
    provenance_key: str
    tokens: bytes
    key: bytes
    group: int = 0

    @property
    def count(self) -> int:
        """Number of tokens in the block, at most 64."""
        return len(self.tokens) // 8

    def window(self, group: int) -> NamedBlock:
        """Return the name of the block with the KV of this block's tokens in the sliding-window layers of `group`."""
        provenance_key = f"{self.provenance_key} window {group}"
        key = block_key(self.key, provenance_key, self.tokens)
        return NamedBlock(self.index, self.key, provenance_key, self.tokens, key, group)

    def state(self) -> NamedBlock:
        """Return the name of the block with a snapshot of the recurrent state after these tokens."""
        provenance_key = f"{self.provenance_key} state"
        key = block_key(self.key, provenance_key, self.tokens)
        return NamedBlock(self.index, self.key, provenance_key, self.tokens, key, STATE)


class StoredBlock(Protocol):
    """A KV block that was found in a store. Reading its layers may still fail."""

    @property
    def key(self) -> bytes:
        """Key of the block."""
        ...

    @property
    def count(self) -> int:
        """Number of tokens in the block (n), at most 64."""
        ...

    @property
    def layer_bytes(self) -> int:
        """Size of one layer in the store, in bytes."""
        ...

    def read_layer(self, layer: int, into: memoryview) -> bool:
        """Read the KV `[Hkv, n, 2 (K, V), width]` of `layer` into a buffer of exactly `layer_bytes` bytes.

        Thread-safe. Returns False if the data does not match its checksum. Callers treat the block as missing then.
        """
        ...


class PlacedBlock(NamedTuple):
    """A stored block and where to load it.

    Attributes:
        place: Index in the block table.
        block: The stored block.
        group: Layer group whose KV the block contains.
    """

    place: int
    block: StoredBlock
    group: int = 0


class BlockWriter(Protocol):
    """Write one KV block to a store.

    Call `write` once per layer, in any order and from one thread at a time. Then call `commit` or `abort`. Before
    `commit`, the block cannot be found in the store. The data of a layer has the shape `[Hkv, n, 2 (K, V), width]`. For
    full blocks, it is zero-padded to the disk alignment (`kv_cache.disk.file_layout.block_layer_bytes`).
    """

    def write(self, layer: int, block: memoryview) -> None:
        """Write the KV `[Hkv, n, 2 (K, V), width]` of `layer`, as bytes."""
        ...

    def commit(self) -> bool:
        """Complete the block, so that it can be found.

        Before this, the data is made durable as far as the tier supports it. Returns False if a write failed or a layer
        is missing.
        """
        ...

    def abort(self) -> None:
        """Discard the block. This has no effect after `commit`."""
        ...


class BlockSink(Protocol):
    """The part of a store that a `Saver` uses to write blocks."""

    @property
    def layers(self) -> int:
        """Number of layers per stored block.

        This is the number of layers of the model or, for models with sliding windows, of a layer group
        (`kv_cache.layer_groups`).
        """
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
            provenance_key: KV provenance key.
            tokens: Token ids as little-endian int64.
            layer_bytes: Number of bytes per layer.
            cost: Number of tokens to compute again if the block is lost (`policies.recomputation_cost`). It determines
                the order of eviction.
            claim: Whether a prompt without a session name uses the block (`StorageTier.claim`).

        Returns:
            A writer, or None if the block is already stored or cannot be stored.
        """
        ...


@dataclass(frozen=True)
class Document:
    """Content of an intact document.

    Attributes:
        data: Content of the document.
        damage: Why the newest generation cannot be read, or "" if it can. If it cannot, `data` is the generation before
            it.
    """

    data: bytes
    damage: str = ""


@dataclass(frozen=True)
class Summary:
    """What a deletion needs to know about a session history.

    Attributes:
        document: Name of the document that the history belongs to. A renamed file keeps it.
        blocks: Keys of the blocks that the session uses.
        sinks: Name of the document with the keys of its attention sinks.
    """

    document: str
    blocks: tuple[bytes, ...]
    sinks: str


Summarise = Callable[[bytes], Summary | None]
"""Function that parses the content of a document. It returns None if the content is not a valid session history."""


class StorageTier(BlockSink, Protocol):
    """A storage tier below host memory.

    It stores KV blocks by key, and small documents by name, such as session histories.

    Thread-safe. Lookups return only data that was written. A block that is damaged, evicted or does not match counts as
    missing. Documents are never evicted. The name of a document consists of a kind and a digest
    (`storage.folder.NAME`). It never contains text chosen by a user.
    """

    @property
    def root(self) -> bytes:
        """Parent key of the first block of every sequence. It depends on the model, the KV data type and the layout."""
        ...

    @property
    def bytes_used(self) -> int:
        """Size in bytes of all stored data. A file that is being written counts with its full size."""
        ...

    @property
    def last_error(self) -> str:
        """Message about the last failed write, or "" if none failed."""
        ...

    def __contains__(self, key: bytes) -> bool:
        """Return whether a block with this key is stored. The block is not read."""
        ...

    def find(self, parent: bytes, provenance_key: str, tokens: bytes) -> StoredBlock | None:
        """Return the block with these tokens (little-endian int64) that follows the block `parent`, or None."""
        ...

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove blocks. Unknown keys are ignored."""
        ...

    def claim(self, keys: Iterable[bytes]) -> None:
        """Record that a prompt without a session name uses the blocks `keys`. Blocks that are not stored are ignored.

        The blocks that sessions use are listed in their histories. Prompts without a session name have no history, so
        the claim is stored in the block. It ends when the block is evicted or removed, or by a call of `retain`.
        """
        ...

    def retain(self, keys: Container[bytes], space: str | None = None, *, claimed: bool = True) -> int:
        """Remove all blocks of a namespace, except the blocks `keys` and claimed blocks.

        Args:
            keys: Keys of the blocks to keep.
            space: Digest of the namespace. None is the store's own namespace.
            claimed: Whether to keep claimed blocks (see `claim`). If False, they are removed, and claims of the blocks
                `keys` end.

        Returns:
            The number of freed bytes.

        Raises:
            StoreError: A block cannot be removed.
        """
        ...

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark the blocks `keys` of a sequence as used now. The first block of the sequence comes first.

        Within a sequence, later blocks are evicted before earlier ones.
        """
        ...

    def expect(self, keys: Sequence[bytes]) -> None:
        """Set the keys of all blocks that waiting turns will use, soonest first. The blocks need not be stored."""
        ...

    def pin(self, keys: Iterable[bytes]) -> None:
        """Protect the blocks `keys` from eviction, also if they are not stored yet. Each pin needs one `unpin`."""
        ...

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Undo one call of `pin` for the blocks `keys`."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a document atomically, and keep the previous generation. Raises StoreError on failure."""
        ...

    def get(self, name: str) -> Document | None:
        """Return the newest intact generation of a document, or None if the document does not exist.

        Raises:
            StoreError: The document exists, but no generation is intact.
        """
        ...

    def documents(self) -> Mapping[str, Document | None]:
        """Return the documents of all models by "namespace/name".

        The value is None if no generation of a document is intact.
        """
        ...

    def summaries(self, space: str, summarise: Summarise) -> Mapping[str, Summary | None]:
        """Return the summaries of all documents of a namespace by name.

        The newest intact generation of each document is summarised. The value is None if there is none, or if
        `summarise` returns None. The store may keep summaries of unchanged files.
        """
        ...

    def delete(self, name: str, summarise: Summarise | None = None) -> bool:
        """Delete all generations and copies of a document.

        Args:
            name: Name of the document, or "namespace/name" as returned by `documents`.
            summarise: Finds from the content of a file to which document it belongs. It is applied to every file of the
                namespace, because files may have been renamed. If it returns None or the file is unreadable, the file
                name decides.

        Returns:
            False if the document did not exist.

        Raises:
            StoreError: A file cannot be removed.
        """
        ...

    def close(self) -> None:
        """Close the store. After that, only `close` may be called."""
        ...


def read_through(store: StorageTier, name: NamedBlock) -> bool:
    """Read all layers of a block, so that the store detects damage. Return whether the block is stored and intact."""
    block = store.find(name.parent, name.provenance_key, name.tokens)
    if block is None:
        return False
    buffer = memoryview(bytearray(block.layer_bytes))
    return all(block.read_layer(layer, buffer) for layer in range(store.layers))
