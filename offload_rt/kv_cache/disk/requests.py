"""Read pieces of open files. Nearby pieces are merged into one request, and requests run concurrently.

Requests use io_uring if it is available, and threads otherwise.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...utils import native_libraries
from .row_copy import RowCopies, address, copy_rows

DISK_PAGE = 4096  # bytes; direct I/O needs this alignment both in the file and in memory
DEPTH = 64  # number of concurrent requests with io_uring
THREADS = 16  # number of concurrent requests without io_uring
# A file position is an integer. Its low bits are the byte offset (up to 16 TiB), and its high bits are the file number.
FILE_BITS = 44

Offsets = NDArray[np.int64]
Handles = NDArray[np.int32]


@dataclass
class DiskUse:
    wanted: int = 0  # KV entries requested by `FileArena.gather`
    cached: int = 0  # requested KV entries that were in memory
    requests: int = 0  # read requests sent to the disk
    bytes_read: int = 0
    bytes_written: int = 0

    def since(self, before: DiskUse) -> DiskUse:
        return DiskUse(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(self)))


class FileTable:
    """Handles of open files by file number. `direct` is True if all files bypass the page cache.

    File numbers are reused, so a file must not be removed while a pending read refers to its number.
    """

    def __init__(self, first: int, *, direct: bool) -> None:
        self.direct = direct
        self.handles: NDArray[np.int32] = np.full(16, -1, np.int32)
        self.handles[0] = first
        self._free = list(range(15, 0, -1))

    def add(self, handle: int, *, direct: bool) -> int:
        self.direct &= direct
        if not self._free:
            count = len(self.handles)
            self.handles = np.concatenate((self.handles, np.full(count, -1, np.int32)))
            self._free = list(range(2 * count - 1, count - 1, -1))
        number = self._free.pop()
        self.handles[number] = handle
        return number

    def remove(self, number: int) -> None:
        self.handles[number] = -1
        self._free.append(number)


def file_position(number: int, byte: int = 0) -> int:
    return number << FILE_BITS | byte


class Requests(NamedTuple):
    """Read requests, as int64 arrays `[n]`.

    Request i reads `size[i]` bytes at file position `offset[i]` (`file_position`) into the buffer at byte `at[i]`.
    """

    offset: Offsets
    size: Offsets
    at: Offsets


class Reads(NamedTuple):
    """Read requests that fill a buffer, and the location of each piece in the buffer. Pieces are in file order."""

    requests: Requests
    pieces: Offsets  # index of each piece in the `offsets` passed to `merge_reads`, int64 `[n]`
    starts: Offsets  # byte offset of each piece in the buffer, int64 `[n]`
    # Index of the first piece of each request, int64 `[requests + 1]`. Request i contains the pieces
    # [first[i], first[i + 1]).
    first: Offsets

    def batches(self, buffer_bytes: int) -> Iterator[Reads]:
        """Split the requests into batches that fit in a buffer. No request may be larger than the buffer."""
        (offset, size, at), done, count = self.requests, 0, len(self.first) - 1
        if count and at[-1] + size[-1] <= buffer_bytes:
            yield self
            return
        while done < count:
            stop = int(np.searchsorted(at + size, at[done] + buffer_bytes, side="right"))
            own, pieces = slice(done, stop), slice(self.first[done], self.first[stop])
            requests = Requests(offset[own], size[own], at[own] - at[done])
            first = self.first[done : stop + 1] - self.first[done]
            yield Reads(requests, self.pieces[pieces], self.starts[pieces] - at[done], first)
            done = stop


def merge_reads(offsets: Offsets, size: int, gap: int, most: int) -> Reads:
    """Merge reads of distinct pieces, each of `size` bytes, into requests.

    Args:
        offsets: File position of each piece, int64 `[n]`, in any order.
        gap: Largest gap in bytes between neighbouring pieces that are read in one request.
        most: Largest size of a request in bytes. It must be a multiple of the disk block size and larger than a piece.
    """
    if (library := _merge_library()) is None:
        return _merge_with_numpy(offsets, size, gap, most)
    n, offsets = len(offsets), np.ascontiguousarray(offsets, np.int64)
    count, (order, starts, first, offset, length, at) = 0, np.zeros((6, n + 1), np.int64)
    if n and (count := library.merge(n, size, DISK_PAGE, gap, most, address(offsets), address(order))) < 0:
        raise MemoryError
    return Reads(Requests(offset[:count], length[:count], at[:count]), order[:n], starts[:n], first[: count + 1])


def _merge_with_numpy(offsets: Offsets, size: int, gap: int, most: int) -> Reads:
    order = np.argsort(offsets, kind="stable")
    ordered = offsets[order]
    first = ordered // DISK_PAGE * DISK_PAGE
    stop = -(-(ordered + size) // DISK_PAGE) * DISK_PAGE
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
    piece_starts = at[request] + ordered - first[heads[:-1]][request]
    return Reads(Requests(first[heads[:-1]], lengths, at), order, piece_starts, heads)


class RingReader:
    """Reader that uses io_uring, with one system call for many requests. Only the thread that opened it may use it."""

    def __init__(self, library: ctypes.CDLL, ring: int) -> None:
        self._library, self._ring = library, ring
        # Not at exit, when a daemon thread may still be reading.
        weakref.finalize(self, library.ring_close, ring).atexit = False

    @classmethod
    def open(cls) -> RingReader | None:
        """Create a reader. Return None if the C code or io_uring is not available."""
        library = _library()
        if library is None or not (ring := library.ring_open(DEPTH)):
            return None
        return cls(library, ring)

    def read(self, files: Handles, requests: Requests, buffer: memoryview, copies: RowCopies | None = None) -> None:
        """Read `requests` into `buffer`. If `copies` is given, also copy rows from `buffer` to its output.

        Rows may be copied while other requests are still being read. `files` are the handles of the open files
        (`FileTable.handles`). Raises OSError if a request fails or reads past the end of a file. When the error is
        raised, no request writes to `buffer` any more.
        """
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
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="offload-rt reader")
        weakref.finalize(self, self._threads.shutdown, wait=False)

    def read(self, files: Handles, requests: Requests, buffer: memoryview, copies: RowCopies | None = None) -> None:
        """Read like `RingReader.read`, but start to copy rows only after all requests have ended."""
        pieces = zip(*(each.tolist() for each in requests), strict=True)
        jobs = [self._threads.submit(_read, files, offset, buffer[at : at + size]) for offset, size, at in pieces]
        failures = [job.exception() for job in jobs]
        for failure in failures:
            if failure is not None:
                raise failure
        if copies is not None:
            copy_rows(torch.frombuffer(buffer, dtype=torch.uint8), copies.at, copies.out, copies.into)


def reader() -> RingReader | ThreadReader:
    return RingReader.open() or ThreadReader()


def _read(files: Handles, position: int, into: memoryview) -> None:
    number, offset = divmod(position, 1 << FILE_BITS)
    file = int(files[number])
    while into:
        count = os.preadv(file, [into], offset)
        if count == 0:
            raise _error(errno.ENODATA)
        offset, into = offset + count, into[count:]


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


@functools.cache
def _merge_library() -> ctypes.CDLL | None:
    library = native_libraries.load("merge")
    if library is not None:
        library.merge.restype = ctypes.c_int64
        library.merge.argtypes = [ctypes.c_int64] * 5 + [ctypes.c_void_p] * 2
    return library
