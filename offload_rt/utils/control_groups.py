"""What the control groups over this process (a container, a batch job) leave it of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def groups(controller: str, root: Path, membership: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of all groups over this process that `controller` ("memory", "cpu") may limit, and whether they are
    of version 2."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if two := controllers == "":
            top = root
        elif controller in controllers.split(","):
            top = root / controller
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, two
            if folder == top:
                break


def processor_limit(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int | None:
    """The time of how many processors the groups over this process leave it, rounded up; None where they leave it that
    of all that it may run on."""
    limits = [_quota(folder, two) for folder, two in groups("cpu", root, membership)]
    least = min((limit for limit in limits if limit is not None), default=None)
    return None if least is None or least >= len(os.sched_getaffinity(0)) else max(1, least)


def _quota(folder: Path, two: bool) -> int | None:
    """Processors whose time a group may use; None where it has no limit or cannot be read (a container sees only its
    own group, at the root)."""
    names = ("cpu.max",) if two else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        time, period = " ".join((folder / name).read_text() for name in names).split()
        return None if time in ("max", "-1") else -(-int(time) // int(period))
    except (OSError, ValueError, ZeroDivisionError):  # this is asked at import, which no odd file may end
        return None
