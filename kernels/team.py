"""Run the parts of a C call by a persistent team of threads (`team.c`).

A kernel exports `void name(const Call *call, int64_t part)`, which computes one part and is safe to call for different
parts at once. It starts no threads itself.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from ..utils import native_libraries
from ..utils.control_groups import processor_limit

_outer = threading.local()


def run(function: Any, call: ctypes.Structure, parts: int, threads: int) -> None:
    """Call `function(call, part)` for each part in `range(parts)`, by at most `threads` threads including this one.
    `function` is a function of a `ctypes.CDLL`."""
    library = _library()
    assert library is not None, "the library of `function` was compiled, so this one can be"
    library.team_run(function, ctypes.byref(call), parts, threads)


def run_pointer() -> int:
    """Return the address of `team_run`, for C code that prepares a call and then shares out its parts."""
    library = _library()
    assert library is not None, "the library of the caller was compiled, so this one can be"
    return ctypes.cast(library.team_run, ctypes.c_void_p).value or 0


def threads() -> int:
    """Return how many threads kernels may use: torch's number, at most one per processor."""
    outer = getattr(_outer, "threads", None)
    return min(torch.get_num_threads() if outer is None else outer, _processors())


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """Run torch's own operations in this thread without OpenMP threads. Kernels keep all threads.

    A decode step consists of many small operations. Waking OpenMP's threads for them gains nothing, and these spin
    afterwards, so that they take the processors from kernels and from other processes.
    """
    count = torch.get_num_threads()
    if count == 1:
        yield
        return
    set_threads = _set_openmp_threads()
    _outer.threads = count
    set_threads(1)
    try:
        yield
    finally:
        set_threads(count)
        _outer.threads = None


def decode_threads(device: torch.device) -> AbstractContextManager[None]:
    """Return the context for decode steps on `device`: `torch_on_one_thread` on a CPU."""
    return torch_on_one_thread() if device.type == "cpu" else nullcontext()


@cache
def _library() -> ctypes.CDLL | None:
    library = native_libraries.load("team")
    if library is not None:
        library.team_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        library.team_run.restype = None
    return library


@cache
def _set_openmp_threads() -> Any:
    """Return a function that sets OpenMP's number of threads for the calling thread only.

    `torch.set_num_threads` also sets the number for threads that are started later, so it is used only if torch's
    OpenMP library is not found.
    """
    count = torch.get_num_threads()
    for name in ("libgomp.so.1", "libomp.so", "libiomp5.so"):
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
        except OSError:
            continue
        set_threads = library.omp_set_num_threads
        set_threads.argtypes, set_threads.restype = [ctypes.c_int], None
        set_threads(count + 1)
        found = torch.get_num_threads() == count + 1
        set_threads(count)
        if found:
            return set_threads
    return torch.set_num_threads


@cache
def _processors() -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = processor_limit()
    return available if limit is None else max(1, min(available, limit))
