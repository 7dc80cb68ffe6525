"""Trace decode steps on a CUDA device: time by kernel and stream, and how long PCIe is in use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

TRANSFERS = ("_gather", "_write", "Memcpy HtoD", "Memcpy DtoH")
"""Parts of the names of kernels and copies that use PCIe."""


@dataclass(frozen=True)
class DeviceEvent:
    """A kernel or copy: name, stream, and start and stop in µs."""

    name: str
    stream: int
    start: float
    stop: float

    @property
    def is_transfer(self) -> bool:
        """Whether it reads or writes host memory."""
        return any(part in self.name for part in TRANSFERS)


def trace(step: Callable[[], None], steps: int) -> dict[str, Any]:
    """Profile `steps` decode steps, which have run before. Return the times per step in µs.

    Returns:
        "kernels": name, launches and µs, in descending order of time. "streams": number of launches and µs of work by
        stream. "wall": from the first kernel to the end of the last one. "link busy": µs while a kernel or copy
        uses the link. "device busy": µs while any kernel runs.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return summary(_events(recorded), steps)


def _events(recorded: Any) -> list[DeviceEvent]:
    """Return the kernels and copies that a profiler recorded."""
    found = (event for event in recorded.events() if event.device_type.name == "CUDA")
    return [DeviceEvent(e.name, e.device_resource_id, e.time_range.start, e.time_range.end) for e in found]


def summary(events: Sequence[DeviceEvent], steps: int) -> dict[str, Any]:
    """Summarize the events of `steps` steps, per step. The result is described in `trace`."""
    kernels: dict[str, list[float]] = defaultdict(list)
    streams: dict[int, list[float]] = defaultdict(list)
    for event in events:
        kernels[event.name].append(event.stop - event.start)
        streams[event.stream].append(event.stop - event.start)
    rows = [{"kernel": name, "launches": len(us) / steps, "us": sum(us) / steps} for name, us in kernels.items()]
    return {
        "kernels": sorted(rows, key=lambda row: -float(row["us"])),
        "streams": {str(name): {"launches": len(us) / steps, "us": sum(us) / steps} for name, us in streams.items()},
        "wall": (max(s.stop for s in events) - min(s.start for s in events)) / steps if events else 0.0,
        "device busy": covered(events) / steps,
        "link busy": covered([event for event in events if event.is_transfer]) / steps,
    }


def covered(events: Sequence[DeviceEvent]) -> float:
    """Return the time in µs in which at least one of the events runs."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        total += max(0.0, event.stop - max(event.start, end))
        end = max(end, event.stop)
    return total
