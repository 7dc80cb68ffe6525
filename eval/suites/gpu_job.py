"""Sizes of the parts of `make gpu`, and the job description (device, size, output folder)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..speed import hardware, kernels
from ..speed.hardware import HardwareSize
from ..speed.kernels import KernelSize

ROOT = Path(__file__).resolve().parents[2]
"""Root of the repository; tests and scripts run there."""

BASELINES = (
    "static", "dynamic", "offloaded", "quantized", "full", "infinigen", "infinigen-residual", "infinigen-tail4",
    "ideal", "floor", "floor-ours",
)  # fmt: skip


@dataclass(frozen=True)
class GpuSize:
    """Sizes of all parts.

    Attributes:
        tests: Paths passed to pytest; empty for all tests.
        hardware: Sizes of the part "device".
        kernels: Sizes of the part "kernels".
        shape: Name of the random Llama in `baselines.SHAPES`.
        layers: Number of layers; None takes all layers of the shape.
        contexts: Context lengths of the decode steps in tokens.
        baselines: Baselines of the decode steps.
        repeats: Number of repeats of each baseline.
        prompts: Prefill lengths in tokens.
        histories: Lengths of session histories in tokens.
        turns: Number of turns of each session.
        host_memory: Host memory limit of prefills and sessions; None takes half of the free memory.
        models: Folders of the reference models for the part "accuracy".
        policies: Policy flags of the part "accuracy".
        perplexity: Flags of `offload-rt eval perplexity`.
        needles: Flags of `offload-rt eval retrieval`.
        train: First arguments of the training script; None only checks that the script starts.
    """

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
"""Tiny sizes for a machine without a GPU; the numbers are meaningless."""


@dataclass(frozen=True)
class GpuJob:
    """Device, sizes and output folder of a run."""

    device: torch.device
    size: GpuSize
    out: Path

    @property
    def cuda(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device.type == "cuda"
