"""Count the bytes of device memory in use during a run on the CPU.

Torch's CPU allocator reports each allocation to the profiler. Memory that was in use before the run is computed from
the existing tensors. Memory from `mmap` is not counted, because only host memory (the pool and streamed weights) is
allocated this way. Selection in C uses memory that the profiler does not see, so `device_selection` replaces it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile

from offload_rt.kernels import selection


@contextmanager
def device_selection() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "select_tokens", selection.select_tokens_reference)
        yield


def live_storages() -> dict[int, int]:
    """Return a map from the address of each tensor storage to its size in bytes.

    Tensors that existed before the test module was loaded are excluded. The sum may be too high if a new tensor reuses
    their memory.
    """
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@dataclass(frozen=True)
class DeviceBytes:
    before: int
    peak: int


def count_device_bytes(
    make: Callable[[], Any], host_addresses: Callable[[Any], set[int]], run: Callable[[Any], Any]
) -> tuple[Any, DeviceBytes]:
    """Return the result of `run(make())` and the device memory in use before and during `run`.

    Tensors created by `make` are counted, except those at `host_addresses`.
    """
    earlier = live_storages()
    made = make()
    outside = host_addresses(made) | earlier.keys()
    before = sum(size for address, size in live_storages().items() if address not in outside)
    # Not torch.profiler, which creates a Python object for each of 100,000 operations.
    with profile(profile_memory=True) as recorded:
        result = run(made)
    results: Any = recorded.kineto_results
    blocks = [event for event in results.events() if event.name() == "[memory]"]
    assert blocks, "the profiler saw no allocation"
    alive = peak = before
    for block in sorted(blocks, key=lambda event: event.start_ns()):
        alive += block.nbytes()
        peak = max(peak, alive)
    return result, DeviceBytes(before, peak)
