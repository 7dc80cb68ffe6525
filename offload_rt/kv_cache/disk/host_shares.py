"""Division of the host memory limit of a KV cache on disk."""

from __future__ import annotations

from dataclasses import dataclass

from ...core import CHUNK
from ...errors import MemoryLimitError
from ...utils.units import format_size
from .direct_file import BLOCK
from .file_layout import FileLayout
from .row_cache import SLOT_BYTES

LEAST_STAGED, MOST_STAGED = 1 << 14, 64 << 20  # bytes of a staging buffer: a few requests to more than a full queue


@dataclass(frozen=True)
class HostShares:
    """Host memory of a KV cache on disk.

    Attributes:
        staged: Bytes of each of three kinds of staging: reads, requested entries and pending writes.
        chunk_buffers: Maximum number of buffers for partly filled blocks.
        chunks: Bytes of these buffers.
        slots: Slots of the cache for KV entries.
        slot_bytes: Bytes per slot, including metadata.
    """

    staged: int
    chunk_buffers: int
    chunks: int
    slots: int
    slot_bytes: int

    @classmethod
    def of(cls, limit: int, layout: FileLayout) -> HostShares:
        """Divide `limit` bytes: 1/32 for each kind of staging, 1/16 for block buffers, the rest for the cache.

        Raises MemoryLimitError if the limit is too small.
        """
        staged = max(LEAST_STAGED, min(MOST_STAGED, limit // 32 // BLOCK * BLOCK))
        chunk = layout.arena.layers * layout.arena.kv_heads * layout.piece
        buffers = max(1, limit // 16 // chunk)
        slot = layout.pair_bytes + SLOT_BYTES
        slots = (limit - 3 * staged - buffers * chunk) // slot
        if slots < 1:
            least = 3 * staged + buffers * chunk + slot
            raise MemoryLimitError(
                f"host_memory={format_size(limit)} ({limit} bytes) is too little for a KV cache on disk: "
                f"{format_size(least)} ({least} bytes) are needed, of them {format_size(chunk)} for a block of {CHUNK} "
                "tokens; raise host_memory"
            )
        return cls(staged, buffers, buffers * chunk, slots, slot)
