"""Trace decode steps on a CUDA device: time by kernel and stream, and how long the PCIe link is idle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

LINK = ("_gather", "_write", "Memcpy HtoD", "Memcpy DtoH")
"""Parts of the names of kernels and copies that use the PCIe link."""


@dataclass(frozen=True)
class Span:
    """A kernel or copy: name, stream, and start and stop in µs."""

    name: str
    stream: int
    start: float
    stop: float

    @property
    def over_link(self) -> bool:
        """Whether it reads or writes host memory."""
        return any(part in self.name for part in LINK)


def trace(step: Callable[[], None], steps: int) -> dict[str, Any]:
    """Profile `steps` decode steps, which have run before. Return the times per step in µs.

    Returns:
        "kernels": name, launches and µs, in descending order of time. "streams": number of launches and µs of work by
        stream. "wall": from the first kernel to the end of the last one. "link busy": µs in which a kernel or copy
        uses the link. "device busy": µs in which any kernel runs.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return summary(_spans(recorded), steps)


def _spans(recorded: Any) -> list[Span]:
    """Return the kernels and copies that a profiler recorded."""
    events = (event for event in recorded.events() if event.device_type.name == "CUDA")
    return [Span(e.name, e.device_resource_id, e.time_range.start, e.time_range.end) for e in events]


def summary(spans: Sequence[Span], steps: int) -> dict[str, Any]:
    """Summarize the spans of `steps` steps, per step. The result is described in `trace`."""
    kernels: dict[str, list[float]] = defaultdict(list)
    streams: dict[int, list[float]] = defaultdict(list)
    for span in spans:
        kernels[span.name].append(span.stop - span.start)
        streams[span.stream].append(span.stop - span.start)
    rows = [{"kernel": name, "launches": len(us) / steps, "us": sum(us) / steps} for name, us in kernels.items()]
    return {
        "kernels": sorted(rows, key=lambda row: -float(row["us"])),
        "streams": {str(name): {"launches": len(us) / steps, "us": sum(us) / steps} for name, us in streams.items()},
        "wall": (max(s.stop for s in spans) - min(s.start for s in spans)) / steps if spans else 0.0,
        "device busy": covered(spans) / steps,
        "link busy": covered([span for span in spans if span.over_link]) / steps,
    }


def covered(spans: Sequence[Span]) -> float:
    """Return the time in µs in which at least one of the spans runs."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.stop - max(span.start, end))
        end = max(end, span.stop)
    return total
