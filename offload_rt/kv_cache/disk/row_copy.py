"""Many rows from anywhere in memory to anywhere, in one pass: by compiled code, else by torch in two."""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...utils.native_code import load_library

SOURCE = Path(__file__).with_name("rows.c")


class RowCopies(NamedTuple):
    """Rows that go from a buffer that is read into to `out` `[m, width]`, in one piece: int64 `[n]` each, the byte of
    the buffer that a row begins `at`, and the row of out, another for each, that it goes `into`. first int64
    `[requests + 1]`: the first row of each request, and n."""

    first: NDArray[np.int64]
    at: NDArray[np.int64]
    into: NDArray[np.int64]
    out: torch.Tensor


def address(array: NDArray[Any]) -> int:
    """Where it begins, of one that is not empty and may be written to: a quarter of what `array.ctypes` takes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


def copy_rows(source: torch.Tensor, at: NDArray[np.int64], out: torch.Tensor, into: NDArray[np.int64]) -> None:
    """The rows `into` int64 `[n]` of out `[m, width]`, no two of them the same, become those that begin at bytes `at`
    int64 `[n]` of source. Both lie in one piece, and do not overlap."""
    assert source.is_contiguous() and out.is_contiguous() and len(at) == len(into)
    size = out.shape[1] * out.itemsize
    if not len(at):
        return
    at, into = np.ascontiguousarray(at, np.int64), np.ascontiguousarray(into, np.int64)
    assert at.min() >= 0 and at.max() + size <= source.nbytes and into.min() >= 0 and into.max() < out.shape[0]
    if (library := _library()) is not None:
        library.copy_rows(len(at), size, source.data_ptr(), address(at), out.data_ptr(), address(into))
        return
    unit = int(np.gcd.reduce(at, initial=math.gcd(size, source.nbytes)))  # rows begin and end on multiples of it
    parts = torch.from_numpy(at // unit).unsqueeze(1) + torch.arange(size // unit)
    rows = source.view(torch.uint8).view(-1, unit).index_select(0, parts.flatten()).view(len(at), size)
    out.index_copy_(0, torch.from_numpy(into), rows.view(out.dtype))


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(SOURCE, ("-O2", "-std=gnu11"), "rows are copied by torch")
    if library is not None:
        library.copy_rows.argtypes = [ctypes.c_int64] * 2 + [ctypes.c_void_p] * 4
    return library
