"""How much memory this process may still take, and what is said where a pool has no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from ..core import CHUNK
from ..errors import MemoryLimitError, PoolFullError
from ..utils.control_groups import MEMBERSHIP, ROOT, groups
from ..utils.units import format_size

_FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = ("memory.max", "memory.current", "inactive_file")
"""Limit, use, and what of memory.stat is page cache that can go, in control groups of either version."""


def available_memory() -> int:
    """Bytes that can be taken without swapping: what the machine has left, or what the control group of this process
    and its parents (a container, a batch job) leave of their limits, whichever is least."""
    return int(min([psutil.virtual_memory().available, *_cgroup_headroom(ROOT, MEMBERSHIP)]))


def memory_limit(wanted: int | None, at_most: int) -> int:
    """Bytes that a pool may take: what is wanted, else half of what is available, and no more than `at_most`.
    MemoryLimitError where more is wanted than there is."""
    available = available_memory()
    if wanted is None:
        return min(available // 2, at_most)
    if wanted > available:
        raise MemoryLimitError(
            f"a host pool of {format_size(wanted)} ({wanted} bytes) is more than the {format_size(available)} "
            f"({available} bytes) of memory available here; lower host_memory"
        )
    return wanted


def pool_full(count: int, missing: int, usable: int, room: tuple[int, int], limit: int, *, disk: bool) -> PoolFullError:
    """Of `count` chunks that are needed `missing` are lacking; `usable` could be had, of a pool of `room` chunks of so
    many bytes each and a `limit` in bytes, in memory or on a disk."""
    chunks, size = room
    lack = missing * size
    needed, lacking, now, enough = map(format_size, (count * size, lack, limit, limit + lack))
    pool, raised = ("pool on disk", "disk_limit") if disk else ("host pool", "host_memory")
    return PoolFullError(
        f"the {pool} is full: {count} chunks of {CHUNK} tokens ({needed}) are needed, and of {chunks} only {usable} "
        f"are free or can be given up by the prefix tree: {missing} too few ({lacking}); raise {raised} from {now} to "
        f"{enough} or more, shorten the prompts, or run fewer sequences at once"
    )


def _cgroup_headroom(root: Path, membership: Path) -> Iterator[int]:
    """Limit less use of every control group over this process that has a limit (version 2 and 1). Page cache that the
    kernel would give back first counts as unused."""
    for folder, two in groups("memory", root, membership):
        headroom = _headroom(folder, *(_SECOND if two else _FIRST))
        if headroom is not None:
            yield headroom


def _headroom(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    """Limit less use of one group; None where the group has no limit or cannot be read (a container sees only its own
    group, at the root)."""
    try:
        most = (folder / limit).read_text().strip()
        if most == "max":
            return None
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return max(0, int(most) - max(0, used - int(stat.get(cache, 0))))
