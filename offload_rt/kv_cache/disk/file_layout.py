"""Options and file layout of a KV cache on disk, and how its host memory is divided.

The pool's file consists of slabs with the shape

    [storage layer, slab_blocks, kv_head, 64 tokens, 2 (K, V), d]

K and V of a token are adjacent because they are always read together. The 64 tokens of a head are contiguous because a
head often selects adjacent tokens. Each storage layer of a block (see `layer_groups`) is aligned to disk blocks. A file
of a session store contains the storage layers of one block in the same format. With latent attention, only K is stored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from ...core import BLOCK_SIZE, ModelGeometry
from ...errors import MemoryLimitError
from ...utils.units import format_size
from ..kv_format import KVFormat
from ..layout import SLAB_TOKENS, ArenaLayout
from .requests import DISK_PAGE, FILE_BITS, Offsets
from .row_cache import SLOT_BYTES

# Limits on the size of a staging buffer in bytes. The smallest buffer has space for a few requests, and the largest for
# a full request queue.
LEAST_STAGED, MOST_STAGED = 1 << 14, 64 << 20

Ids = TypeVar("Ids", int, Offsets)

LARGEST_FILE = 1 << FILE_BITS  # bytes
TIMES_HOST = 16  # default limit on disk space, as a multiple of the host memory limit


@dataclass(frozen=True)
class DiskTier:
    folder: Path
    # Maximum size of the file in bytes. None means `TIMES_HOST` times the host memory limit, or half of the free disk
    # space if that is less.
    limit: int | None = None


def disk_limit(folder: Path, limit: int | None, host_bytes: int) -> int:
    """Return `limit`, or the default maximum size of the KV file in bytes if `limit` is None (see `DiskTier`).

    `folder` need not exist yet. Raises MemoryLimitError if `limit` exceeds the free disk space or `LARGEST_FILE`.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    found = os.statvfs(there)
    free = found.f_bavail * found.f_frsize
    if limit is None:
        return min(free // 2, TIMES_HOST * host_bytes, LARGEST_FILE)
    if limit > free:
        raise MemoryLimitError(
            f"disk_limit={format_size(limit)} ({limit} bytes) is more than the {format_size(free)} ({free} bytes) that "
            f"the disk of {str(folder)!r} has free: lower disk_limit, or free space there"
        )
    if limit > LARGEST_FILE:
        raise MemoryLimitError(
            f"disk_limit={format_size(limit)} ({limit} bytes) is more than the largest KV file, "
            f"{format_size(LARGEST_FILE)}: lower disk_limit"
        )
    return limit


@dataclass(frozen=True)
class FileLayout:
    """Sizes and byte offsets in the file of a KV cache. `arena` defines how many blocks there are, and their shape."""

    arena: ArenaLayout

    @classmethod
    def fit(cls, limit: int, geometry: ModelGeometry, format: KVFormat, slab_tokens: int = SLAB_TOKENS) -> FileLayout:
        """Return the layout with the most blocks in a file of `limit` bytes. Raises MemoryLimitError if no block fits.

        The head dimensions in `geometry` must be the widths of the stored vectors (see `stored_geometry`).
        """
        own = BLOCK_SIZE * geometry.full_rows.bytes(format.storage)
        rows = limit * own // round_up_to_page(own)
        return cls(ArenaLayout.fit(geometry, format.storage, rows, slab_tokens))

    @cached_property
    def entry_bytes(self) -> int:
        return self.arena.entry_bytes

    @cached_property
    def layer_bytes(self) -> int:
        """Size in bytes of one storage layer of a block, padded to whole disk blocks."""
        return block_layer_bytes(BLOCK_SIZE, self.arena)

    @cached_property
    def layer_stride(self) -> int:
        """Distance in bytes between consecutive storage layers of a block in the pool's file."""
        return self.arena.slab_blocks * self.layer_bytes

    @cached_property
    def slab_bytes(self) -> int:
        return self.arena.layers * self.layer_stride

    @cached_property
    def layer_entries(self) -> int:
        return self.arena.kv_heads * BLOCK_SIZE

    @cached_property
    def block_entries(self) -> int:
        return self.arena.layers * self.layer_entries

    def block_offset(self, block: Ids) -> Ids:
        """Return the offset in bytes of a block's first storage layer in the pool's file."""
        return block // self.arena.slab_blocks * self.slab_bytes + block % self.arena.slab_blocks * self.layer_bytes

    def entry_ids(self, storage_layer: int, blocks: Offsets, slots: Offsets, heads: Offsets) -> Offsets:
        """Return the ids of the KV entries in token slots `slots` of `blocks`, for the KV heads `heads`.

        The arrays are int64 and are broadcast together. All entries in one storage layer of a block have consecutive
        ids.
        """
        first: Offsets = (blocks * self.arena.layers + storage_layer) * self.layer_entries + slots
        return first + heads * BLOCK_SIZE

    def by_layer(self, ids: Offsets) -> Iterator[tuple[int, Offsets]]:
        """Yield each storage layer to which some of `ids` belong, with the positions of those ids in `ids`."""
        layers = ids // self.layer_entries % self.arena.layers
        for storage_layer in np.unique(layers).tolist():
            yield storage_layer, np.flatnonzero(layers == storage_layer)

    def layer_entry_ids(self, block: int, storage_layer: int) -> range:
        first = (block * self.arena.layers + storage_layer) * self.layer_entries
        return range(first, first + self.layer_entries)


@dataclass(frozen=True)
class MemoryBudget:
    staged: int  # bytes for each of the three kinds of temporary memory: data read, requested entries, pending writes
    block_buffers: int  # maximum number of buffers for partly filled blocks
    blocks: int  # total bytes of the block buffers
    slots: int  # number of KV entries in the row cache (`RowCache`)
    slot_bytes: int  # bytes per slot of the row cache, including metadata

    @classmethod
    def divide(cls, limit: int, layout: FileLayout) -> MemoryBudget:
        """Divide `limit` bytes: 1/32 for each kind of temporary memory, 1/16 for block buffers, the rest for the cache.

        Raises MemoryLimitError if the limit is too small.
        """
        staged = max(LEAST_STAGED, min(MOST_STAGED, limit // 32 // DISK_PAGE * DISK_PAGE))
        block = layout.arena.layers * layout.layer_bytes
        buffers = max(1, limit // 16 // block)
        slot = layout.entry_bytes + SLOT_BYTES
        slots = (limit - 3 * staged - buffers * block) // slot
        if slots < 1:
            least = 3 * staged + buffers * block + slot
            raise MemoryLimitError(
                f"host_memory={format_size(limit)} ({limit} bytes) is too little for a KV cache on disk: "
                f"{format_size(least)} ({least} bytes) are needed, including {format_size(block)} for a block of "
                f"{BLOCK_SIZE} tokens; raise host_memory"
            )
        return cls(staged, buffers, buffers * block, slots, slot)


def round_up_to_page(size: int) -> int:
    return -(-size // DISK_PAGE) * DISK_PAGE


def block_layer_bytes(tokens: int, arena: ArenaLayout) -> int:
    """Return the size in bytes of one storage layer `[Hkv, tokens, planes, width]` of a block.

    If the block is full, the size is padded to whole disk blocks for direct I/O.
    """
    own = arena.kv_heads * tokens * arena.entry_bytes
    return round_up_to_page(own) if tokens == BLOCK_SIZE else own
