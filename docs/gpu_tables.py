"""Tables of GPU measurements for `docs/pages/results.md`, from the files that `make gpu` writes."""

from __future__ import annotations

import json
from typing import Any

from result_rows import NAMES, RESULTS, load
from tables import table

GPU_ROWS = {
    "StaticCache": "transformers, `StaticCache`",
    "DynamicCache": "transformers, `DynamicCache`",
    "OffloadedCache": "transformers, offloaded cache",
    "full": "offload-rt, `full`",
    "infinigen": "offload-rt, no approximate KV, 5% fetched",
    "infinigen, int4 tail": "offload-rt, 4-bit approximate KV, 5% fetched",
}

TRACED = {
    "resident": "all KV on the device, one CUDA graph, torch's attention",
    "full": "offload-rt, `full`",
    "infinigen": "offload-rt, no approximate KV, 5% fetched",
    "infinigen-default": "offload-rt, default, 2% fetched",
}


def _results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["results"]


def step_times() -> dict[str, dict[int, float]]:
    """Return the time of a decode step on the H100 in milliseconds, for each baseline and context length."""
    found: dict[str, dict[int, float]] = {}
    for row in _results("gpu/decode")["rows"]:
        found.setdefault(row["name"], {})[row["context"]] = row["median"]
    return found


def traced_times() -> dict[str, dict[int, float]]:
    """Return the time of a decode step on the H200 in milliseconds, for each baseline and context length."""
    found: dict[str, dict[int, float]] = {}
    # The second run did not repeat every measurement of the first.
    for file in ("trace_before", "trace"):
        for row in _results(f"gpu_h200/{file}")["rows"]:
            if row["batch"] == 1:
                found.setdefault(row["baselines"], {})[row["context"]] = row["median_ms"]
    return found


def gpu() -> str:
    """Time per token on an H100 and an H200 by context length."""
    contexts, times, traced = (8_192, 32_768, 131_072), step_times(), traced_times()
    rows = [["H100", label, *_cells(times[name], contexts)] for name, label in GPU_ROWS.items()]
    rows += [["H200", label, *_cells(traced[name], contexts)] for name, label in TRACED.items()]
    return table(("GPU", "setting", *(f"{context:,} tokens" for context in contexts)), rows)


def _cells(times: dict[int, float], contexts: tuple[int, ...]) -> list[str]:
    return [f"{times[context]:.1f}" if context in times else "" for context in contexts]


def gpu_sessions() -> str:
    """Time to the first token of a session's next turn on an H100, by source of the KV (recomputed or stored)."""
    found: dict[int, dict[str, float]] = {}
    for row in _results("gpu/sessions")["rows"]:
        found.setdefault(row["history"], {})[row["source"]] = row["seconds"]
    sources = ("recomputed", "host", "disk warm", "disk cold")
    rows = [[f"{history:,}", *(f"{by[source]:.2f}" for source in sources)] for history, by in found.items()]
    return table(("tokens of history", "computed again", "host memory", "page cache", "disk"), rows)


def h200_trained() -> str:
    """SmolLM2 on an H200, compared with transformers on the same GPU."""
    rows = []
    for dtype in ("float32", "bfloat16"):
        found: dict[int, dict[str, dict[str, float]]] = {}
        for row in _results("gpu_h200/trained")["smollm2"][dtype]:
            found.setdefault(row["prompt"], {})[row["policy"]] = row
        for prompt, by in found.items():
            full = by["full"]
            assert full["equal tokens"] == by["infinigen"]["equal tokens"]
            rates = (by["full"]["tokens/s"], by["infinigen"]["tokens/s"], full["transformers tokens/s"])
            assert full["tokens"] == 128
            rows.append([dtype, f"{prompt:,}", str(full["equal tokens"]), *(f"{rate:.0f}" for rate in rates)])
    head = ("equal tokens of 128", "tokens/s: `full`", "tokens/s: `infinigen`", "tokens/s: transformers")
    return table(("dtype", "prompt", *head), rows)


MULTIPROCESSORS, ISSUED = 132, 4
"""Multiprocessors of an H100 or H200, and the number of warp instructions that each of them starts per cycle."""

LAUNCH_GAP_MS = 1e-3
"""Time between two nodes of a CUDA graph, as seen in traces."""


def _fastest(row: Any, machine: Any) -> float:
    """Return the least time of a part of a decode step in ms, from its bytes and instructions."""
    bandwidth, clock = machine["bandwidth"], 1e6 * float(machine["gpu"]["clocks.max.sm"].split()[0])
    times = (
        row["device_bytes"] / bandwidth["device"],
        row["host_bytes"] / bandwidth["host_to_device"],
        row["instructions"] / (MULTIPROCESSORS * ISSUED * clock),
    )
    return 1e3 * max(times)


def _machines() -> list[Any]:
    """Return the descriptions of the H100 and the H200."""
    files = (RESULTS / f"{name}.json" for name in ("gpu/decode", "gpu_h200/trace"))
    return [json.loads(file.read_text(encoding="utf-8"))["machine"] for file in files]


def predicted_parts() -> tuple[dict[str, list[float]], list[float]]:
    """Return times in ms on an H100 (predicted) and an H200 (predicted, measured), for each part and for the step.

    The copy of selected KV overlaps with all other parts. The measured time of the launch gaps is the rest of the step.
    """
    found, machines = _results("gpu/predicted"), _machines()
    wanted = ("infinigen-default", found["tokens"], 1)
    steps = _results("gpu_h200/trace")["rows"]
    [traced] = [row for row in steps if (row["baselines"], row["context"], row["batch"]) == wanted]
    parts, copies = {}, found["rows"][-1]["name"]
    for row in found["rows"]:
        kernels = (k["us"] for k in traced["trace"]["kernels"] if any(name in k["kernel"] for name in row["traced"]))
        parts[row["name"]] = [*(_fastest(row, machine) for machine in machines), sum(kernels) / 1e3]
    copied, device = parts.pop(copies), [sum(times) for times in zip(*parts.values(), strict=True)]
    gaps = [LAUNCH_GAP_MS * found["nodes"]] * 2 + [traced["median_ms"] - device[2]]
    total = [max(a + b, c) for a, b, c in zip(device, gaps, copied, strict=True)]
    return parts | {f"{found['nodes']:,} launch gaps; other kernels": gaps, f"{copies}, overlapped": copied}, total


def predicted() -> str:
    """Times of the default's decode step at 131,072 tokens from bytes and instructions, and measured times.

    The last row is a step of `full` with all KV on the device.
    """
    counts = {row["name"]: row for row in _results("gpu/predicted")["rows"]}
    parts, step = predicted_parts()
    rows = []
    for name, times in (parts | {"step": step}).items():
        row = counts.get(name.partition(", overlapped")[0])
        work = ["", ""] if row is None else [f"{row[key] / 1e9:.2f}" for key in ("device_bytes", "instructions")]
        rows.append([name, *work, *(f"{time:.2f}" for time in times)])
    full = _results("gpu/predicted")["full"]
    work = [f"{sum(row[key] for row in full['rows']) / 1e9:.2f}" for key in ("device_bytes", "instructions")]
    times = [LAUNCH_GAP_MS * full["nodes"] + sum(_fastest(row, one) for row in full["rows"]) for one in _machines()]
    rows.append(["step of `full`, KV on the device", *work, *(f"{time:.2f}" for time in times), ""])
    head = ("H100, predicted", "H200, predicted", "H200, measured")
    return table(("part", "device memory, GB", "instructions, billions", *head), rows)


def working_sets() -> str:
    """Hit rates of working sets, and the PCIe time of a step of the 8B shape at 131,072 tokens without them."""
    machine = json.loads((RESULTS / "gpu/decode.json").read_text(encoding="utf-8"))["machine"]
    steps = _results("gpu/decode")["rows"]
    [kv] = [row["h2d_bytes_per_token"] for row in steps if (row["name"], row["context"]) == ("full", 131_072)]
    whole = 1e3 * kv / machine["bandwidth"]["host_to_device"]
    rows = []
    for model, context in ((model, context) for model in NAMES for context in (16_384, 32_768)):
        if not (RESULTS / model / f"working_set_{context}.json").exists():
            continue
        found = load(f"{model}/working_set_{context}")
        for policy in dict.fromkeys(row["variant"] for row in found):
            own = [row for row in found if row["variant"] == policy]
            rates = [f"{row['hit_rate']:.0%}" for row in own]
            name = "default" if own[0]["options"].get("budget") is None else "5%, no approximate KV"
            rows.append([NAMES[model], f"{context:,}", name, *rates, f"{whole * own[0]['selected']:.1f}"])
    shares = ("2%", "4%", "8%")
    assert all(row["share"] in (0.02, 0.04, 0.08) for row in found)
    return table(("model", "context", "setting", *(f"hits: {share}" for share in shares), "copy, ms"), rows)
