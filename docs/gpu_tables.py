"""Tables of GPU measurements for `docs/pages/results.md`."""

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

KERNELS = {
    "_gather_tokens": "transfer of the selected KV (own stream)",
    "nvjet": "matrix products",
    "_attend": "approximate and exact attention",
    "_score": "scores of all tokens",
    "_histogram": "selection: n-th largest score",
    "_join": "merge of approximate and exact attention",
    "_mark": "selection: tokens above the threshold",
    "_hide": "marks of the selected tokens",
    "_exclude": "marks of the selected tokens",
    "_append": "append to the approximate KV",
    "_skew": "skewed queries",
    "sm80_xmma": "skewed queries",
}
"""Kernels of the default by the beginning of their name."""


def gpu() -> str:
    """Time per token on a GPU by context length."""
    data = json.loads((RESULTS / "gpu" / "time_per_token.json").read_text(encoding="utf-8"))["data"]
    contexts = sorted({context for points in data.values() for context, _ in points})
    rows = []
    for name, label in GPU_ROWS.items():
        by = dict(map(tuple, data[name]))
        rows.append([label, *(f"{by[context]:.1f}" if context in by else "" for context in contexts)])
    return table(("", *(f"{context:,} tokens" for context in contexts)), rows)


def _results(name: str) -> Any:
    return json.loads((RESULTS / "gpu_h200" / f"{name}.json").read_text(encoding="utf-8"))["results"]


def _traces(name: str) -> dict[tuple[str, int, int], Any]:
    return {(row["baselines"], row["context"], row["batch"]): row for row in _results(name)["rows"]}


def h200() -> str:
    """Decode steps on an H200, before and after the changes of the same day."""
    before, after = _traces("trace_before"), _traces("trace")
    points = ((8_192, 1), (131_072, 1), (32_768, 8))
    rows = []
    for name, label in TRACED.items():
        cells = []
        for point in points:
            times = [f"{found[name, *point]['median_ms']:.1f}" for found in (before, after) if (name, *point) in found]
            cells.append(" → ".join(times))
        rows.append([label, *cells])
    return table(("", "8,192 tokens", "131,072 tokens", "8 sequences of 32,768 tokens"), rows)


def h200_kernels() -> str:
    """Time of the kernels of the default at 131,072 tokens, before and after."""
    sums: dict[str, list[float]] = {}
    for i, found in enumerate((_traces("trace_before"), _traces("trace"))):
        for kernel in found["infinigen-default", 131_072, 1]["trace"]["kernels"]:
            label = next((own for start, own in KERNELS.items() if kernel["kernel"].startswith(start)), "all others")
            sums.setdefault(label, [0.0, 0.0])[i] += kernel["us"] / 1000
    others = sums.pop("all others")
    rows = [[label, f"{a:.2f}", f"{b:.2f}"] for label, (a, b) in sorted(sums.items(), key=lambda item: -item[1][0])]
    rows.append(["all others", *(f"{each:.2f}" for each in others)])
    return table(("ms per step", "before", "after"), rows)


def h200_prefill() -> str:
    """Time to the first token on an H200."""
    rows = [
        [f"{row['shape']}, {row['tokens']:,} tokens", row["program"], f"{row['seconds']:.3f}"]
        for row in _results("prefill")["rows"]
    ]
    return table(("shape", "program", "seconds"), rows)


def h200_trained() -> str:
    """SmolLM2 on an H200, compared with transformers on the same GPU."""
    found = _results("trained")["smollm2"]
    rows = []
    for dtype in ("float32", "bfloat16"):
        for row in found[dtype]:
            equal = f"{row['equal tokens']} of {row['tokens']}"
            rates = (f"{row['tokens/s']:.0f}", f"{row['transformers tokens/s']:.0f}")
            rows.append([dtype, f"{row['prompt']:,}", f"`{row['policy']}`", equal, *rates])
    head = ("data type", "prompt", "policy", "tokens equal to transformers", "tokens/s", "transformers tokens/s")
    return table(head, rows)
