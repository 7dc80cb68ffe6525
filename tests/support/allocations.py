"""An allocator that counts: the bytes of device memory that a run holds at any moment, the CPU being the device.

Why the count is complete. Every tensor's memory comes from one of three places: torch's CPU allocator, `mmap`, or
numpy. torch's allocator reports each block that it gives or takes back to the profiler, also those that kernels take
for themselves and no Python object ever shows; what was alive before the profiler started is counted from the tensors
that exist then. `mmap` is the host's: the pool's arena and the blocks of streamed weights, and nothing else in the
package calls it. numpy is kept out: it only selects on a CPU, so `device_selection` puts in its place what every other
device runs.
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
from offload_rt.policies import h2o, quest
from offload_rt.policies.infinigen import scoring


@contextmanager
def device_selection() -> Iterator[None]:
    """Selection in torch, as on a device that is no CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "select_tokens", selection.select_tokens_reference)
        patch.setattr(scoring, "select_tokens", selection.select_tokens_reference)
        patch.setattr(scoring, "select_quantised", _select_from_scores)
        for module in (h2o, quest, selection):
            patch.setattr(module, "top_tokens", selection.top_tokens_reference)
        yield


def _select_from_scores(
    q: torch.Tensor,
    packed: torch.Tensor,
    mean: torch.Tensor,
    step: torch.Tensor,
    bits: int,
    tokens: slice,
    alpha: float,
    max_fraction: float,
) -> torch.Tensor:
    scores = selection.quantised_scores(q, packed, mean, step, bits)[:, :, tokens]
    return selection.select_tokens_reference(scores, alpha, max_fraction)


def live_storages() -> dict[int, int]:
    """Address and bytes of the memory of every tensor there is, but for those that the test's file found
    (`conftest.older_objects_apart`): a tensor made later on their memory would be counted too much, never too
    little."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@dataclass(frozen=True)
class Count:
    """Bytes alive before a run and the most that were alive at any moment of it."""

    before: int
    peak: int


def count(make: Callable[[], Any], host: Callable[[Any], set[int]], run: Callable[[Any], Any]) -> tuple[Any, Count]:
    """Runs `run(make())` and returns its result. What `make` leaves alive counts, but for the addresses that `host` of
    it names: host memory. (While it makes, a CPU's weights pass through the same allocator on their way, so that is not
    counted.)"""
    earlier = live_storages()
    made = make()
    outside = host(made) | earlier.keys()
    before = sum(size for address, size in live_storages().items() if address not in outside)
    # autograd's profiler, not torch.profiler's: that one makes a Python object of each of 100,000 operations.
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
