"""Concurrent reads of open files, with io_uring if available, else with threads."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...utils import native_libraries
from .file_table import FILE_BITS
from .row_copy import RowCopies, address, copy_rows

DEPTH = 64  # concurrent requests with io_uring
THREADS = 16  # concurrent requests without io_uring

Offsets = NDArray[np.int64]
Handles = NDArray[np.int32]


class Requests(NamedTuple):
    """Reads of `size` bytes from the place `offset` (`file_table.place`) to byte `at` of a buffer; int64 `[n]` each."""

    offset: Offsets
    size: Offsets
    at: Offsets


class Reader(Protocol):
    """Executes batches of reads."""

    def read(self, files: Handles, requests: Requests, buffer: memoryview, copies: RowCopies | None = None) -> None:
        """Read `requests` of the open `files` (`FileTable.handles`) into `buffer` and perform `copies` from it.

        Raises OSError for the first failed request, including a read past the end of a file. No request writes to the
        buffer after that.
        """
        ...


class RingReader:
    """Reads with io_uring: one system call for many requests. Only for the thread that opened it."""

    def __init__(self, library: ctypes.CDLL, ring: int) -> None:
        self._library, self._ring = library, ring
        weakref.finalize(self, library.ring_close, ring)

    @classmethod
    def open(cls, depth: int = DEPTH) -> RingReader | None:
        """Create a reader. Return None without compiled code or if the kernel does not provide a ring."""
        library = _library()
        if library is None or not (ring := library.ring_open(depth)):
            return None
        return cls(library, ring)

    def read(self, files: Handles, requests: Requests, buffer: memoryview, copies: RowCopies | None = None) -> None:
        """Read requests. Copies overlap with other reads."""
        if not (count := len(requests.size)):
            return
        first, at, into, out = copies or (none := np.zeros(count + 1, np.int64), none, none, torch.empty(0, 0))
        assert out.is_contiguous() and len(first) == count + 1 and len(at) == len(into)
        lists = [np.ascontiguousarray(each, np.int64) for each in (*requests, first, at, into)]
        given = (count, len(at), len(buffer), address(np.frombuffer(buffer, np.uint8)), *map(address, lists))
        opened, row_bytes = (address(files), len(files), FILE_BITS), out.shape[1] * out.itemsize
        if result := self._library.ring_read(self._ring, *opened, *given, row_bytes, out.data_ptr(), out.shape[0]):
            raise _error(-result)


class ThreadReader:
    """Reads with a thread pool, one request per thread."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="offload-rt reader")
        weakref.finalize(self, self._threads.shutdown, wait=False)

    def read(self, files: Handles, requests: Requests, buffer: memoryview, copies: RowCopies | None = None) -> None:
        """Read requests. Copies start after all reads."""
        pieces = zip(*(each.tolist() for each in requests), strict=True)
        jobs = [self._threads.submit(_read, files, offset, buffer[at : at + size]) for offset, size, at in pieces]
        failures = [job.exception() for job in jobs]
        for failure in failures:
            if failure is not None:
                raise failure
        if copies is not None:
            copy_rows(torch.frombuffer(buffer, dtype=torch.uint8), copies.at, copies.out, copies.into)


def reader(depth: int = DEPTH) -> Reader:
    """Return the fastest available reader."""
    return RingReader.open(depth) or ThreadReader()


def _read(files: Handles, place: int, into: memoryview) -> None:
    number, offset = divmod(place, 1 << FILE_BITS)
    file = int(files[number])
    while into:
        count = os.preadv(file, [into], offset)
        if count == 0:
            raise _error(errno.ENODATA)
        offset, into = offset + count, into[count:]


def write(file: int, offset: int, pieces: Sequence[memoryview]) -> None:
    """Write `pieces` consecutively from `offset` on. Raise OSError."""
    for piece in pieces:
        while piece:
            count = os.pwrite(file, piece, offset)
            offset, piece = offset + count, piece[count:]


def _error(code: int) -> OSError:
    return OSError(code, "the file ends early" if code == errno.ENODATA else os.strerror(code))


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = native_libraries.load("requests")
    if library is not None:
        library.ring_open.restype = ctypes.c_void_p
        library.ring_close.argtypes = [ctypes.c_void_p]
        numbers, pointers = [ctypes.c_int64] * 3, [ctypes.c_void_p] * 7
        library.ring_read.restype = ctypes.c_int64
        library.ring_read.argtypes = [
            *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, *numbers, *pointers,
            ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64,
        ]  # fmt: skip
    return library
