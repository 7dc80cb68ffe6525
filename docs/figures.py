"""Draw the figures of `docs/pages/report.md` from `eval/results` into `docs/pages/pictures`. `make docs` runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_tables import step_times, traced_times
from result_rows import NAMES, RESULTS, ROOT, Row, load
from speed_tables import DYNAMIC

from offload_rt.eval.core.plots import lines, picture

PICTURES = ROOT / "docs" / "pages" / "pictures"
MODELS = ("smollm2", "qwen")
GPU = {
    "StaticCache": "H100: transformers, StaticCache",
    "full": "H100: offload-rt, all KV copied",
    "infinigen, int4 tail": "H100: offload-rt, 5% fetched",
}
TRACED = {"infinigen-default": "H200: offload-rt, 2% fetched", "resident": "H200: all KV on the device, one CUDA graph"}


def quality() -> None:
    """Draw the KL divergence against the share of the KV cache that is fetched per token."""
    data = _points([*load("smollm2/divergence_presets"), *load("smollm2/divergence")])
    with picture(PICTURES / "quality_bytes.png", "Distance from full attention: SmolLM2, novel, float32", data) as [
        axis
    ]:
        lines(axis, data, x="KV fetched per token", y="mean KL divergence, nats", percent="x")
        axis.set_yscale("log")


def _points(rows: list[Row]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, set[tuple[float, float]]] = {}
    for row in rows:
        if row["policy"] != "full":
            found.setdefault(_series(row), set()).add((row["sparse_fetched"], row["kl"]))
    return {name: sorted(points) for name, points in found.items()}


OTHERS = ("snapkv", "h2o", "streaming")
"""Policies with about the same divergence, which share a line."""


def _series(row: Row) -> str:
    if "preset" in row["options"]:
        return "default" if row["options"]["preset"] == "default" else f"preset {row['options']['preset']}"
    if row["policy"] != "infinigen":
        return ", ".join(OTHERS) if row["policy"] in OTHERS else str(row["policy"])
    return "no approximate KV" if row["options"]["approximate_kv"] == "off" else "4-bit approximate KV"


def steps() -> None:
    """Draw the time per token against the context length, on a CPU and a GPU."""
    cpu: dict[str, list[tuple[float, float]]] = {}
    for name in ("qwen/rows_in_c", "qwen/rows_in_c/long"):
        for row in load(f"{name}/real_speed"):
            if row["runtime"] in (DYNAMIC, "full", "infinigen"):
                cpu.setdefault(row["runtime"], []).append((row["context"], row["step"]))
    parts = ((GPU, step_times()), (TRACED, traced_times()))
    gpu = {label: sorted(times[name].items()) for names, times in parts for name, label in names.items()}
    data = {"cpu": {name: sorted(points) for name, points in cpu.items()}, "gpu": gpu}
    with picture(PICTURES / "step_time.png", "Time per token over context length", data, panels=(1, 2)) as axes:
        lines(axes[0], data["cpu"], x="context, tokens (Qwen 0.5B, one CPU thread)", y="ms per token")
        lines(axes[1], data["gpu"], x="context, tokens (8B model, random weights)", y="ms per token")
        for axis in axes:
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)


def missed() -> None:
    data = {NAMES[model]: _layers(RESULTS / model / "missed_by_layer.json") for model in MODELS}
    title = "Attention mass of the tokens that are not attended exactly, 5% exact"
    with picture(PICTURES / "missed_mass.png", title, data) as [axis]:
        lines(axis, data, x="layer", y="missed attention mass", percent="y")
        axis.set_ylim(bottom=0)


def _layers(path: Path) -> list[tuple[int, float]]:
    """Read statistics that `offload-rt generate --stats-json` wrote.

    Return (layer, mean missed attention mass) pairs.
    """
    rows = [masses for _, masses in json.loads(path.read_text(encoding="utf-8"))["missed_by_step"]]
    return [(layer, sum(masses) / len(rows)) for layer, masses in enumerate(zip(*rows, strict=True))]


if __name__ == "__main__":
    quality()
    steps()
    missed()
