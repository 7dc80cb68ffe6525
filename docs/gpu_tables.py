"""Tables of GPU measurements for `docs/pages/results.md`, from the files that `make gpu` writes."""

from __future__ import annotations

import json
from typing import Any

from result_rows import RESULTS
from tables import table

GPU_ROWS = {
    "StaticCache": "transformers, `StaticCache`: all KV on the device",
    "DynamicCache": "transformers, `DynamicCache`: all KV on the device",
    "OffloadedCache": "transformers, offloaded cache",
    "full": "offload-rt, `full`: all KV copied from host memory",
    "infinigen": "offload-rt, selected KV only",
    "infinigen, int4 tail": "offload-rt, default (4-bit approximate KV)",
}

TRACED = {
    "resident": "all KV on the device, one CUDA graph, torch's attention",
    "full": "`full`: all KV copied from host memory",
    "infinigen": "selected KV only, 5% fetched",
    "infinigen-default": "default, 2% fetched",
}


def _results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["results"]


def step_times() -> dict[str, dict[int, float]]:
    """Return the time of a decode step on the H100 in milliseconds, by baseline and context length."""
    found: dict[str, dict[int, float]] = {}
    for row in _results("gpu/decode")["rows"]:
        found.setdefault(row["name"], {})[row["context"]] = row["median"]
    return found


def gpu() -> str:
    """Time per token on an H100 by context length."""
    times = step_times()
    contexts = sorted(times["full"])
    rows = [
        [label, *(f"{times[name][context]:.1f}" if context in times[name] else "" for context in contexts)]
        for name, label in GPU_ROWS.items()
    ]
    return table(("", *(f"{context:,} tokens" for context in contexts)), rows)


def gpu_kernels() -> str:
    """Time of each kernel on an H100 and its minimum by memory traffic."""
    rows = [
        [f"`{row['kernel']}`", "PCIe" if row["over_link"] else "device", f"{row['bytes'] / 1e6:.1f}",
         f"{1e3 * row['replayed_ms']:.0f}", f"{1e3 * row['floor_ms']:.0f}"]
        for row in _results("gpu/kernels")["rows"] if "programs" not in row["kernel"]
    ]  # fmt: skip
    return table(("kernel", "memory", "MB", "µs", "minimum, µs"), rows)


def gpu_prefill() -> str:
    """Time of a prefill on an H100 with `full`, and the device memory in addition to the weights."""
    rows = [
        [
            f"{row['tokens']:,}",
            f"{row['seconds']:.1f}",
            f"{(row['peak_device_bytes'] - row['weight_bytes']) / 2**30:.1f}",
        ]
        for row in _results("gpu/prefill")["rows"]
    ]
    return table(("tokens", "seconds", "device memory without weights, GiB"), rows)


def gpu_sessions() -> str:
    """Time to the first token of a session's next turn on an H100, by source of the KV."""
    found: dict[int, dict[str, float]] = {}
    for row in _results("gpu/sessions")["rows"]:
        found.setdefault(row["history"], {})[row["source"]] = row["seconds"]
    sources = ("recomputed", "host", "disk warm", "disk cold")
    rows = [[f"{history:,}", *(f"{by[source]:.2f}" for source in sources)] for history, by in found.items()]
    return table(("tokens of history", "computed again", "host memory", "page cache", "disk"), rows)


def h200() -> str:
    """Time of a decode step on an H200."""
    # The second run did not repeat every measurement of the first.
    found: dict[tuple[str, int, int], float] = {}
    for name in ("trace_before", "trace"):
        for row in _results(f"gpu_h200/{name}")["rows"]:
            found[row["baselines"], row["context"], row["batch"]] = row["median_ms"]
    points = ((8_192, 1), (131_072, 1), (32_768, 8))
    rows = [
        [label, *(f"{found[name, *point]:.1f}" if (name, *point) in found else "" for point in points)]
        for name, label in TRACED.items()
    ]
    return table(("", "8,192 tokens", "131,072 tokens", "8 sequences of 32,768 tokens"), rows)


def h200_prefill() -> str:
    """Time to the first token on an H200."""
    rows = [
        [f"{row['shape']}, {row['tokens']:,} tokens", row["program"], f"{row['seconds']:.3f}"]
        for row in _results("gpu_h200/prefill")["rows"]
    ]
    return table(("shape", "program", "seconds"), rows)


def h200_trained() -> str:
    """SmolLM2 on an H200, compared with transformers on the same GPU."""
    found = _results("gpu_h200/trained")["smollm2"]
    rows = []
    for dtype in ("float32", "bfloat16"):
        for row in found[dtype]:
            equal = f"{row['equal tokens']} of {row['tokens']}"
            rates = (f"{row['tokens/s']:.0f}", f"{row['transformers tokens/s']:.0f}")
            rows.append([dtype, f"{row['prompt']:,}", f"`{row['policy']}`", equal, *rates])
    head = ("data type", "prompt", "policy", "tokens equal to transformers", "tokens/s", "transformers tokens/s")
    return table(head, rows)
