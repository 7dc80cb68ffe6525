"""Device, sizes and settings of `make gpu`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..speed import kernels
from ..speed.bench import BenchConfig
from ..speed.kernels import KernelSize
from .programs import ROOT

MODELS = Path(os.environ.get("OFFLOAD_RT_MODELS", Path.home() / ".cache" / "offload-rt-models"))
"""Folder with the trained models that the part `trained` measures."""

Results = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class TracePoint:
    """A context for which decode steps are traced.

    `fraction` is the fraction of planted tokens (see `synthetic_kv`).
    """

    context: int
    batch: int
    fraction: float
    baselines: tuple[str, ...]


@dataclass(frozen=True)
class PrefillPoint:
    """A prompt for a random model, and the programs that prefill it: "transformers" or policies of this runtime."""

    shape: str
    tokens: int
    programs: tuple[str, ...]
    repeats: int = 3


PREFILLS = (
    PrefillPoint("smollm2", 7_168, ("transformers", "full", "infinigen"), 5),
    *(PrefillPoint("llama-8b", tokens, ("full", "infinigen")) for tokens in (8_192, 32_768)),
    PrefillPoint("llama-8b", 131_072, ("full", "infinigen"), 1),
)

POINTS = (
    TracePoint(131_072, 1, 0.05, ("infinigen-default", "infinigen", "resident", "full-device", "full")),
    TracePoint(8_192, 1, 0.05, ("infinigen-default", "infinigen", "resident", "full-device")),
    TracePoint(32_768, 8, 0.05, ("infinigen-default", "infinigen")),
)

DECODE = BenchConfig(
    ("llama-8b",),
    contexts=(8_192, 32_768, 131_072),
    baselines=(
        "static", "dynamic", "offloaded", "quantized", "full", "infinigen", "infinigen-tail4",
        "floor", "floor-ours",
    ),
    repeats=5,
    threads=os.cpu_count() or 1,
)  # fmt: skip


@dataclass(frozen=True)
class GpuSize:
    tests: tuple[str, ...] = ("tests/unit", "--ignore=tests/unit/server")
    kernels: KernelSize = KernelSize()  # noqa: RUF009 - frozen
    decode: BenchConfig = DECODE  # Settings of the part "decode". The part "sessions" uses its shape.
    prefills: tuple[PrefillPoint, ...] = PREFILLS
    histories: tuple[int, ...] = (1_024, 8_192, 32_768)
    turns: int = 3
    # Limit on host memory for prefills and sessions. None means half of the free memory.
    host_memory: str | None = "24GiB"
    models: tuple[Path, ...] = tuple(ROOT / "offload_rt" / "reference" / name for name in ("llama", "opt"))
    # Flags of `eval perplexity` and `eval retrieval` in the part "accuracy".
    policies: tuple[str, ...] = ("--policies", "full,infinigen,h2o,quest,streaming", "--budgets", "0.05,0.1")
    perplexity: tuple[str, ...] = ("--context", "1024")
    needles: tuple[str, ...] = ("--lengths", "1k")
    traced: tuple[TracePoint, ...] = POINTS
    traced_steps: int = 20
    trained: tuple[Path, ...] = tuple(MODELS / name for name in ("smollm2", "qwen"))
    text: Path = ROOT / "offload_rt" / "data" / "black_arrow.txt"
    trained_prompts: tuple[int, ...] = (1_024, 7_168)
    trained_tokens: int = 128
    trained_perplexity: tuple[str, ...] = ("--context", "8192", "--windows", "4", "--decode-from", "7680")
    trained_needles: tuple[str, ...] = ("--lengths", "8k", "--passages", "4")
    trained_limit: float = 120


SMALL = GpuSize(
    tests=("tests/unit/transfer/test_gpu_streams.py",),
    kernels=kernels.SMALL,
    decode=replace(DECODE, shape=("small",), layers=1, contexts=(512,), repeats=1, threads=1),
    prefills=(PrefillPoint("small", 256, ("transformers", "full", "infinigen"), 1),),
    histories=(128,),
    turns=1,
    host_memory="256MiB",
    models=GpuSize.models[:1],
    policies=(),
    perplexity=("--context", "256", "--windows", "1"),
    needles=("--lengths", "256", "--passages", "1"),
    traced=(TracePoint(512, 2, 0.1, ("infinigen-default", "resident", "full-device")),),
    traced_steps=1,
    trained=GpuSize.models[:1],
    trained_prompts=(256,),
    trained_tokens=8,
    trained_perplexity=("--context", "256", "--windows", "1"),
    trained_needles=("--lengths", "256", "--passages", "1"),
)
"""Tiny sizes for checking that all parts run on a machine without a GPU. The measured numbers have no meaning."""


@dataclass(frozen=True)
class GpuJob:
    device: torch.device
    size: GpuSize
    out: Path

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def timed(self, call: Callable[[], T]) -> tuple[float, T]:
        began = time.perf_counter()
        result = call()
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began, result
