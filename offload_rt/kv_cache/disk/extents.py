"""Scattered pieces of a file as few requests: what a disk needs to begin a request pays for reading on for a while."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...utils.native_code import load_library
from .direct_file import BLOCK
from .requests import Offsets, Requests
from .row_copy import address

SOURCE = Path(__file__).with_name("extents.c")


class Reads(NamedTuple):
    """Requests of whole blocks, one behind the other in a buffer, and the pieces that they cover, int64 each, in the
    order of the file. `pieces` `[n]`: which they are. places `[n]`: where each begins in the buffer. `first`
    `[requests + 1]`: the first piece of each request, and n."""

    requests: Requests
    pieces: Offsets
    places: Offsets
    first: Offsets

    def batches(self, room: int) -> Iterator[Reads]:
        """The same in parts that each fill a buffer of `room` bytes at most; no request is larger."""
        (offset, size, at), done, count = self.requests, 0, len(self.first) - 1
        if count and at[-1] + size[-1] <= room:
            yield self
            return
        while done < count:
            stop = int(np.searchsorted(at + size, at[done] + room, side="right"))
            own, pieces = slice(done, stop), slice(self.first[done], self.first[stop])
            requests = Requests(offset[own], size[own], at[own] - at[done])
            first = self.first[done : stop + 1] - self.first[done]
            yield Reads(requests, self.pieces[pieces], self.places[pieces] - at[done], first)
            done = stop


def merged(offsets: Offsets, size: int, gap: int, most: int) -> Reads:
    """Reads of the pieces of `size` bytes at `offsets` int64 `[n]`, in any order, no two of them the same: those less
    than `gap` bytes apart share a request, but none is larger than `most` bytes, whole blocks, which a piece is not."""
    if (library := _library()) is None:
        return _merged(offsets, size, gap, most)
    n, offsets = len(offsets), np.ascontiguousarray(offsets, np.int64)
    count, (order, places, first, offset, length, at) = 0, np.zeros((6, n + 1), np.int64)
    if n and (count := library.merge(n, size, BLOCK, gap, most, address(offsets), address(order))) < 0:
        raise MemoryError
    return Reads(Requests(offset[:count], length[:count], at[:count]), order[:n], places[:n], first[: count + 1])


def _merged(offsets: Offsets, size: int, gap: int, most: int) -> Reads:
    """`merged` without compiled code."""
    order = np.argsort(offsets, kind="stable")
    ordered = offsets[order]
    first = ordered // BLOCK * BLOCK
    stop = -(-(ordered + size) // BLOCK) * BLOCK
    starts = np.ones(len(ordered), bool)
    np.greater(first[1:] - stop[:-1], gap, out=starts[1:])
    begin = 0
    for i in np.flatnonzero(~starts).tolist():
        begin = i - 1 if starts[i - 1] else begin
        starts[i] = stop[i] - first[begin] > most
    heads = np.append(np.flatnonzero(starts), len(ordered))
    lengths = stop[heads[1:] - 1] - first[heads[:-1]]
    at = np.cumsum(lengths) - lengths
    request = np.cumsum(starts) - 1
    places = at[request] + ordered - first[heads[:-1]][request]
    return Reads(Requests(first[heads[:-1]], lengths, at), order, places, heads)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(SOURCE, ("-O2", "-std=gnu11"), "requests are merged by numpy")
    if library is not None:
        library.merge.restype = ctypes.c_int64
        library.merge.argtypes = [ctypes.c_int64] * 5 + [ctypes.c_void_p] * 2
    return library
