"""CUDA without a device, for tests: streams that run late, memory that is poisoned, copies that happen later.

    with simulated(Seeded(1)) as sim:
        LLM(tiny_model("llama").to("cuda"), policy="infinigen").generate(...)

What runs is the package as it is: torch's operations go to queues (`dispatch`), Triton's kernels too, under its
interpreter (`triton_queue`); `torch.cuda` is the simulator's (`torch_cuda`). A device may do everything later than the
host, and does here, as the schedule says (`engine`); a wait that is missing, a block that is used again too early
(`memory`), a host that reads too early show as other tokens or as errors. `Simulator.syncs` says where the host waited.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from offload_rt.kv_cache import arena

from . import copies
from .copies import Sync, register
from .dispatch import DeviceMode
from .engine import CaptureError, Late, Lazy, Schedule, Seeded
from .simulator import Simulator
from .torch_cuda import outlive, patch_torch
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
    """A machine with CUDA devices; everything that this thread does with them in this context is simulated. `limit`:
    bytes of a device. in_place: whether kernels find page-locked memory at the host's addresses. Skips the test where
    the simulator cannot be built."""
    sim = Simulator(schedule, limit=limit, devices=devices)
    with pytest.MonkeyPatch.context() as patch, DeviceMode(sim):
        register()
        outlive()
        patch.setattr(copies, "current", [sim])
        patch_torch(patch, sim)
        patch_triton(patch, sim)
        sim.memory.in_place = in_place
        patch.setattr(arena, "device_pointer", lambda address: address if in_place else address + (1 << 40))
        yield sim
        sim.engine.finish_all()
