"""Scattered pieces of a file as few requests: what a disk needs to begin a request pays for reading on for a while."""

from __future__ import annotations

import numpy as np

from .direct_file import BLOCK
from .requests import Offsets, Requests


def merged(offsets: Offsets, size: int, gap: int) -> tuple[Requests, Offsets]:
    """Requests of whole blocks, one behind the other in a buffer, that together cover the pieces of `size` bytes at
    `offsets` int64 `[n]`, in any order; pieces less than `gap` bytes apart share a request. Also, int64 `[n]`, where
    each piece begins in the buffer."""
    if not len(offsets):
        none = np.empty(0, np.int64)
        return Requests(none, none, none), none
    order = np.argsort(offsets, kind="stable")
    ordered = offsets[order]
    first = ordered // BLOCK * BLOCK
    stop = -(-(ordered + size) // BLOCK) * BLOCK
    starts = np.empty(len(ordered), bool)
    starts[0] = True
    np.greater(first[1:] - stop[:-1], gap, out=starts[1:])
    heads = np.flatnonzero(starts)
    lengths = stop[np.append(heads[1:], len(ordered)) - 1] - first[heads]
    at = np.cumsum(lengths) - lengths
    places = np.empty(len(offsets), np.int64)
    request = np.cumsum(starts) - 1
    places[order] = at[request] + ordered - first[heads][request]
    return Requests(first[heads], lengths, at), places
