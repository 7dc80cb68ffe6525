"""Compare a decode step with transformers and its caches, over context lengths, batch sizes and model sizes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from ...core import BLOCK_SIZE
from ...engine.build import build_transfer
from ...errors import ConfigError, MemoryLimitError
from ...kv_cache.pool import HostPool
from ...models.linear import use_backends
from ...models.registry import adapter_for
from ...utils.config_fields import check_choice, option
from ..core.plots import lines, picture
from ..core.report import Column, Report, Row, Say
from .baselines import MAKERS, SHAPES, Baseline, BenchInputs, Shape, Skipped, SyntheticContext
from .synthetic_kv import SyntheticKV

BURST = 2
"""Number of tokens that a baseline decodes per turn.

The first token is decoded with cold processor caches, and the second with warm caches.
"""

WARM_UP = 2
"""Number of untimed turns of each baseline before the measurement."""

COLUMNS = (
    Column("shape", "shape"),
    Column("sequences", "batch"),
    Column("tokens", "context", ","),
    Column("baseline", "name"),
    Column("ms/step", "median", ".2f"),
    Column("lower quartile", "lower", ".2f"),
    Column("upper", "upper", ".2f"),
    Column("x StaticCache", "over_static", ".2f"),
    Column("x DynamicCache", "over_dynamic", ".2f"),
    Column("dense layers", "dense_layers"),
    Column("attended", "exact_fraction", ".1%"),
    Column("copied MiB/token", "h2d_mib", ".1f"),
)


@dataclass(frozen=True)
class BenchConfig:
    shape: tuple[str, ...] = option(("small",), help=f"random Llamas: {', '.join(SHAPES)}", metavar="A,B")
    layers: int | None = option(None, help="number of layers instead of the shape's", metavar="N")
    contexts: tuple[int, ...] = option((16_384, 32_768), help="tokens, multiples of 64", metavar="16k,32k")
    batches: tuple[int, ...] = option((1,), help="sequences decoded together, without shared prefix", metavar="1,4")
    fraction: float = option(0.05, help="fraction of planted tokens", metavar="F")
    spread: float = option(0.5, help="maximum relative deviation of the fraction of a KV head", metavar="F")
    baselines: tuple[str, ...] = option(
        ("static", "dynamic", "full", "infinigen", "floor", "floor-ours"),
        help=f"of {', '.join(MAKERS)}, or all",
        metavar="A,B",
    )
    repeats: int = option(12, help=f"turns of each baseline, {BURST} tokens each", metavar="N")
    threads: int = option(1, help="threads", metavar="N")
    device: str = option("auto", help="device", metavar="auto|cpu|cuda")
    dtype: str = option("auto", help="data type; auto is float32 on a CPU", metavar="auto|float32|bfloat16|float16")

    def __post_init__(self) -> None:
        if self.baselines == ("all",):
            object.__setattr__(self, "baselines", tuple(MAKERS))
        for shape in self.shape:
            check_choice("shape", shape, SHAPES)
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        for name in self.baselines:
            check_choice("baseline", name, MAKERS)
        for context in self.contexts:
            if context < 2 * BLOCK_SIZE or context % BLOCK_SIZE:
                raise ConfigError(f"contexts={context} must be a multiple of {BLOCK_SIZE}, at least {2 * BLOCK_SIZE}")
        for batch in self.batches:
            if batch < 1:
                raise ConfigError(f"batches={batch} must be at least 1")
        for name, least in (("layers", 1), ("repeats", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} must be at least {least}")
        if not 0 <= self.spread < 1:
            raise ConfigError(f"spread={self.spread} must be in [0, 1)")
        if not 0 < self.fraction <= 0.2:
            raise ConfigError(f"fraction={self.fraction} must be in (0, 0.2]: policies select no larger fraction")

    def made_shape(self, name: str, device: torch.device) -> Shape:
        """Return the shape `name` with the configured number of layers and dtype.

        On a CPU, the dtype "auto" means float32.
        """
        shape = SHAPES[name]
        dtype = {"auto": torch.float32 if device.type == "cpu" else shape.dtype}.get(self.dtype)
        return replace(shape, layers=self.layers or shape.layers, dtype=dtype or getattr(torch, self.dtype))


@dataclass(frozen=True)
class Point:
    shape: str
    batch: int
    context: int

    def __str__(self) -> str:
        sequences = f", {self.batch} sequences" if self.batch > 1 else ""
        return f"{self.shape}, {self.context:,} tokens{sequences}"


def run_bench(config: BenchConfig, out: Path, say: Say) -> Report:
    """Measure every baseline for every shape, batch size and context length.

    Write `decode_step.json`, `.csv`, `.md` and `time_per_step.png` to `out`. Raises ConfigError if the device does not
    exist.
    """
    device = _device(config.device)
    about = _about(config, device)
    report = Report("decode_step", "Decode step", about, COLUMNS, [])
    report.write(out)  # if `out` cannot be written, raise InputError before the measurement
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        for shape in config.shape:
            model = config.made_shape(shape, device).model(max(config.contexts) + 4096, device)
            for batch in config.batches:
                for context in config.contexts:
                    report.rows.extend(measure(config, model, Point(shape, batch, context), say, about["skipped"]))
                    report.write(out)
    finally:
        torch.set_num_threads(threads)
    plot(report.rows, out / "time_per_step.png")
    return report


def _about(config: BenchConfig, device: torch.device) -> dict[str, Any]:
    shapes = {name: asdict(config.made_shape(name, device)) for name in config.shape}
    for shape in shapes.values():
        shape["dtype"] = str(shape["dtype"]).removeprefix("torch.")
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "clock": "wall time, synchronised" if device.type == "cuda" else "CPU time of the process",
        "keys": "random weights; planted tokens differ by layer and KV head",
        "config": asdict(config),
        "shapes": shapes,
        "skipped": [],
    }


def measure(config: BenchConfig, model: Any, point: Point, say: Say, skipped: list[str]) -> list[Row]:
    """Measure all baselines at one point.

    On a CPU, they take turns. Baselines that cannot run are added to `skipped`.
    """
    # On CUDA the baselines run one after another, because device memory is too small for all at once.
    room = point.context + (WARM_UP + config.repeats) * BURST + BLOCK_SIZE
    inputs = make_inputs(model, point.context, room, config.fraction, config.spread, point.batch)
    rows: list[Row] = []
    for names in [(name,) for name in config.baselines] if _is_cuda(model) else [config.baselines]:
        try:
            rows += _interleaved(config, inputs, point, names, say, skipped)
        except (torch.OutOfMemoryError, MemoryLimitError) as error:
            line = f"{', '.join(names)} at {point}: the device has no room for it ({str(error).splitlines()[0]})"
            _skip(line, say, skipped)
    medians = {row["name"]: row["median"] for row in rows}
    for row in rows:
        for key, rival in (("over_static", "StaticCache"), ("over_dynamic", "DynamicCache")):
            row[key] = medians[rival] / row["median"] if rival in medians else None
    return rows


def _interleaved(
    config: BenchConfig, inputs: BenchInputs, point: Point, names: Sequence[str], say: Say, skipped: list[str]
) -> list[Row]:
    """Measure the baselines `names`, which take turns. All of them are in memory at the same time."""
    baselines = _baselines(names, inputs, say, skipped)
    for layer, kv in enumerate(inputs.synthetic.layers(inputs.model.device)):
        for baseline in baselines:
            baseline.fill(layer, kv)
    read = _clock(inputs.model.device)
    say(f"{point}: {', '.join(baseline.name for baseline in baselines)}")
    seconds: list[list[float]] = [[] for _ in baselines]
    for repeat in range(WARM_UP + config.repeats):
        for baseline, spent in zip(baselines, seconds, strict=True):
            for _ in range(BURST):
                began = read()
                baseline.step()
                if repeat >= WARM_UP:
                    spent.append(read() - began)
    return [_row(baseline, point, spent) for baseline, spent in zip(baselines, seconds, strict=True)]


def _row(baseline: Baseline, point: Point, seconds: Sequence[float]) -> Row:
    lower, median, upper = (1e3 * q for q in quantiles(seconds, n=4, method="inclusive"))
    facts = baseline.facts()
    crossing = facts.get("h2d_bytes_per_token")
    row = {"name": baseline.name, **asdict(point), "median": median, "lower": lower, "upper": upper}
    return row | {"steps": len(seconds), "h2d_mib": None if crossing is None else crossing / 2**20, **facts}


def make_inputs(
    model: Any, length: int, room: int, fraction: float, spread: float = 0.0, batch: int = 1
) -> BenchInputs:
    """Create a synthetic context of `length` tokens in a pool that has room for `room` tokens per sequence and
    baseline.
    """
    adapter = adapter_for(model)
    synthetic = SyntheticKV.draw(adapter.geometry, length, fraction, spread)
    # Each of this runtime's baselines decodes forks of the context.
    slots = batch * (length + len(MAKERS) * (room - length + BLOCK_SIZE))
    limit = adapter.geometry.kv_bytes(2 * slots, adapter.dtype)
    pool = HostPool(adapter.geometry, adapter.dtype, limit, pin=_is_cuda(model))
    transfer = build_transfer(pool, adapter.geometry, model.device)
    context = SyntheticContext(pool, transfer, synthetic, room, batch, model.device)
    return BenchInputs(model, _own(model), synthetic, context, room, batch)


def _baselines(names: Sequence[str], inputs: BenchInputs, say: Say, skipped: list[str]) -> list[Baseline]:
    made = []
    for name in (name for name in MAKERS if name in names):
        try:
            made.append(MAKERS[name](inputs))
        except Skipped as reason:
            _skip(f"{name}: it {reason}", say, skipped)
    return made


def _skip(line: str, say: Say, skipped: list[str]) -> None:
    if line not in skipped:
        say(f"skipped {line}")
        skipped.append(line)


def _own(model: Any) -> Any:
    if _is_cuda(model):
        return model
    own = copy.deepcopy(model)
    use_backends(own, torch.device("cpu"))
    return own


def _is_cuda(model: Any) -> bool:
    return bool(model.device.type == "cuda")


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if available else "cpu")
    check_choice("device", name, ("cpu", "cuda"))
    if name == "cuda" and not available:
        raise ConfigError("device='cuda' was requested, but there is no CUDA device")
    return torch.device(name)


def _clock(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds.

    On a CPU, it measures the CPU time of the process. On other devices, it measures wall time after synchronizing the
    device.
    """
    if device.type == "cpu":
        return time.process_time

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plot the time per step, with quartiles, against the setting that is varied (InfiniGen, Figures 14 to 16).

    The x axis shows the setting that has the most values. There is one line for each combination of the other settings.
    """
    settings = {"context": "tokens in context", "batch": "sequences", "shape": "shape"}
    values = {key: list(dict.fromkeys(row[key] for row in rows)) for key in settings}
    x = max(settings, key=lambda key: len(values[key]))
    varied = [key for key in settings if key != x and len(values[key]) > 1]
    series: dict[str, list[tuple[float, float]]] = {}
    errors: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = ", ".join([row["name"], *(str(row[key]) for key in varied)])
        series.setdefault(name, []).append((values[x].index(row[x]) if x == "shape" else row[x], row["median"]))
        errors.setdefault(name, []).append((row["median"] - row["lower"], row["upper"] - row["median"]))
    with picture(path, "Decode step", series) as (axis,):
        lines(axis, series, x=settings[x], y="ms per step", errors=errors)
        axis.set(yscale="log", xscale="linear" if x == "shape" else "log")
        axis.set_xticks(range(len(values[x])) if x == "shape" else values[x], list(map(str, values[x])))
        axis.minorticks_off()
