"""Simulate CUDA devices in tests: late streams, poisoned memory and deferred copies.

    with simulated(Seeded(1)) as sim:
        LLM(tiny_model("llama").to("cuda"), policy="infinigen").generate(...)

The package runs unchanged. Torch operations and interpreted Triton kernels are queued, and a schedule decides how far
each stream lags behind the host. If a wait is missing or a block is reused too early, the generated tokens differ or an
error is raised. `Simulator.syncs` lists all points where the host waited.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from offload_rt.kv_cache import arena
from offload_rt.model_runner import cuda_graphs

from . import copies
from .copies import Sync, register
from .dispatch import DeviceMode
from .engine import CaptureError, Late, Lazy, Schedule, Seeded
from .simulator import Simulator
from .torch_cuda import ignore_late_unregistration, patch_torch
from .triton_queue import IllegalAccessError, patch_triton

__all__ = [
    "CaptureError",
    "IllegalAccessError",
    "Late",
    "Lazy",
    "Schedule",
    "Seeded",
    "Simulator",
    "Sync",
    "simulated",
]


@contextmanager
def simulated(
    schedule: Schedule, *, limit: int = 1 << 31, devices: int = 1, in_place: bool = True
) -> Iterator[Simulator]:
    """Simulate a machine with CUDA devices for this thread. Skip the test if the simulator cannot be built.

    Args:
        schedule: Decides when each stream advances.
        limit: Memory per device in bytes.
        devices: Number of devices.
        in_place: Whether kernels access page-locked memory at its host address.
    """
    sim = Simulator(schedule, limit=limit, devices=devices)
    with pytest.MonkeyPatch.context() as patch, DeviceMode(sim):
        register()
        ignore_late_unregistration()
        patch.setattr(copies, "current", [sim])
        patch_torch(patch, sim)
        patch.setattr(cuda_graphs, "capture_stream", cache(torch.cuda.Stream))
        patch_triton(patch, sim)
        sim.memory.in_place = in_place
        patch.setattr(arena, "device_pointer", lambda address: address if in_place else address + (1 << 40))
        yield sim
        sim.engine.finish_all()
