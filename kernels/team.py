"""Distribute the parts of a computation over threads that sleep between calls.

`run` distributes a C call over a persistent team of threads (`team.c`). A kernel's function `void name(const void
*call, int64_t part)` computes one part. It may be called for different parts at the same time, and must not start
threads. Kernels with several stages call the team themselves, at the address `runner()` (`team.h`). `share` does the
same with a Python function whose work releases the GIL, such as torch's matrix products.

A decode step runs hundreds of small torch operations. Each is so short that waking OpenMP's threads would take longer
than the operation. The engine therefore runs torch's own operations on one thread (`torch_on_one_thread`).
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


def run(function: Any, call: ctypes.Structure, parts: int, threads: int) -> None:
    """Call the C function `function(call, part)` for each part in `range(parts)`.

    At most `threads` threads are used, including the calling thread. `function` is an attribute of a `ctypes.CDLL`.
    """
    library = _library()
    assert library is not None, "the library of `function` was compiled, so this one can be"
    library.team_run(function, ctypes.byref(call), parts, threads)


@cache
def runner() -> int:
    """Return the address of `team_run`, for C kernels that distribute their stages themselves."""
    library = _library()
    assert library is not None, "the kernel was compiled, so the team can be"
    address = ctypes.cast(library.team_run, ctypes.c_void_p).value
    assert address is not None
    return address


def share(compute: Callable[[int], None], parts: int) -> None:
    """Call `compute(part)` for each part in `range(parts)`, on up to `threads()` threads including the calling thread.

    torch uses one thread inside `compute`.
    """
    taken, helpers = itertools.count(), min(threads(), parts) - 1

    def work() -> None:
        inference = torch.inference_mode() if inferring else nullcontext()
        with torch_on_one_thread(), inference:
            while (part := next(taken)) < parts:
                compute(part)

    inferring = torch.is_inference_mode_enabled()
    waiting = [_pool().submit(work) for _ in range(helpers)]
    try:
        work()
    finally:
        for helper in waiting:  # Helper threads that have not started yet are no longer needed.
            if not helper.cancel():
                helper.result()


def threads() -> int:
    """Return the number of threads that kernels may use: torch's setting, at most the number of processors."""
    outer = getattr(_outer, "threads", None)
    return min(torch.get_num_threads() if outer is None else outer, _processors())


@contextmanager
def torch_on_one_thread(*, helpers: bool = True) -> Iterator[None]:
    """Context in which torch's own operations in the calling thread do not use OpenMP threads.

    `run` and `share` still use all threads. With `helpers=False`, they use only the calling thread.
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
    """Return the context for the engine's computations on `device`: `torch_on_one_thread` if it is a CPU."""
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
    # A forked process has no threads and must not use the parent's pool.
    os.register_at_fork(after_in_child=_pool.cache_clear)
    return ThreadPoolExecutor(max(1, _processors() - 1), "offload-rt kernel")


@cache
def _processors() -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = processor_limit()
    return available if limit is None else max(1, min(available, limit))
