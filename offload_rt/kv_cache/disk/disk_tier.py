"""A pool on disk from its options: how much of the disk it may take, and what it costs in host memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...core import ModelGeometry
from ...errors import MemoryLimitError
from ...utils.units import format_size
from ..kv_format import KVFormat
from ..layout import SLAB_TOKENS, ArenaLayout
from .direct_file import DirectFile
from .file_arena import FileArena
from .file_layout import FileLayout, fitting
from .host_shares import HostShares
from .speed import USUAL, DiskSpeed

TIMES_HOST = 16
"""Times the host memory that a pool on disk takes at most, unless it is told how much it may."""


@dataclass(frozen=True)
class DiskTier:
    """folder: on the disk. limit: most bytes of rows there; None is `TIMES_HOST` times host memory, or half of what is
    free where that is less. speed: of the disk."""

    folder: Path
    limit: int | None = None
    speed: DiskSpeed = USUAL


def disk_limit(folder: Path, limit: int | None, host_bytes: int) -> int:
    """Bytes of rows that the disk of `folder`, which need not be there yet, may take. Raises MemoryLimitError where
    `limit` is more than it has left."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    found = os.statvfs(there)
    free = found.f_bavail * found.f_frsize
    if limit is None:
        return min(free // 2, TIMES_HOST * host_bytes)
    if limit > free:
        raise MemoryLimitError(
            f"disk_limit={format_size(limit)} ({limit} bytes) is more than the {format_size(free)} ({free} bytes) that "
            f"the disk of {str(folder)!r} has left: lower disk_limit, or free room there"
        )
    return limit


def file_layout(limit: int, geometry: ModelGeometry, format: KVFormat, slab_tokens: int = SLAB_TOKENS) -> FileLayout:
    """Rows of `geometry`, whose head dimension is `format`'s width, in a file of at most `limit` bytes. Raises
    MemoryLimitError where that is too little for any."""
    rows = fitting(limit, geometry.head_dim * format.storage.itemsize)
    return FileLayout(ArenaLayout.fit(geometry, format.storage, rows, slab_tokens))


def open_file_arena(
    disk: DiskTier, geometry: ModelGeometry, format: KVFormat, host_bytes: int, slab_tokens: int
) -> FileArena:
    """Rows on `disk`, with `host_bytes` of memory. Raises ConfigError where the folder cannot be used, MemoryLimitError
    where a limit is more than there is, or too little."""
    limit = disk_limit(disk.folder, disk.limit, host_bytes)
    layout = file_layout(limit, geometry, format, slab_tokens)
    HostShares.of(host_bytes, layout)  # before there is a file
    return FileArena(layout.arena, format.storage, DirectFile(disk.folder), host_bytes, disk.speed)
