"""Recycle large temporary tensors on a CPU.

torch allocates with `posix_memalign`. Up to glibc 2.37 such memory is rarely reused after it is freed, so the process
grows if megabytes are allocated and freed in every layer (25 MB per step with a context of 120,000 tokens).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch

SPARE = 8  # allocate 1/8 more than needed, because contexts grow; untouched pages take no memory
LARGE = 1 << 18  # bytes; recycling takes 5 µs, and fragmentation by smaller tensors does no harm


class RecycledMemory:
    """A thread-safe allocator that reuses the memory of tensors that were deleted.

    A tensor returns its memory when it and all its views are deleted, in any thread.
    """

    def __init__(self, least: int = LARGE) -> None:
        """Recycle tensors of at least `least` bytes. Smaller ones use torch's allocator."""
        self._least = max(1, least)
        self._free: list[mmap.mmap] = []
        # Finalizers return memory without this lock, because one may run while this thread holds it.
        self._taking = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Free memory in bytes."""
        return sum(map(len, self._free))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised CPU tensor."""
        size = math.prod(shape) * dtype.itemsize
        if size < self._least:
            return torch.empty(shape, dtype=dtype)
        memory = self._take(size)
        own = np.frombuffer(memory, np.uint8, size)
        weakref.finalize(own, self._free.append, memory).atexit = False
        return torch.from_numpy(own).view(dtype).view(shape)

    def clear(self) -> None:
        """Return free memory to the system."""
        self._free.clear()

    def check_integrity(self) -> None:
        """Assert that no memory is free twice."""
        assert len({id(memory) for memory in self._free}) == len(self._free)

    def _take(self, size: int) -> mmap.mmap:
        """Return the smallest free piece that is large enough. If none is, replace the largest with a new one."""
        with self._taking:
            waiting = sorted(self._free, key=len)  # a copy: other threads return memory meanwhile
            fits = next((memory for memory in waiting if len(memory) >= size), None)
            if waiting:
                self._free.remove(fits or waiting[-1])
        return fits or mmap.mmap(-1, size + size // SPARE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def give_back() -> None:
    """Return free memory of the C library's heap to the system: hundreds of megabytes after a long prompt.

    Has no effect if the C library has no `malloc_trim`.
    """
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
