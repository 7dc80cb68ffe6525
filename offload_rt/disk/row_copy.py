"""Many rows from anywhere in memory to anywhere, in one pass: by compiled code, else by torch in two."""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import numpy as np
import torch

from ..native_code import load_library
from .direct_file import BLOCK
from .requests import Offsets

SOURCE = Path(__file__).with_name("rows.c")


def copy_rows(source: torch.Tensor, at: Offsets, out: torch.Tensor, into: Offsets) -> None:
    """The rows `into` int64 `[n]` of out `[m, width]`, no two of them the same, become those that begin at bytes `at`
    int64 `[n]` of source. Both lie in one piece, and do not overlap; offsets are multiples of what a row and a block
    have in common."""
    assert source.is_contiguous() and out.is_contiguous() and len(at) == len(into)
    size = out.shape[1] * out.itemsize
    if not len(at):
        return
    assert int(at.min()) >= 0 and int(at.max()) + size <= source.nbytes
    assert int(into.min()) >= 0 and int(into.max()) < len(out)
    if (library := _library()) is not None:
        at, into = np.ascontiguousarray(at, np.int64), np.ascontiguousarray(into, np.int64)
        pointers = (source.data_ptr(), at.ctypes.data, out.data_ptr(), into.ctypes.data)
        library.copy_rows(ctypes.c_int64(len(at)), ctypes.c_int64(size), *map(ctypes.c_void_p, pointers))
        return
    unit = math.gcd(BLOCK, size)
    parts = torch.from_numpy(at // unit).unsqueeze(1) + torch.arange(size // unit)
    rows = source.view(torch.uint8).view(-1, unit).index_select(0, parts.flatten()).view(len(at), size)
    out.index_copy_(0, torch.from_numpy(into), rows.view(out.dtype))


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_library(SOURCE, ("-O2", "-std=gnu11"), "rows are copied by torch")
