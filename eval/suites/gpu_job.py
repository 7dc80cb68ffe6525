"""How large the parts of `make gpu` are, and on which device."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..speed import hardware, kernels
from ..speed.hardware import HardwareSize
from ..speed.kernels import KernelSize

ROOT = Path(__file__).resolve().parents[2]
"""Of the repository: tests and scripts are run from there."""

BASELINES = (
    "static", "dynamic", "offloaded", "quantized", "full", "infinigen", "infinigen-residual", "infinigen-tail4",
    "ideal", "floor", "floor-ours",
)  # fmt: skip


@dataclass(frozen=True)
class GpuSize:
    """tests: paths given to pytest beside the mark. shape, layers: of a random Llama (`baselines.SHAPES`; None: all
    layers). contexts: tokens of the decode steps. prompts: tokens of the prefills. histories: tokens of sessions.
    host_memory: of prefills and sessions (None: half of what is free). models: folders of reference models, whose
    perplexity and needles are asked for with these flags. train: the training script's arguments, before where."""

    tests: tuple[str, ...] = ()
    hardware: HardwareSize = field(default_factory=HardwareSize)
    kernels: KernelSize = field(default_factory=KernelSize)
    shape: str = "llama-8b"
    layers: int | None = None
    contexts: tuple[int, ...] = (8_192, 32_768, 131_072)
    baselines: tuple[str, ...] = BASELINES
    repeats: int = 5
    prompts: tuple[int, ...] = (8_192, 32_768, 65_536, 131_072)
    histories: tuple[int, ...] = (1_024, 8_192, 32_768)
    turns: int = 3
    host_memory: str | None = "24GiB"
    models: tuple[Path, ...] = tuple(ROOT / "offload_rt" / "reference" / name for name in ("llama", "opt"))
    policies: tuple[str, ...] = ("--policies", "full,infinigen,h2o,quest,streaming", "--budgets", "0.05,0.1")
    perplexity: tuple[str, ...] = ("--context", "1024")
    needles: tuple[str, ...] = ("--lengths", "1k")
    train: tuple[str, ...] | None = ("cuda",)


SMALL = GpuSize(
    tests=("tests/unit/transfer/test_gpu_streams.py",),
    hardware=hardware.SMALL,
    kernels=kernels.SMALL,
    shape="small",
    layers=1,
    contexts=(512,),
    repeats=1,
    prompts=(256, 512),
    histories=(128,),
    turns=1,
    host_memory="256MiB",
    models=GpuSize.models[:1],
    policies=(),
    perplexity=("--context", "256", "--windows", "1"),
    needles=("--lengths", "256", "--passages", "1"),
    train=None,
)
"""For a machine without a GPU: its numbers say nothing."""


@dataclass(frozen=True)
class GpuJob:
    """Where, how large, and where results go."""

    device: torch.device
    size: GpuSize
    out: Path

    @property
    def cuda(self) -> bool:
        """Whether there is anything to measure."""
        return self.device.type == "cuda"
