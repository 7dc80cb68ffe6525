"""Settings of the OpenMP library that torch has loaded.

Threads of GCC's OpenMP library (libgomp) spin for about 3 ms after each operation. On a busy machine, they take
processor time from other threads and processes. `OMP_WAIT_POLICY=passive` prevents this, but libgomp reads the variable
only when torch is imported.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

WAIT_VARIABLES = frozenset({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"})
"""Environment variables that determine how OpenMP threads wait."""


@cache
def stop_spinning() -> bool:
    """Make libgomp threads sleep soon after each parallel region, even if torch is already imported.

    Returns:
        Whether the setting was changed. It is not changed if another OpenMP library is in use, or if the user has set
        one of `WAIT_VARIABLES`.
    """
    library = _library("libgomp.so.1")
    if library is None or os.environ.keys() & WAIT_VARIABLES:
        return False
    # If libgomp manages more threads than there are processors, it spins for 100 iterations instead of 300,000
    # (`gomp_throttled_spin_count_var`). To reach that number, one thread more than there are processors sleeps here
    # until the process ends.
    threads, started, for_ever = library.omp_get_num_procs() + 1, threading.Event(), threading.Lock()
    for_ever.acquire()

    def hold() -> None:
        # Run an empty parallel region. The threads it starts exist until the calling thread ends.
        nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)
        library.GOMP_parallel(nothing, None, ctypes.c_uint(threads), ctypes.c_uint(0))
        started.set()
        for_ever.acquire()

    # Not a `threading.Thread`, so that checks for leaked threads do not report it.
    _thread.start_new_thread(hold, ())
    started.wait()
    return True


@cache
def thread_setter() -> Callable[[int], Any]:
    """Return a function that sets OpenMP's number of threads for the calling thread only.

    If torch's OpenMP library is not found, return `torch.set_num_threads`, which also affects threads that are started
    later.
    """
    count = torch.get_num_threads()
    for name in ("libgomp.so.1", "libomp.so", "libiomp5.so"):
        if (library := _library(name)) is None:
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
def mkl_thread_setter() -> Callable[[int], int]:
    """Return a function that sets MKL's number of threads for the calling thread and returns the old number (0: unset).

    This is needed because MKL ignores OpenMP's number of threads once `torch.set_num_threads` has been called.
    """
    try:
        set_threads = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOLOAD).MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return lambda threads: 0
    set_threads.argtypes, set_threads.restype = [ctypes.c_int], ctypes.c_int
    return lambda threads: int(set_threads(threads))


def _library(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
