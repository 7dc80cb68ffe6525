"""The available host memory, and the error for a full KV pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from ..errors import MemoryLimitError, PoolFullError
from ..utils.control_groups import groups
from ..utils.units import format_size

_FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = ("memory.max", "memory.current", "inactive_file")
"""Names in cgroup v1 and v2 of the files with the limit and the usage, and of the field with reclaimable page cache."""


def available_memory() -> int:
    """Return the bytes that can be allocated without swapping, in the system and in this process's control group."""
    return int(min([psutil.virtual_memory().available, *_cgroup_headroom()]))


def memory_limit(wanted: int | None, at_most: int) -> int:
    """Return `wanted`, or, if it is None, half of the available memory but at most `at_most` bytes.

    Raises MemoryLimitError if `wanted` exceeds the available memory.
    """
    available = available_memory()
    if wanted is None:
        return min(available // 2, at_most)
    if wanted > available:
        raise MemoryLimitError(
            f"a host pool of {format_size(wanted)} ({wanted} bytes) is more than the {format_size(available)} "
            f"({available} bytes) of memory available here; lower host_memory"
        )
    return wanted


def pool_full(
    count: int, missing: int, usable: int, capacity: tuple[int, int], limit: int, *, disk: bool
) -> PoolFullError:
    """Create the error for a request for `count` blocks, of which `missing` blocks cannot be provided.

    Args:
        usable: Number of blocks that are free or can be evicted.
        capacity: Number of blocks in the pool, and bytes per block.
        limit: Limit of the pool in bytes.
    """
    # Imported here because `core` imports torch, which the checks of command-line arguments should not load.
    from ..core import BLOCK_SIZE

    blocks, size = capacity
    lack = missing * size
    needed, lacking, now, enough = map(format_size, (count * size, lack, limit, limit + lack))
    pool, raised = ("pool on disk", "disk_limit") if disk else ("host pool", "host_memory")
    return PoolFullError(
        f"the {pool} is full: {count} blocks of {BLOCK_SIZE} tokens ({needed}) are needed, and of {blocks} only "
        f"{usable} are free or can be evicted from the prefix tree: {missing} too few ({lacking}); raise {raised} from "
        f"{now} to {enough} or more, shorten the prompts, or run fewer sequences at once"
    )


def _cgroup_headroom() -> Iterator[int]:
    for folder, two in groups("memory"):
        headroom = _headroom(folder, *(_SECOND if two else _FIRST))
        if headroom is not None:
            yield headroom


def _headroom(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        most = (folder / limit).read_text().strip()
        if most == "max":
            return None
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return max(0, int(most) - max(0, used - int(stat.get(cache, 0))))
