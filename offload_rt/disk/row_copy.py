"""Many rows from anywhere in memory to anywhere, in one pass: by compiled code, else by torch in two."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..native_code import load_library

SOURCE = Path(__file__).with_name("rows.c")


class RowCopies(NamedTuple):
    """Rows that go from a buffer that is read into to `out` `[m, width]`, in one piece: int64 `[n]` each, the byte of
    the buffer that a row begins `at`, and the row of out, another for each, that it goes `into`. first int64
    `[requests + 1]`: the first row of each request, and n."""

    first: NDArray[np.int64]
    at: NDArray[np.int64]
    into: NDArray[np.int64]
    out: torch.Tensor

    @property
    def row_bytes(self) -> int:
        """Of a row."""
        return self.out.shape[1] * self.out.itemsize

    def make(self, buffer: memoryview) -> None:
        """All of them; everything has been read."""
        copy_rows(torch.frombuffer(buffer, dtype=torch.uint8), self.at, self.out, self.into)


def below(numbers: NDArray[np.int64], stop: int) -> bool:
    """Whether all `numbers`, in one piece, are of [0, stop); there may be none."""
    return int(numbers.view(np.uint64).max(initial=0)) < max(1, stop)


def copy_rows(source: torch.Tensor, at: NDArray[np.int64], out: torch.Tensor, into: NDArray[np.int64]) -> None:
    """The rows `into` int64 `[n]` of out `[m, width]`, no two of them the same, become those that begin at bytes `at`
    int64 `[n]` of source. Both lie in one piece, and do not overlap."""
    assert source.is_contiguous() and out.is_contiguous() and len(at) == len(into)
    size = out.shape[1] * out.itemsize
    if not len(at):
        return
    at, into = np.ascontiguousarray(at, np.int64), np.ascontiguousarray(into, np.int64)
    assert below(at, source.nbytes - size + 1) and below(into, len(out))
    if (library := _library()) is not None:
        pointers = (source.data_ptr(), at.ctypes.data, out.data_ptr(), into.ctypes.data)
        library.copy_rows(ctypes.c_int64(len(at)), ctypes.c_int64(size), *map(ctypes.c_void_p, pointers))
        return
    unit = int(np.gcd.reduce(at, initial=size))  # blocks and rows have a few bytes in common
    parts = torch.from_numpy(at // unit).unsqueeze(1) + torch.arange(size // unit)
    rows = source.view(torch.uint8).view(-1, unit).index_select(0, parts.flatten()).view(len(at), size)
    out.index_copy_(0, torch.from_numpy(into), rows.view(out.dtype))


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_library(SOURCE, ("-O2", "-std=gnu11"), "rows are copied by torch")
