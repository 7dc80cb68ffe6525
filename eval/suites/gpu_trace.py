"""The part "trace" of `make gpu`: times and kernels of decode steps, with all KV in host memory or on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from ..speed.baselines import MAKERS, SHAPES, Baseline, Field
from ..speed.bench import make_field
from ..speed.step_trace import trace
from .gpu_job import GpuJob, Results

WARM_UP = 4
"""Number of untimed steps. The first ones compile kernels and capture CUDA graphs."""

ROOM = 192
"""Capacity for new tokens of each baseline."""


def run_trace(job: GpuJob) -> Iterator[Results]:
    """Time and trace decode steps of an 8B shape at each point."""
    shape = SHAPES[job.size.decode.shape[0]]
    model = shape.model(max(point.context for point in job.size.traced) + 4096, job.device)
    rows: list[dict[str, Any]] = []
    for point in job.size.traced:
        began = time.perf_counter()
        field = make_field(model, point.context, point.context + ROOM, point.fraction, 0.5, point.batch)
        made = time.perf_counter() - began
        for name in point.baselines:
            row: dict[str, Any] = asdict(point) | {"baselines": name, "seconds_to_make_the_context": made}
            try:
                row |= _measured(job, field, name)
            except torch.OutOfMemoryError as error:
                row["failed"] = str(error).splitlines()[0]
            rows.append(row)
            print({key: value for key, value in row.items() if key != "trace"}, flush=True)
            yield {"shape": asdict(shape) | {"dtype": str(shape.dtype)}, "rows": rows}
        del field


def _measured(job: GpuJob, field: Field, name: str) -> dict[str, Any]:
    """Return time per step, transferred bytes, memory and trace of one baseline."""
    began = time.perf_counter()
    if job.cuda:
        torch.cuda.reset_peak_memory_stats()
    baseline = MAKERS[name](field)
    for layer, kv in enumerate(field.synthetic.layers(job.device)):
        baseline.fill(layer, kv)
    filled = time.perf_counter() - began
    first = [_timed(job, baseline) for _ in range(WARM_UP)]
    steps = sorted(_timed(job, baseline) for _ in range(job.size.traced_steps))
    found: dict[str, Any] = {
        "seconds_to_fill": filled,
        "first_ms": first,
        "median_ms": statistics.median(steps),
        "spread_ms": (steps[0], steps[-1]),
        "steps": len(steps),
    } | baseline.facts()
    if job.cuda:
        found["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        found["trace"] = trace(baseline.step, 3)
    return found


def _timed(job: GpuJob, baseline: Baseline) -> float:
    """Return the time in ms of a step, including the wait for the device."""
    began = time.perf_counter()
    baseline.step()
    if job.cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)
