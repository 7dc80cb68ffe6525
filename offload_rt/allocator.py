"""Memory that the system's allocator would keep.

Torch asks for tensors that begin on a cache line. Up to glibc 2.37 such memory, once freed, rarely serves the next who
asks for as much: what is allocated and freed in every layer of every step, megabytes each, lets the process grow
without end. Behind 120,000 tokens it was 25 MB a step, 1.7 GB in 64.
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

SPARE = 8
"""New memory is larger than what is asked for by one in so many, which a context that grows needs soon. Of what nobody
has written to nothing is resident."""

LARGE = 1 << 18
"""Bytes from which on memory is recycled: that takes 5 us, and holes of less do no harm."""


class RecycledMemory:
    """Gives tensors of memory that nobody refers to any more, and takes new memory where there is none that is large
    enough: of as many pieces as there were tensors at once. A tensor gives its memory back when it and its views are
    gone, in whichever thread that is; any thread may take.
    """

    def __init__(self, least: int = LARGE) -> None:
        """least: bytes of the smallest tensors that are of such memory; others are the allocator's."""
        self._least = max(1, least)
        self._free: list[mmap.mmap] = []
        self._taking = threading.Lock()
        """Who gives back does not take it: that may be in the middle of taking, where the collector runs."""

    @property
    def nbytes(self) -> int:
        """Of memory that waits for its next use."""
        return sum(map(len, self._free))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in main memory; what is in it may be anything."""
        size = math.prod(shape) * dtype.itemsize
        if size < self._least:
            return torch.empty(shape, dtype=dtype)
        memory = self._take(size)
        own = np.frombuffer(memory, np.uint8, size)
        weakref.finalize(own, self._free.append, memory).atexit = False
        return torch.from_numpy(own).view(dtype).view(shape)

    def clear(self) -> None:
        """Gives what waits back to the system."""
        self._free.clear()

    def check_integrity(self) -> None:
        """Asserts that nothing waits twice."""
        assert len({id(memory) for memory in self._free}) == len(self._free)

    def _take(self, size: int) -> mmap.mmap:
        """The smallest piece that waits and is large enough; else a new one, instead of the largest that waits."""
        with self._taking:
            waiting = sorted(self._free, key=len)  # of the list itself: others give back meanwhile
            fits = next((memory for memory in waiting if len(memory) >= size), None)
            if waiting:
                self._free.remove(fits or waiting[-1])
        return fits or mmap.mmap(-1, size + size // SPARE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def give_back() -> None:
    """What the system's allocator keeps goes to the system, holes between what is in use included: after a long prompt
    hundreds of megabytes. Does nothing where the C library cannot."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
