"""Several open files that are read at once: a place in one of them is a single number."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FILE_BITS = 44
"""Of a place, the byte of a file; the bits above say which file: up to 16 TiB of each of half a million."""


class FileTable:
    """The handles of open files by number. `direct`: whether all of them pass the page cache by. Whoever takes one out
    sees to it that nothing that still reads has a place in it: the next one that comes has its number."""

    def __init__(self, first: int, *, direct: bool) -> None:
        self.direct = direct
        self.handles: NDArray[np.int32] = np.full(16, -1, np.int32)
        self.handles[0] = first
        self._free = list(range(15, 0, -1))

    def add(self, handle: int, *, direct: bool) -> int:
        """Returns the number of a further file."""
        self.direct &= direct
        if not self._free:
            count = len(self.handles)
            self.handles = np.concatenate((self.handles, np.full(count, -1, np.int32)))
            self._free = list(range(2 * count - 1, count - 1, -1))
        number = self._free.pop()
        self.handles[number] = handle
        return number

    def remove(self, number: int) -> None:
        """The file is read no more."""
        self.handles[number] = -1
        self._free.append(number)


def place(number: int, byte: int = 0) -> int:
    """The place of a file's byte."""
    return number << FILE_BITS | byte
