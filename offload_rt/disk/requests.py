"""Many reads of one file at once: through a ring of the kernel where there is one, else by threads."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..native_code import load_library
from .row_copy import RowCopies, below

SOURCE = Path(__file__).with_name("requests.c")
DEPTH = 64
"""Requests that are with the disk at once."""

THREADS = 16
"""Where there is no ring."""

Offsets = NDArray[np.int64]


class Requests(NamedTuple):
    """Reads of one file: `size` bytes from `offset` on, to byte `at` of a buffer; int64 `[n]` each."""

    offset: Offsets
    size: Offsets
    at: Offsets


class Reader(Protocol):
    """Reads many pieces of a file."""

    def read(self, file: int, requests: Requests, buffer: memoryview) -> None:
        """All of `requests`, of the open `file`, to `buffer`. Raises OSError for the first that fails, also where the
        file ends early; then nobody writes to the buffer any more."""
        ...

    def read_rows(self, file: int, requests: Requests, buffer: memoryview, copies: RowCopies) -> None:
        """`read`, and `copies` of what came."""
        ...


class RingReader:
    """Through io_uring: one call of the kernel for many requests. One thread at a time."""

    def __init__(self, library: ctypes.CDLL, ring: int) -> None:
        self._library, self._ring = library, ring
        weakref.finalize(self, library.ring_close, ctypes.c_void_p(ring))

    @classmethod
    def open(cls, depth: int = DEPTH) -> RingReader | None:
        """None where there is no compiler, or the kernel gives no ring."""
        library = _library()
        if library is None or not (ring := library.ring_open(depth)):
            return None
        return cls(library, ring)

    def read(self, file: int, requests: Requests, buffer: memoryview) -> None:
        """`Reader.read`."""
        none = np.zeros(len(requests.size) + 1, np.int64)
        self._read(file, requests, buffer, (none, none, none), 0, None)

    def read_rows(self, file: int, requests: Requests, buffer: memoryview, copies: RowCopies) -> None:
        """`Reader.read_rows`: rows are copied while others are read."""
        first, at, into, out = copies
        lists = [np.ascontiguousarray(each, np.int64) for each in (first, at, into)]
        assert out.is_contiguous() and len(first) == len(requests.size) + 1 and int(first[-1]) == len(at) == len(into)
        assert not len(at) or (below(lists[1], len(buffer) - copies.row_bytes + 1) and below(lists[2], len(out)))
        self._read(file, requests, buffer, lists, copies.row_bytes, out.data_ptr())

    def _read(
        self, file: int, requests: Requests, buffer: memoryview, rows: Sequence[Offsets], size: int, out: int | None
    ) -> None:
        """rows: first, at and into of `RowCopies`, of `size` bytes each, which go to the address `out`."""
        lists = [np.ascontiguousarray(each, np.int64) for each in requests]
        count = len(requests.size)
        assert not count or int((requests.at + requests.size).max()) <= len(buffer)
        pointers = [ctypes.c_void_p(each.ctypes.data) for each in (np.frombuffer(buffer, np.uint8), *lists, *rows)]
        given = (ctypes.c_void_p(self._ring), file, ctypes.c_int64(count), *pointers)
        result = self._library.ring_read(*given, ctypes.c_int64(size), ctypes.c_void_p(out))
        if result:
            raise _error(-result)


class ThreadReader:
    """By threads that each wait for one request."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="offload-rt reader")
        weakref.finalize(self, self._threads.shutdown, wait=False)

    def read(self, file: int, requests: Requests, buffer: memoryview) -> None:
        """`Reader.read`."""
        pieces = zip(*(each.tolist() for each in requests), strict=True)
        jobs = [self._threads.submit(_read, file, offset, buffer[at : at + size]) for offset, size, at in pieces]
        failures = [job.exception() for job in jobs]
        for failure in failures:
            if failure is not None:
                raise failure

    def read_rows(self, file: int, requests: Requests, buffer: memoryview, copies: RowCopies) -> None:
        """`Reader.read_rows`: when everything has come."""
        self.read(file, requests, buffer)
        copies.make(buffer)


def reader(depth: int = DEPTH) -> Reader:
    """The fastest there is here."""
    return RingReader.open(depth) or ThreadReader()


def _read(file: int, offset: int, into: memoryview) -> None:
    while into:
        count = os.preadv(file, [into], offset)
        if count == 0:
            raise _error(errno.ENODATA)
        offset, into = offset + count, into[count:]


def write(file: int, offset: int, pieces: Sequence[memoryview]) -> None:
    """Writes `pieces` one behind the other from `offset` on. Raises OSError."""
    for piece in pieces:
        while piece:
            count = os.pwrite(file, piece, offset)
            offset, piece = offset + count, piece[count:]


def _error(code: int) -> OSError:
    return OSError(code, "the file ends early" if code == errno.ENODATA else os.strerror(code))


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(SOURCE, ("-O2", "-std=gnu11"), "disk reads are made by threads")
    if library is not None:
        library.ring_open.restype = ctypes.c_void_p
        library.ring_read.restype = ctypes.c_int64
    return library
