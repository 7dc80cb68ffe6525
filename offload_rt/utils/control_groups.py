"""Processor and memory limits that Linux control groups set for this process, for example in a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
"""Folder with all control groups."""

MEMBERSHIP = Path("/proc/self/cgroup")
"""File that lists the control groups of the process."""


def groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each control group of this process, with its parents, and whether it has version 2.

    `controller` is "memory" or "cpu".
    """
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if two := controllers == "":
            top = ROOT
        elif controller in controllers.split(","):
            top = ROOT / controller
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, two
            if folder == top:
                break


def processor_limit() -> int | None:
    """Return the number of processors that this process may use, rounded up, or None if there is no limit."""
    limits = [_quota(folder, two) for folder, two in groups("cpu")]
    least = min((limit for limit in limits if limit is not None), default=None)
    return None if least is None or least >= len(os.sched_getaffinity(0)) else max(1, least)


def _quota(folder: Path, two: bool) -> int | None:
    names = ("cpu.max",) if two else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        time, period = " ".join((folder / name).read_text() for name in names).split()
        return None if time in ("max", "-1") else -(-int(time) // int(period))
    # The limit is read when the package is imported, which must not fail because of an unexpected file.
    except (OSError, ValueError, ZeroDivisionError):
        return None
