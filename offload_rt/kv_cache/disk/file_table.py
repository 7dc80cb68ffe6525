"""A table of open files. A single number, the place, identifies a byte in one of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FILE_BITS = 44  # low bits of a place: byte within the file (up to 16 TiB); high bits: file number (up to 2**19)


class FileTable:
    """Handles of open files by number. `direct` is True if all of them bypass the page cache.

    File numbers are reused. Remove a file only when no pending read has a place in it.
    """

    def __init__(self, first: int, *, direct: bool) -> None:
        self.direct = direct
        self.handles: NDArray[np.int32] = np.full(16, -1, np.int32)
        self.handles[0] = first
        self._free = list(range(15, 0, -1))

    def add(self, handle: int, *, direct: bool) -> int:
        """Add a file and return its number."""
        self.direct &= direct
        if not self._free:
            count = len(self.handles)
            self.handles = np.concatenate((self.handles, np.full(count, -1, np.int32)))
            self._free = list(range(2 * count - 1, count - 1, -1))
        number = self._free.pop()
        self.handles[number] = handle
        return number

    def remove(self, number: int) -> None:
        """Remove a file from the table."""
        self.handles[number] = -1
        self._free.append(number)


def place(number: int, byte: int = 0) -> int:
    """Return the place of a byte in a file."""
    return number << FILE_BITS | byte
