"""A pool on disk from its options: how much of the disk it may take, and what it costs in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core import ModelGeometry
from ..disk.direct_file import DirectFile
from ..disk.requests import Reader
from ..disk.speed import USUAL, DiskSpeed
from ..errors import MemoryLimitError
from ..units import format_size
from .file_arena import FileArena
from .file_layout import fitting
from .kv_format import KVFormat
from .layout import ArenaLayout

TIMES_HOST = 16
"""Times the host memory that a pool on disk takes at most, unless it is told how much it may."""


@dataclass(frozen=True)
class DiskTier:
    """folder: on the disk. limit: most bytes of rows there; None is `TIMES_HOST` times host memory, or half of what is
    free where that is less. speed: of the disk. reader: None is the fastest there is."""

    folder: Path
    limit: int | None = None
    speed: DiskSpeed = USUAL
    reader: Reader | None = None


def open_file_arena(
    disk: DiskTier, geometry: ModelGeometry, format: KVFormat, host_bytes: int, slab_tokens: int
) -> FileArena:
    """Rows of `geometry`, whose head dimension is `format`'s width, on `disk`, with `host_bytes` of memory. Raises
    ConfigError where the folder cannot be used, MemoryLimitError where a limit is more than there is, or too little."""
    file = DirectFile(disk.folder, disk.reader)
    try:
        free = file.free_bytes
        limit = min(free // 2, TIMES_HOST * host_bytes) if disk.limit is None else disk.limit
        if limit > free:
            raise MemoryLimitError(
                f"disk_limit={format_size(limit)} ({limit} bytes) is more than the {format_size(free)} ({free} bytes) "
                f"that the disk of {str(disk.folder)!r} has left: lower disk_limit, or free room there"
            )
        row_bytes = geometry.head_dim * format.storage.itemsize
        layout = ArenaLayout.fit(geometry, format.storage, fitting(limit, row_bytes), slab_tokens)
        return FileArena(layout, format.storage, file, host_bytes, disk.speed)
    except BaseException:
        file.close()
        raise
