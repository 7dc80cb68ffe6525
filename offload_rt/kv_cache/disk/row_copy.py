"""Copy scattered rows in memory, in one pass with C code or in two passes with torch."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...utils import native_libraries


class RowCopies(NamedTuple):
    """Rows to copy from a read buffer to `out`."""

    # Index of the first row of each request, int64 `[requests + 1]`. Request i contains the rows
    # [first[i], first[i + 1]).
    first: NDArray[np.int64]
    at: NDArray[np.int64]  # byte offset of each row in the buffer, int64 `[n]`
    into: NDArray[np.int64]  # destination index of each row in `out`, int64 `[n]`, without duplicates
    out: torch.Tensor  # contiguous output `[m, width]`


def address(array: NDArray[Any]) -> int:
    """Return the memory address of a non-empty, writable array. This is four times as fast as `array.ctypes`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


def copy_rows(source: torch.Tensor, at: NDArray[np.int64], out: torch.Tensor, into: NDArray[np.int64]) -> None:
    """Copy the rows at the byte offsets `at` `[n]` in `source` to the rows `into` `[n]` of `out` `[m, width]`.

    The indices in `into` must be distinct. Both tensors must be contiguous and must not overlap.
    """
    assert source.is_contiguous() and out.is_contiguous() and len(at) == len(into)
    size = out.shape[1] * out.itemsize
    if not len(at):
        return
    at, into = np.ascontiguousarray(at, np.int64), np.ascontiguousarray(into, np.int64)
    assert at.min() >= 0 and at.max() + size <= source.nbytes and into.min() >= 0 and into.max() < out.shape[0]
    if (library := _library()) is not None:
        library.copy_rows(len(at), size, source.data_ptr(), address(at), out.data_ptr(), address(into))
        return
    # The start and end of every row are multiples of this number of bytes.
    unit = int(np.gcd.reduce(at, initial=math.gcd(size, source.nbytes)))
    parts = torch.from_numpy(at // unit).unsqueeze(1) + torch.arange(size // unit)
    rows = source.view(torch.uint8).view(-1, unit).index_select(0, parts.flatten()).view(len(at), size)
    out.index_copy_(0, torch.from_numpy(into), rows.view(out.dtype))


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = native_libraries.load("rows")
    if library is not None:
        library.copy_rows.argtypes = [ctypes.c_int64] * 2 + [ctypes.c_void_p] * 4
    return library
