"""The speed of a decode step against transformers' caches: one process, the competitors in turns, CPU time (on CUDA:
synchronised wall time), medians and quartiles. Written as JSON, a table and a picture."""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..config import check_choice
from ..core import CHUNK
from ..errors import ConfigError, InputError, OffloadError
from ..models.column_order import order_by_columns
from ..models.registry import adapter_for
from ..pool.pool import HostPool
from ..transfer.cpu import CpuLink
from ..transfer.link import Link
from .competitors import MAKERS, SHAPES, Competitor, Context, Field, Ours, Shape, Skipped
from .planted import Planted

BURST = 2
"""Tokens a competitor decodes in its turn: the first finds the others' data in the processor's caches, the second its
own."""

WARM_UP = 2
"""Turns that are not counted."""


@dataclass(frozen=True)
class BenchConfig:
    """shape: a name in SHAPES; layers replaces its number of layers. contexts: tokens, each a multiple of 64.
    fraction: share of tokens planted. competitors: names in MAKERS. turns: of each competitor, BURST tokens each."""

    shape: str = "small"
    layers: int | None = None
    contexts: tuple[int, ...] = (16_384, 32_768)
    fraction: float = 0.05
    competitors: tuple[str, ...] = ("static", "dynamic", "full", "infinigen", "ideal", "floor", "floor-ours")
    turns: int = 12
    threads: int = 1
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        check_choice("shape", self.shape, SHAPES)
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        for name in self.competitors:
            check_choice("competitor", name, MAKERS)
        for context in self.contexts:
            if context < 2 * CHUNK or context % CHUNK:
                raise ConfigError(f"contexts={context} must be a multiple of {CHUNK}, at least {2 * CHUNK}")
        for name, least in (("layers", 1), ("turns", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} must be at least {least}")
        if not 0 < self.fraction <= 0.2:
            raise ConfigError(f"fraction={self.fraction} must be in (0, 0.2]: max_fraction caps a selection there")

    def made_shape(self, device: torch.device) -> Shape:
        """The shape with `layers` and `dtype` replaced; on a CPU "auto" is float32, which is faster there."""
        shape = SHAPES[self.shape]
        dtype = {"auto": torch.float32 if device.type == "cpu" else shape.dtype}.get(self.dtype)
        return replace(shape, layers=self.layers or shape.layers, dtype=dtype or getattr(torch, self.dtype))


@dataclass(frozen=True)
class Timing:
    """Milliseconds per token of one competitor at one context: median and quartiles; `facts` are its own."""

    name: str
    context: int
    median: float
    lower: float
    upper: float
    samples: int
    facts: dict[str, Any]
    stages: dict[str, float]

    @classmethod
    def of(cls, competitor: Competitor, context: int, seconds: Sequence[float], stages: dict[str, float]) -> Timing:
        """From the seconds of single tokens."""
        lower, median, upper = (1e3 * q for q in statistics.quantiles(seconds, n=4, method="inclusive"))
        return cls(competitor.name, context, median, lower, upper, len(seconds), competitor.facts(), stages)


def run_bench(config: BenchConfig, out: Path, console: Console) -> list[Timing]:
    """Measures every competitor at every context; writes `decode_step.json`, `.md` and `.png` into `out` and prints a
    table.

    Raises ConfigError for what `BenchConfig` refuses, InputError where `out` cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {str(out)!r}: {error.strerror}") from error
    device = _device(config.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    timings: list[Timing] = []
    try:
        model = config.made_shape(device).model(max(config.contexts) + 4096, device)
        for context in config.contexts:
            timings += measure(config, model, context, console)
    finally:
        torch.set_num_threads(threads)
    report = describe(config, device) | {"timings": [asdict(timing) for timing in timings]}
    (out / "decode_step.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / "decode_step.md").write_text(markdown(config, report, timings), encoding="utf-8")
    plot(timings, out / "decode_step.png")
    for context in config.contexts:
        console.print(table(context, timings))
    console.print(f"wrote {out}/decode_step.json, .md and .png")
    return timings


def measure(config: BenchConfig, model: Any, length: int, console: Console) -> list[Timing]:
    """All competitors at one context."""
    turns = WARM_UP + config.turns
    stage_steps = 2 * config.turns
    room = length + turns * BURST + stage_steps + CHUNK
    field = make_field(model, length, room, config.fraction)
    competitors = _competitors(config.competitors, field, console)
    for layer, kv in enumerate(field.planted.layers()):
        for competitor in competitors:
            competitor.fill(layer, kv)
    read = _clock(model.device)
    seconds: list[list[float]] = [[] for _ in competitors]
    for turn in range(turns):
        console.print(f"  {length:,} tokens: turn {turn + 1} of {turns}", end="\r")
        for competitor, spent in zip(competitors, seconds, strict=True):
            for _ in range(BURST):
                began = read()
                competitor.step()
                if turn >= WARM_UP:
                    spent.append(read() - began)
    stages = [c.stages(stage_steps, read) if isinstance(c, Ours) else {} for c in competitors]
    return [Timing.of(c, length, s, parts) for c, s, parts in zip(competitors, seconds, stages, strict=True)]


def make_field(model: Any, length: int, room: int, fraction: float) -> Field:
    """A planted context of `length` tokens for `model`, in a pool that also has room for every policy's new tokens."""
    adapter = adapter_for(model)
    geometry = adapter.geometry
    planted = Planted.draw(geometry, length, fraction)
    slots = length + len(MAKERS) * (room - length + CHUNK)
    pool = HostPool(geometry, adapter.dtype, geometry.kv_bytes(2 * slots, adapter.dtype), pin=_is_cuda(model))
    return Field(model, _own(model), planted, Context(pool, _link(model, pool), planted, room), room)


def _competitors(names: Sequence[str], field: Field, console: Console) -> list[Competitor]:
    made = []
    for name in MAKERS:
        if name in names:
            try:
                made.append(MAKERS[name](field))
            except Skipped as reason:
                console.print(f"skipped {name}: it {reason}")
    return made


def _own(model: Any) -> Any:
    if _is_cuda(model):
        return model
    own = copy.deepcopy(model)
    order_by_columns(own)
    return own


def _is_cuda(model: Any) -> bool:
    return bool(model.device.type == "cuda")


def _link(model: Any, pool: HostPool) -> Link:
    if not _is_cuda(model):
        return CpuLink(pool)
    from ..transfer.cuda import CudaLink

    return CudaLink(pool, adapter_for(model).geometry, model.device)


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if available else "cpu")
    check_choice("device", name, ("cpu", "cuda"))
    if name == "cuda" and not available:
        raise ConfigError("device='cuda' was asked for, and there is no CUDA device here")
    return torch.device(name)


def _clock(device: torch.device) -> Callable[[], float]:
    """Seconds: of this process' CPU time, or of wall time with the device's work done."""
    if device.type == "cpu":
        return time.process_time

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


# ------------------------------------------------------------------------------------------------------------ report


def describe(config: BenchConfig, device: torch.device) -> dict[str, Any]:
    """What was measured, on what, with what."""
    shape = asdict(config.made_shape(device))
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "commit": _commit(),
        "processor": _processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "config": asdict(config),
        "shape": shape | {"dtype": str(shape["dtype"]).removeprefix("torch.")},
        "clock": "wall time, synchronised" if device.type == "cuda" else "CPU time of the process",
        "keys": f"random weights; {config.fraction:.0%} of tokens planted, others but as many for each layer and KV "
        "head (heads with uneven counts must also rank what passes, which takes longer)",
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


def _median(timings: Sequence[Timing], name: str, context: int) -> float | None:
    return next((t.median for t in timings if t.name == name and t.context == context), None)


def _rows(context: int, timings: Sequence[Timing]) -> list[list[str]]:
    """One row of text per competitor."""
    rivals = [_median(timings, name, context) for name in ("StaticCache", "DynamicCache")]
    rows = []
    for t in (t for t in timings if t.context == context):
        ratios = ["" if rival is None else f"{rival / t.median:.2f}" for rival in rivals]
        dense = t.facts.get("dense_layers")
        fraction, crossing = t.facts.get("attended_fraction"), t.facts.get("link_bytes_per_token")
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


_HEAD = [
    "competitor",
    "ms/token",
    "quartiles",
    "x Static",
    "x Dynamic",
    "dense layers",
    "attended",
    "link MiB/token",
]


def table(context: int, timings: Sequence[Timing]) -> Table:
    """Times and how many times faster than transformers; stages of ours in ms."""
    made = Table(title=f"Decode step, {context:,} tokens", title_justify="left")
    for name in _HEAD:
        made.add_column(name, justify="left" if name == _HEAD[0] else "right", no_wrap=name == _HEAD[0])
    for row in _rows(context, timings):
        made.add_row(*row)
    return made


def _pipes(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def markdown(config: BenchConfig, report: dict[str, Any], timings: Sequence[Timing]) -> str:
    """The report as a page."""
    keys = ("date", "commit", "processor", "device", "python", "torch", "transformers", "clock", "keys", "shape")
    lines = ["# Decode step", "", *(f"- {key}: {report[key]}" for key in keys)]
    lines += [f"- {config.threads} thread(s), {config.turns} turns of {BURST} tokens each", ""]
    for context in config.contexts:
        lines += [f"## {context:,} tokens", "", _pipes(_HEAD), _pipes(["---"] * len(_HEAD))]
        lines += [_pipes(row) for row in _rows(context, timings)]
        staged = [t for t in timings if t.context == context and t.stages]
        names = list(dict.fromkeys(stage for t in staged for stage in t.stages))
        lines += ["", "Stages of ours, ms per token:", "", _pipes(["stage", *(t.name for t in staged)])]
        lines += [_pipes(["---"] * (1 + len(staged)))]
        lines += [_pipes([name, *(f"{1e3 * t.stages.get(name, 0):.2f}" for t in staged)]) for name in names]
        lines += [""]
    return "\n".join(lines)


def plot(timings: Sequence[Timing], path: Path) -> None:
    """Milliseconds per token over the context, with quartiles."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(t.name for t in timings):
        own = [t for t in timings if t.name == name]
        spread = [[t.median - t.lower for t in own], [t.upper - t.median for t in own]]
        axes.errorbar([t.context for t in own], [t.median for t in own], yerr=spread, marker="o", capsize=3, label=name)
    axes.set(xlabel="tokens in context", ylabel="ms per token", yscale="log", xscale="log")
    contexts = sorted({t.context for t in timings})
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=130)


# ----------------------------------------------------------------------------------------------------------- command


def bench_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bench`."""
    default = BenchConfig()
    parser.add_argument("--out", default="out", metavar="DIR", help="folder for JSON, table and picture (default: out)")
    parser.add_argument("--shape", default=default.shape, metavar="|".join(SHAPES), help="of the random Llama")
    parser.add_argument("--layers", type=int, metavar="N", help="only so many layers of the shape")
    parser.add_argument("--contexts", type=_numbers, default=default.contexts, metavar="16384,32768", help="tokens")
    parser.add_argument("--fraction", type=float, default=default.fraction, metavar="F", help="share of planted tokens")
    parser.add_argument("--turns", type=int, default=default.turns, metavar="N", help=f"of {BURST} tokens each")
    parser.add_argument("--threads", type=int, default=default.threads, metavar="N")
    parser.add_argument("--device", default=default.device, metavar="auto|cpu|cuda")
    parser.add_argument("--dtype", default=default.dtype, metavar="auto|float32|bfloat16|float16")
    parser.add_argument(
        "--competitors", type=_names, default=default.competitors, metavar="A,B", help=f"of {', '.join(MAKERS)}, or all"
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers; write 16384,32768") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(MAKERS) if text == "all" else tuple(text.split(","))


def bench(argv: Sequence[str] | None = None) -> int:
    """The command `offload-rt bench`, from its arguments: 0. Raises what `run_bench` raises."""
    parser = argparse.ArgumentParser(prog="offload-rt bench", description=__doc__)
    bench_flags(parser)
    args = vars(parser.parse_args(argv))
    out = Path(args.pop("out"))
    run_bench(BenchConfig(**args), out, Console())
    return 0


if __name__ == "__main__":
    try:
        bench()
    except OffloadError as error:
        print(f"bench: {error}", file=sys.stderr)
        sys.exit(2)
