"""Benchmark of a decode step compared with the caches of transformers, over context lengths, batches and model sizes.

All baselines run in one process, one after another. Times are CPU time, or synchronized wall time on CUDA, as medians
and quartiles. Results are written as JSON, tables and plots.

Counterparts of InfiniGen's figures: Figure 14 with `--batches 1,2,4,8`, Figure 15 with `--contexts 8192,16384,...`,
Figure 16 with `--shape a,b,c`. Every run contains the breakdown of Figure 18.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ...config import KVFormatName
from ...core import CHUNK
from ...engine.build import build_link
from ...errors import ConfigError, InputError
from ...kv_cache.pool import HostPool
from ...models.linear import use_backends
from ...models.registry import adapter_for
from ...utils.config_fields import check_choice
from .baselines import MAKERS, SHAPES, Baseline, Context, Field, Ours, Shape, Skipped
from .ideal_link import IdealLink
from .report import Point, Timing, describe, points, table, write_report
from .synthetic_kv import SyntheticKV

BURST = 2
"""Tokens per turn of a baseline: the first one runs with cold processor caches, the second with warm ones."""

WARM_UP = 2
"""Number of untimed turns."""


@dataclass(frozen=True)
class BenchConfig:
    """Settings of the benchmark.

    Attributes:
        shape: Key of `SHAPES`.
        layers: Replaces the number of layers of the shape.
        contexts: Context lengths in tokens, multiples of 64.
        batches: Numbers of sequences decoded together, without shared prefix.
        fraction: Fraction of planted tokens.
        spread: Maximum relative deviation of the fraction of a KV head.
        baselines: Keys of `MAKERS`.
        repeats: Number of turns of each baseline, `BURST` tokens each.
        threads: Number of threads.
        device: "auto", "cpu" or "cuda".
        dtype: "auto", "float32", "bfloat16" or "float16".
    """

    shape: str = "small"
    layers: int | None = None
    contexts: tuple[int, ...] = (16_384, 32_768)
    batches: tuple[int, ...] = (1,)
    fraction: float = 0.05
    spread: float = 0.5
    baselines: tuple[str, ...] = ("static", "dynamic", "full", "infinigen", "ideal", "floor", "floor-ours")
    repeats: int = 12
    threads: int = 1
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        check_choice("shape", self.shape, SHAPES)
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        for name in self.baselines:
            check_choice("baseline", name, MAKERS)
        for context in self.contexts:
            if context < 2 * CHUNK or context % CHUNK:
                raise ConfigError(f"contexts={context} must be a multiple of {CHUNK}, at least {2 * CHUNK}")
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
            raise ConfigError(f"fraction={self.fraction} must be in (0, 0.2]: max_fraction caps a selection there")

    def made_shape(self, device: torch.device) -> Shape:
        """Return the shape with `layers` and `dtype` applied. On a CPU, "auto" is float32, which is faster."""
        shape = SHAPES[self.shape]
        dtype = {"auto": torch.float32 if device.type == "cpu" else shape.dtype}.get(self.dtype)
        return replace(shape, layers=self.layers or shape.layers, dtype=dtype or getattr(torch, self.dtype))


def run_bench(config: BenchConfig, out: Path, console: Console, *others: str) -> list[Timing]:
    """Measure every baseline at every context length and batch size.

    Writes `decode_step.json`, `.md`, `.png` and `breakdown.png` to `out` and prints tables.

    Args:
        config: Settings.
        out: Folder of the results.
        console: Receives progress and tables.
        *others: Further shapes to measure besides `config.shape`.

    Raises:
        ConfigError: If a setting is invalid.
        InputError: If `out` cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {str(out)!r}: {error.strerror}") from error
    device = _device(config.device)
    runs = [config, *(replace(config, shape=shape) for shape in others)]
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    timings: list[Timing] = []
    skipped: dict[str, None] = {}
    try:
        for run in runs:
            model = run.made_shape(device).model(max(run.contexts) + 4096, device)
            for batch in run.batches:
                for context in run.contexts:
                    timings += measure(run, model, Point(run.shape, batch, context), console, skipped)
    finally:
        torch.set_num_threads(threads)
    report = describe(config, {run.shape: run.made_shape(device) for run in runs}, device, list(skipped))
    report["timings"] = [asdict(timing) for timing in timings]
    paths = write_report(out, report, timings)
    for point in points(timings):
        console.print(table(point, timings))
    console.print(f"wrote {', '.join(map(str, paths))}", soft_wrap=True)
    return timings


def measure(config: BenchConfig, model: Any, point: Point, console: Console, skipped: dict[str, None]) -> list[Timing]:
    """Measure all baselines at one point, alternately.

    Baselines that cannot run are added to `skipped` with the reason.
    """
    # On CUDA the baselines run one after another, because device memory does not hold all of them at once.
    repeats = WARM_UP + config.repeats
    stage_steps = 2 * config.repeats
    room = point.context + repeats * BURST + stage_steps + CHUNK
    field = make_field(model, point.context, room, config.fraction, config.spread, point.batch)
    timings: list[Timing] = []
    for names in [(name,) for name in config.baselines] if _is_cuda(model) else [config.baselines]:
        try:
            timings += _interleaved(config, field, point, names, console, skipped)
        except torch.OutOfMemoryError as error:
            line = f"{', '.join(names)} at {point}: the device has no room for it ({str(error).splitlines()[0]})"
            console.print(f"skipped {line}", soft_wrap=True, markup=False)
            skipped[line] = None
    return timings


def _interleaved(
    config: BenchConfig, field: Field, point: Point, names: Sequence[str], console: Console, skipped: dict[str, None]
) -> list[Timing]:
    """Measure the baselines `names` alternately, all in memory at once."""
    repeats, stage_steps = WARM_UP + config.repeats, 2 * config.repeats
    baselines = _baselines(names, field, console, skipped)
    for layer, kv in enumerate(field.synthetic.layers(field.model.device)):
        for baseline in baselines:
            baseline.fill(layer, kv)
    read = _clock(field.model.device)
    seconds: list[list[float]] = [[] for _ in baselines]
    for repeat in range(repeats):
        console.print(f"  {point}: repeat {repeat + 1} of {repeats}", end="\r")
        for baseline, spent in zip(baselines, seconds, strict=True):
            for _ in range(BURST):
                began = read()
                baseline.step()
                if repeat >= WARM_UP:
                    spent.append(read() - began)
    stages = [c.stages(stage_steps, read) if isinstance(c, Ours) else {} for c in baselines]
    layers = field.synthetic.geometry.layers
    return [Timing.of(c, point, s, parts, layers) for c, s, parts in zip(baselines, seconds, stages, strict=True)]


def make_field(model: Any, length: int, room: int, fraction: float, spread: float = 0.0, batch: int = 1) -> Field:
    """Create synthetic contexts of `length` tokens, in pools with room for the new tokens of all policies."""
    geometry = adapter_for(model).geometry
    synthetic = SyntheticKV.draw(geometry, length, fraction, spread)
    made = {"auto": _context(model, synthetic, room, batch, "auto", len(MAKERS))}

    def other(kind: str) -> Context:
        if kind == "device":
            return _ideal(model, made["auto"], room)  # not cached, because it holds all KV on the device
        if kind not in made:
            made[kind] = _rounded(kind)
        return made[kind]

    def _rounded(kind: Any) -> Context:
        return _context(model, synthetic, room, batch, kind, 1)

    return Field(model, _own(model), synthetic, made["auto"], other, room, batch)


def _context(
    model: Any, synthetic: SyntheticKV, room: int, batch: int, kv_cache_dtype: KVFormatName, users: int
) -> Context:
    """Create a context in a new pool with room for `users` policies."""
    adapter = adapter_for(model)
    slots = batch * (synthetic.length + users * (room - synthetic.length + CHUNK))
    limit = adapter.geometry.kv_bytes(2 * slots, adapter.dtype)
    pool = HostPool(adapter.geometry, adapter.dtype, limit, kv_cache_dtype=kv_cache_dtype, pin=_is_cuda(model))
    return Context(pool, build_link(pool, adapter.geometry, model.device), synthetic, room, batch, model.device)


def _ideal(model: Any, context: Context, room: int) -> Context:
    """Return the same pool with a link that keeps all KV on the device."""
    twin = copy.copy(context)
    twin.link = IdealLink(context.pool, adapter_for(model).geometry, model.device, room)
    return twin


def _baselines(names: Sequence[str], field: Field, console: Console, skipped: dict[str, None]) -> list[Baseline]:
    made = []
    for name in MAKERS:
        if name in names:
            try:
                made.append(MAKERS[name](field))
            except Skipped as reason:
                line = f"{name}: it {reason}"
                if line not in skipped:
                    console.print(f"skipped {line}", soft_wrap=True, markup=False)
                skipped[line] = None
    return made


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
        raise ConfigError("device='cuda' was asked for, and there is no CUDA device here")
    return torch.device(name)


def _clock(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds: CPU time of the process, or wall time after synchronizing the device."""
    if device.type == "cpu":
        return time.process_time

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read
