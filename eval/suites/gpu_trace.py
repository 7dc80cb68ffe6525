"""The part "trace" of `make gpu`: times and kernels of decode steps, with all KV either in host memory or on the
device.

A trace shows how much time each kernel and stream takes, and how long PCIe is in use.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ...errors import MemoryLimitError
from ..speed.baselines import MAKERS, SHAPES, BenchInputs, Skipped
from ..speed.bench import make_inputs
from .gpu_job import GpuJob, Results

TRANSFERS = ("_gather", "_write", "Memcpy HtoD", "Memcpy DtoH")
"""Substrings in the names of kernels and copies that use PCIe."""

WARM_UP = 4
"""Number of untimed steps. The first steps compile kernels and capture CUDA graphs."""

ROOM = 192
"""Number of slots for new tokens in each baseline."""


def run_trace(job: GpuJob) -> Iterator[Results]:
    shape = SHAPES[job.size.decode.shape[0]]
    model = shape.model(max(point.context for point in job.size.traced) + 4096, job.device)
    rows: list[dict[str, Any]] = []
    for point in job.size.traced:
        began = time.perf_counter()
        inputs = make_inputs(model, point.context, point.context + ROOM, point.fraction, 0.5, point.batch)
        made = time.perf_counter() - began
        for name in point.baselines:
            row: dict[str, Any] = asdict(point) | {"baselines": name, "seconds_to_make_the_context": made}
            try:
                row |= _measured(job, inputs, name)
            except (torch.OutOfMemoryError, MemoryLimitError, Skipped) as error:
                row["failed"] = str(error).splitlines()[0]
            rows.append(row)
            print({key: value for key, value in row.items() if key != "trace"}, flush=True)
            yield {"shape": asdict(shape) | {"dtype": str(shape.dtype)}, "rows": rows}
        del inputs


def _measured(job: GpuJob, inputs: BenchInputs, name: str) -> dict[str, Any]:
    began = time.perf_counter()
    if job.cuda:
        torch.cuda.reset_peak_memory_stats()
    baseline = MAKERS[name](inputs)
    for layer, kv in enumerate(inputs.synthetic.layers(job.device)):
        baseline.fill(layer, kv)
    filled = time.perf_counter() - began
    first = [1e3 * job.timed(baseline.step)[0] for _ in range(WARM_UP)]
    steps = sorted(1e3 * job.timed(baseline.step)[0] for _ in range(job.size.traced_steps))
    found: dict[str, Any] = {
        "seconds_to_fill": filled,
        "first_ms": first,
        "median_ms": statistics.median(steps),
        "spread_ms": (steps[0], steps[-1]),
        "steps": len(steps),
    } | baseline.facts()
    if job.cuda:
        found["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        found["trace"] = traced(baseline.step, 3)
    return found


@dataclass(frozen=True)
class DeviceEvent:
    """A kernel or copy: its name, its stream, and its start and stop in µs."""

    name: str
    stream: int
    start: float
    stop: float

    @property
    def is_transfer(self) -> bool:
        return any(part in self.name for part in TRANSFERS)


def traced(step: Callable[[], None], steps: int) -> dict[str, Any]:
    """Profile `steps` decode steps, and return times per step in µs. The caller must warm up `step` first.

    Returns:
        "kernels": name, launches and µs, by descending time. "streams": launches and µs by stream. "wall": µs from the
        first start to the last end of a kernel. "PCIe busy": µs with transfers over PCIe. "device busy": µs with a
        running kernel.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return summary(_events(recorded), steps)


def _events(recorded: Any) -> list[DeviceEvent]:
    found = (event for event in recorded.events() if event.device_type.name == "CUDA")
    return [DeviceEvent(e.name, e.device_resource_id, e.time_range.start, e.time_range.end) for e in found]


def summary(events: Sequence[DeviceEvent], steps: int) -> dict[str, Any]:
    """Summarize the events of `steps` steps as averages per step. For the result, see `traced`."""
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
        "PCIe busy": covered([event for event in events if event.is_transfer]) / steps,
    }


def covered(events: Sequence[DeviceEvent]) -> float:
    """Return the time in µs during which at least one of the events is running."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        total += max(0.0, event.stop - max(event.start, end))
        end = max(end, event.stop)
    return total
