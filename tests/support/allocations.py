"""Count the bytes of device memory in use during a run on the CPU.

The count is complete, because tensors get memory from only three sources:

* torch's CPU allocator reports each allocation and release to the profiler, including temporary memory of kernels.
  Memory in use before the profiler started is counted from the existing tensors.
* `mmap` provides host memory only: the arena of the pool and the buffers of streamed weights.
* C code selects on a CPU only, in separate memory. `device_selection` replaces it with the code for other devices.
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
    """Select tokens with torch, as on other devices than CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "select_tokens", selection.select_tokens_reference)
        yield


def live_storages() -> dict[int, int]:
    """Return size in bytes by address of all tensor storages except those that `conftest.older_objects_apart` excluded.

    The sum may be too high, but never too low, if a new tensor reuses the memory of an excluded one.
    """
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@dataclass(frozen=True)
class Count:
    """Bytes in use before a run and their peak during the run."""

    before: int
    peak: int


def count(make: Callable[[], Any], host: Callable[[Any], set[int]], run: Callable[[Any], Any]) -> tuple[Any, Count]:
    """Return the result of `run(make())` and the bytes in use.

    Memory allocated by `make` counts, except at the host memory addresses that `host` returns. The peak during `make`
    is not measured, because loading CPU weights uses the same allocator.
    """
    earlier = live_storages()
    made = make()
    outside = host(made) | earlier.keys()
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
    return result, Count(before, peak)
