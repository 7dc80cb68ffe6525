"""What a pool on disk keeps in host memory, and how a limit is shared out among that."""

from __future__ import annotations

from dataclasses import dataclass

from ...core import CHUNK
from ...errors import MemoryLimitError
from ...utils.units import format_size
from .direct_file import BLOCK
from .file_layout import FileLayout
from .row_cache import SLOT_BYTES

LEAST_STAGED, MOST_STAGED = 1 << 14, 64 << 20
"""Bytes of what is read or written in one go: from a few requests to more than a disk works on at once."""


@dataclass(frozen=True)
class HostShares:
    """Bytes of host memory, all that rows take there together.

    staged: of each of what is being read, what has been asked for and what is on its way to the disk. chunks: of chunks
    that are filled token by token, at most `chunk_buffers` of them. slots: rows that stay because they were used, of
    `slot_bytes` each with what is known of them.
    """

    staged: int
    chunk_buffers: int
    chunks: int
    slots: int
    slot_bytes: int

    @classmethod
    def of(cls, limit: int, layout: FileLayout) -> HostShares:
        """Shares of `limit` bytes: a thirty-second for each of three kinds of staging, a sixteenth for chunks, the rest
        for rows that stay. Raises MemoryLimitError where that is too little for any."""
        staged = max(LEAST_STAGED, min(MOST_STAGED, limit // 32 // BLOCK * BLOCK))
        chunk = layout.arena.layers * layout.arena.kv_heads * layout.piece
        buffers = max(1, limit // 16 // chunk)
        slot = layout.pair_bytes + SLOT_BYTES
        slots = (limit - 3 * staged - buffers * chunk) // slot
        if slots < 1:
            least = 3 * staged + buffers * chunk + slot
            raise MemoryLimitError(
                f"host_memory={format_size(limit)} ({limit} bytes) is too little to read and write rows on disk: "
                f"{format_size(least)} ({least} bytes) are needed, of them {format_size(chunk)} for a chunk of {CHUNK} "
                "tokens; raise host_memory"
            )
        return cls(staged, buffers, buffers * chunk, slots, slot)
