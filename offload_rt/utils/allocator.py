"""Recycled memory for large temporary tensors on a CPU.

glibc up to 2.37 rarely reuses the aligned memory that torch allocates, so the process grows in every step (by 25 MB for
a context of 120,000 tokens).
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

SPARE = 8  # Allocate 1/8 more than needed, because contexts grow. Pages that are never written take no physical memory.
LARGE = 1 << 18  # in bytes; for smaller tensors, recycling (5 µs) costs more than fragmentation


class RecycledMemory:
    """A thread-safe allocator for CPU tensors. A tensor's memory is reused after all of its views have been deleted."""

    def __init__(self, least: int = LARGE) -> None:
        """Create an allocator that recycles the memory of tensors of at least `least` bytes.

        Smaller tensors are allocated by torch.
        """
        self._least = max(1, least)
        self._free: list[mmap.mmap] = []
        # Finalizers do not take this lock, because a finalizer may run in a thread that holds the lock.
        self._taking = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Size in bytes of the free memory that the allocator keeps for reuse."""
        return sum(map(len, self._free))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size < self._least:
            return torch.empty(shape, dtype=dtype)
        memory = self._take(size)
        own = np.frombuffer(memory, np.uint8, size)
        weakref.finalize(own, self._free.append, memory).atexit = False
        return torch.from_numpy(own).view(dtype).view(shape)

    def clear(self) -> None:
        self._free.clear()

    def check_integrity(self) -> None:
        assert len({id(memory) for memory in self._free}) == len(self._free)

    def _take(self, size: int) -> mmap.mmap:
        """Take free memory of at least `size` bytes.

        If there is none, allocate new memory and drop the largest free memory.
        """
        with self._taking:
            waiting = sorted(self._free, key=len)  # a copy, because other threads may return memory at the same time
            fits = next((memory for memory in waiting if len(memory) >= size), None)
            if waiting:
                self._free.remove(fits or waiting[-1])
        return fits or mmap.mmap(-1, size + size // SPARE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def give_back() -> None:
    """Return free heap memory to the operating system (glibc only). After a long prompt, this frees hundreds of MB."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
