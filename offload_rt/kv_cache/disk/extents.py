"""Merge scattered reads into few requests. Reading through a short gap is cheaper than a new request."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...utils import native_libraries
from .direct_file import BLOCK
from .requests import Offsets, Requests
from .row_copy import address


class Reads(NamedTuple):
    """Requests of whole blocks into consecutive parts of a buffer, and the pieces they contain, in file order.

    Attributes:
        requests: The requests.
        pieces: int64 `[n]`, index of each piece.
        places: int64 `[n]`, byte of the buffer where each piece begins.
        first: int64 `[requests + 1]`, first piece of each request, and n.
    """

    requests: Requests
    pieces: Offsets
    places: Offsets
    first: Offsets

    def batches(self, room: int) -> Iterator[Reads]:
        """Split into batches for a buffer of `room` bytes. No request may be larger."""
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
    """Merge reads of distinct pieces of a file.

    Args:
        offsets: int64 `[n]`, start of each piece, in any order.
        size: Bytes per piece.
        gap: Pieces at most this many bytes apart share a request.
        most: Maximum bytes per request, whole blocks and larger than a piece.
    """
    if (library := _library()) is None:
        return _merged(offsets, size, gap, most)
    n, offsets = len(offsets), np.ascontiguousarray(offsets, np.int64)
    count, (order, places, first, offset, length, at) = 0, np.zeros((6, n + 1), np.int64)
    if n and (count := library.merge(n, size, BLOCK, gap, most, address(offsets), address(order))) < 0:
        raise MemoryError
    return Reads(Requests(offset[:count], length[:count], at[:count]), order[:n], places[:n], first[: count + 1])


def _merged(offsets: Offsets, size: int, gap: int, most: int) -> Reads:
    """Merge reads without compiled code."""
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
    library = native_libraries.load("extents")
    if library is not None:
        library.merge.restype = ctypes.c_int64
        library.merge.argtypes = [ctypes.c_int64] * 5 + [ctypes.c_void_p] * 2
    return library
