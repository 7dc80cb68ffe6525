"""Queue Triton kernels in the simulated device's streams. Triton's interpreter runs them.

Kernels can access only device memory and page-locked host memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..interpreter_lanes import Lanes, broadcast
from .simulator import Simulator


class IllegalAccessError(RuntimeError):
    """Raised if a kernel accesses memory that the device cannot reach."""


def patch_triton(patch: pytest.MonkeyPatch, sim: Simulator) -> None:
    """Queue kernel launches until `patch` is undone. Has no effect if Triton is not installed."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    run: Any = interpreter.InterpretedFunction.run

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        given = [x for x in (*args, *named.values()) if isinstance(x, torch.Tensor)]
        if not any(x.is_cuda for x in given):
            run(kernel, *args, grid=grid, warmup=warmup, **named)
            return
        devices = {x.device.index for x in given if x.is_cuda}
        if devices != {sim.device}:
            raise IllegalAccessError(f"{kernel.__name__}: launched on cuda:{sim.device} with tensors of {devices}")
        for x in given:
            if not x.is_cuda and not sim.memory.is_pinned(x.data_ptr()):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        seen = [sim.host_view(x) if isinstance(x, torch.Tensor) else x for x in args]
        seen_named = {k: sim.host_view(x) if isinstance(x, torch.Tensor) else x for k, x in named.items()}
        if "WIDEN" in named:
            seen_named["WIDEN"] = True  # the interpreter cannot multiply bfloat16 matrices
        sim.queue_work(f"triton {kernel.__name__}", lambda: run(kernel, *seen, grid=grid, warmup=warmup, **seen_named))

    patch.setattr(interpreter.InterpretedFunction, "run", launch)
    builder: Any = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def check(pointers: Any, mask: Any) -> None:
        addresses, seen = broadcast(pointers.data, mask.data)
        programs = [(addresses, seen)]
        if isinstance(pointers.data, Lanes) and not sim.memory.on_device(int(addresses.min()), int(addresses.max())):
            programs = list(zip(addresses, seen, strict=True))
        for touched, mine in programs:
            at = touched if mine.all() else touched[mine.astype(bool)]
            if at.size and not sim.memory.reachable(int(at.min()), int(at.max())):
                # A kernel may read both rows in the pool and copies of rows on the device.
                off = at[(at < sim.memory.device.start) | (at >= sim.memory.device.stop)]
                if not off.size or not sim.memory.reachable(int(off.min()), int(off.max())):
                    raise IllegalAccessError("a kernel touched memory that the device cannot reach")

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    patch.setattr(builder, "create_masked_load", checked_load)
    patch.setattr(builder, "create_masked_store", checked_store)
