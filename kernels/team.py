"""Distribute a computation over a persistent team of threads.

`runner` distributes a C function `void name(const void *call, int64_t part)`, which must be thread-safe and must not
start threads. `run_parts` distributes a Python function that releases the GIL, such as torch's matrix products.

Most torch operations of a decode step take less time than waking OpenMP's threads. The engine therefore runs torch's
own operations on one thread (`torch_on_one_thread`).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from ..utils import native_libraries
from ..utils.control_groups import processor_limit
from ..utils.openmp import mkl_thread_setter, thread_setter

_outer = threading.local()


@cache
def runner() -> Any:
    """Return the C function `team_run(function, call, parts, threads)`.

    It calls the C function `function(call, part)` for each part in `range(parts)`, on up to `threads` threads including
    the calling one. C kernels with several stages receive `team_run` as an argument and call it for each stage.
    """
    library = _library()
    assert library is not None, "the kernel was compiled, so the team can be"
    return library.team_run


def run_parts(compute: Callable[[int], None], parts: int) -> None:
    """Call `compute(part)` for each part in `range(parts)`, on up to `threads()` threads.

    Inside `compute`, torch uses one thread.
    """
    part_numbers, helper_count = itertools.count(), min(threads(), parts) - 1

    def work() -> None:
        inference = torch.inference_mode() if inferring else nullcontext()
        with torch_on_one_thread(), inference:
            while (part := next(part_numbers)) < parts:
                compute(part)

    inferring = torch.is_inference_mode_enabled()
    futures = [_pool().submit(work) for _ in range(helper_count)]
    try:
        work()
    finally:
        for future in futures:  # Helper threads that have not started yet are no longer needed.
            if not future.cancel():
                future.result()


def threads(limit: int | None = None) -> int:
    """Return the number of threads for kernels: the minimum of `limit`, torch's setting and the processor count."""
    if limit is not None and limit <= 1:
        return 1
    outer = getattr(_outer, "threads", None)
    available = min(torch.get_num_threads() if outer is None else outer, _processors())
    return available if limit is None else min(available, limit)


@contextmanager
def torch_on_one_thread(*, helpers: bool = True) -> Iterator[None]:
    """Context manager that disables OpenMP threads for torch's own operations in the calling thread.

    `runner` and `run_parts` still use all threads. If `helpers` is false, they use only the calling thread.
    """
    count = torch.get_num_threads()
    if count == 1:
        yield
        return
    set_threads, set_mkl_threads = thread_setter(), mkl_thread_setter()
    _outer.threads = count if helpers else 1
    set_threads(1)
    before = set_mkl_threads(1)
    try:
        yield
    finally:
        set_mkl_threads(before)
        set_threads(count)
        _outer.threads = None


def engine_threads(device: torch.device) -> AbstractContextManager[None]:
    return torch_on_one_thread() if device.type == "cpu" else nullcontext()


@cache
def _library() -> ctypes.CDLL | None:
    library = native_libraries.load("team")
    if library is not None:
        library.team_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        library.team_run.restype = None
    return library


@cache
def _pool() -> ThreadPoolExecutor:
    # The threads of the pool do not exist in a forked process, which therefore needs a new pool.
    os.register_at_fork(after_in_child=_pool.cache_clear)
    return ThreadPoolExecutor(max(1, _processors() - 1), "offload-rt kernel")


@cache
def _processors() -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = processor_limit()
    return available if limit is None else max(1, min(available, limit))
