"""Report of the speed benchmark as JSON, Markdown, tables and plots."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ...utils.native_libraries import native_status
from ..core.report import write_atomic
from .baselines import Baseline, Shape
from .step_profiler import BREAKDOWN, breakdown


@dataclass(frozen=True)
class Timing:
    """Result of one baseline at one point.

    Attributes:
        name: Name of the baseline.
        shape: Name of the shape.
        batch: Number of sequences.
        context: Context length in tokens.
        median: Median time of a step in ms.
        lower: Lower quartile in ms.
        upper: Upper quartile in ms.
        samples: Number of timed steps.
        facts: Further columns of the baseline.
        stages: Seconds of a step by stage.
        parts: Seconds of the step of a layer by part of `BREAKDOWN`.
    """

    name: str
    shape: str
    batch: int
    context: int
    median: float
    lower: float
    upper: float
    samples: int
    facts: dict[str, Any]
    stages: dict[str, float]
    parts: dict[str, float]

    @classmethod
    def of(
        cls, baseline: Baseline, point: Point, seconds: Sequence[float], stages: dict[str, float], layers: int
    ) -> Timing:
        """Create the result from the seconds of single steps."""
        lower, median, upper = (1e3 * q for q in statistics.quantiles(seconds, n=4, method="inclusive"))
        parts = breakdown(stages, layers) if stages else {}
        return cls(
            baseline.name,
            point.shape,
            point.batch,
            point.context,
            median,
            lower,
            upper,
            len(seconds),
            baseline.facts(),
            stages,
            parts,
        )

    @property
    def point(self) -> Point:
        """Point of the measurement."""
        return Point(self.shape, self.batch, self.context)


@dataclass(frozen=True)
class Point:
    """A measured point: name of the shape, number of sequences, context length in tokens."""

    shape: str
    batch: int
    context: int

    def __str__(self) -> str:
        sequences = f", {self.batch} sequences" if self.batch > 1 else ""
        return f"{self.shape}, {self.context:,} tokens{sequences}"


def describe(config: Any, shapes: dict[str, Shape], device: torch.device, skipped: Sequence[str]) -> dict[str, Any]:
    """Describe machine, versions and settings. `config` is a `BenchConfig`."""
    made = {name: asdict(shape) for name, shape in shapes.items()}
    for shape in made.values():
        shape["dtype"] = str(shape["dtype"]).removeprefix("torch.")
    spread = f"from {1 - config.spread:.0%} to {1 + config.spread:.0%} of that by head" if config.spread else "each"
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "commit": _commit(),
        "processor": _processor(),
        "native_code": str(native_status()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "config": asdict(config),
        "shape": made[config.shape],
        "shapes": made,
        "clock": "wall time, synchronised" if device.type == "cuda" else "CPU time of the process",
        "keys": f"random weights; {config.fraction:.0%} of tokens planted, others for each layer and KV head, {spread}",
        "skipped": list(skipped),
    }


def _commit() -> str:
    try:
        here = Path(__file__).resolve().parent
        command = ["git", "-C", str(here), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not from a repository"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write_report(out: Path, report: dict[str, Any], timings: Sequence[Timing]) -> list[Path]:
    """Write `decode_step.json`, `.md`, `.png` and, if stages were measured, `breakdown.png` to `out`.

    Returns the paths. Raises InputError if a file cannot be written.
    """
    write_atomic(out / "decode_step.json", json.dumps(report, indent=1) + "\n")
    write_atomic(out / "decode_step.md", markdown(report, timings))
    plot(timings, out / "decode_step.png")
    paths = [out / f"decode_step.{suffix}" for suffix in ("json", "md", "png")]
    if any(timing.parts for timing in timings):
        plot_breakdown(timings, out / "breakdown.png")
        paths.append(out / "breakdown.png")
    return paths


# -------------------------------------------------------------------------------------------------------------- tables


def points(timings: Sequence[Timing]) -> list[Point]:
    """Return the distinct points in order."""
    return list(dict.fromkeys(timing.point for timing in timings))


def _at(point: Point, timings: Sequence[Timing]) -> list[Timing]:
    return [timing for timing in timings if timing.point == point]


def _rows(here: Sequence[Timing]) -> list[list[str]]:
    """Return the table cells of each baseline at one point."""
    medians = {timing.name: timing.median for timing in here}
    rivals = [medians.get(name) for name in ("StaticCache", "DynamicCache")]
    rows = []
    for t in here:
        ratios = ["" if rival is None else f"{rival / t.median:.2f}" for rival in rivals]
        dense = t.facts.get("dense_layers")
        fraction, crossing = t.facts.get("exact_fraction"), t.facts.get("link_bytes_per_token")
        rows.append(
            [
                t.name,
                f"{t.median:.2f}",
                f"{t.lower:.2f}-{t.upper:.2f}",
                *ratios,
                "" if dense is None else ",".join(map(str, dense)) or "none",
                "" if fraction is None else f"{fraction:.1%}",
                "" if crossing is None else f"{crossing / 2**20:.1f}",
            ]
        )
    return rows


_HEAD = ["baseline", "ms/step", "quartiles", "x Static", "x Dynamic", "dense layers", "attended", "link MiB/token"]


def table(point: Point, timings: Sequence[Timing]) -> Table:
    """Return a table of times and speedups over transformers."""
    made = Table(title=f"Decode step: {point}", title_justify="left")
    for name in _HEAD:
        made.add_column(name, justify="left" if name == _HEAD[0] else "right", no_wrap=name == _HEAD[0])
    for row in _rows(_at(point, timings)):
        made.add_row(*row)
    return made


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_pipes(head), _pipes(["---"] * len(head)), *(_pipes(row) for row in rows), ""]


def markdown(report: dict[str, Any], timings: Sequence[Timing]) -> str:
    """Return the report as Markdown."""
    keys = (
        "date", "commit", "processor", "native_code", "device", "python", "torch", "transformers", "clock", "keys",
        "shapes",
    )  # fmt: skip
    config = report["config"]
    lines = ["# Decode step", "", *(f"- {key}: {report[key]}" for key in keys)]
    lines += [f"- {config['threads']} thread(s), {config['repeats']} repeats of 2 tokens each"]
    lines += [f"- skipped {reason}" for reason in report["skipped"]] + [""]
    for point in points(timings):
        here = _at(point, timings)
        lines += [f"## {point}", "", *_grid(_HEAD, _rows(here))]
        staged = [t for t in here if t.stages]
        if not staged:
            continue
        layer = [[part, *(f"{1e3 * t.parts[part]:.2f}" for t in staged)] for part in BREAKDOWN]
        lines += ["A layer's step, ms, nothing overlapping:", "", *_grid(["part", *(t.name for t in staged)], layer)]
        names = list(dict.fromkeys(stage for t in staged for stage in t.stages))
        whole = [[name, *(f"{1e3 * t.stages.get(name, 0):.2f}" for t in staged)] for name in names]
        lines += ["The whole step, ms:", "", *_grid(["stage", *(t.name for t in staged)], whole)]
    return "\n".join(lines).rstrip() + "\n"


# ------------------------------------------------------------------------------------------------------------ pictures

_AXES = {"context": "tokens in context", "batch": "sequences", "shape": "shape"}


def _swept(timings: Sequence[Timing]) -> str:
    """Return the axis with the most distinct values."""
    return max(_AXES, key=lambda axis: len({getattr(timing, axis) for timing in timings}))


def plot(timings: Sequence[Timing], path: Path) -> None:
    """Plot the time per step with quartiles over the varied parameter (InfiniGen, Figures 14 to 16).

    If several parameters vary, the x axis is the one with the most values, and the others distinguish lines.
    """
    from matplotlib.figure import Figure

    axis = _swept(timings)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    values = list(dict.fromkeys(getattr(timing, axis) for timing in timings))
    numeric = axis != "shape"
    lines: dict[str, list[Timing]] = {}
    for timing in timings:
        others = [str(getattr(timing, other)) for other in _AXES if other != axis]
        several = len({tuple(getattr(t, other) for other in _AXES if other != axis) for t in timings}) > 1
        lines.setdefault(f"{timing.name} ({', '.join(others)})" if several else timing.name, []).append(timing)
    for name, own in lines.items():
        places = [getattr(t, axis) if numeric else values.index(getattr(t, axis)) for t in own]
        spread = [[t.median - t.lower for t in own], [t.upper - t.median for t in own]]
        axes.errorbar(places, [t.median for t in own], yerr=spread, marker="o", capsize=3, label=name)
    axes.set(xlabel=_AXES[axis], ylabel="ms per step", yscale="log", xscale="log" if numeric else "linear")
    places = [value if numeric else place for place, value in enumerate(values)]
    axes.set_xticks(places, [f"{value:,}" if numeric else value for value in values])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)


def plot_breakdown(timings: Sequence[Timing], path: Path) -> None:
    """Plot the breakdown of the step of a layer as stacked bars (InfiniGen, Figure 18)."""
    from matplotlib.figure import Figure

    staged = [timing for timing in timings if timing.parts]
    figure = Figure(figsize=(9, 1.5 + 0.35 * len(staged)), layout="constrained")
    axes = figure.subplots()
    names = [f"{timing.name} · {timing.point}" for timing in staged]
    before = [0.0] * len(staged)
    for part in BREAKDOWN:
        widths = [1e3 * timing.parts[part] for timing in staged]
        axes.barh(names, widths, left=before, label=part)
        before = [x + width for x, width in zip(before, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="ms of one layer's step, nothing overlapping")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)
