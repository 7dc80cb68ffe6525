"""Options of a KV cache on disk, and the creation of its file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...core import ModelGeometry
from ...errors import MemoryLimitError
from ...utils.units import format_size
from ..kv_format import KVFormat
from .direct_file import DirectFile
from .file_arena import FileArena
from .file_layout import FileLayout, MemoryBudget

TIMES_HOST = 16  # default limit of the disk space, as a multiple of the host memory limit


@dataclass(frozen=True)
class DiskTier:
    """Options of a KV cache on disk.

    Attributes:
        folder: Folder on the disk.
        limit: Maximum size of the file in bytes. None means `TIMES_HOST` times the host memory limit, or half of the
            free disk space if that is less.
    """

    folder: Path
    limit: int | None = None


def disk_limit(folder: Path, limit: int | None, host_bytes: int) -> int:
    """Return the maximum size in bytes of the KV file in `folder`, which need not exist yet.

    `limit` None is the default (see `DiskTier`). Raises MemoryLimitError if `limit` exceeds the free disk space.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    found = os.statvfs(there)
    free = found.f_bavail * found.f_frsize
    if limit is None:
        return min(free // 2, TIMES_HOST * host_bytes)
    if limit > free:
        raise MemoryLimitError(
            f"disk_limit={format_size(limit)} ({limit} bytes) is more than the {format_size(free)} ({free} bytes) that "
            f"the disk of {str(folder)!r} has free: lower disk_limit, or free space there"
        )
    return limit


def open_file_arena(
    disk: DiskTier, geometry: ModelGeometry, format: KVFormat, host_bytes: int, slab_tokens: int
) -> FileArena:
    """Create the file on `disk` and return a file arena that uses up to `host_bytes` of host memory.

    Raises:
        ConfigError: The folder cannot be used.
        MemoryLimitError: A limit is too large or too small.
    """
    limit = disk_limit(disk.folder, disk.limit, host_bytes)
    layout = FileLayout.fit(limit, geometry, format, slab_tokens)
    MemoryBudget.divide(host_bytes, layout)  # checks the limit before the file is created
    return FileArena(layout.arena, format.storage, DirectFile(disk.folder), host_bytes)
