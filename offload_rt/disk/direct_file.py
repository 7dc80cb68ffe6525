"""A file without a name, a process's slow memory: read and written past the page cache, gone with the process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ..errors import ConfigError
from .requests import Reader, Requests, reader, write
from .row_copy import RowCopies

BLOCK = 4096
"""Bytes: what is read and written past the page cache begins and ends on multiples of it, in the file and in memory."""


NAMED = ".offload-rt-"
"""What a file's name begins with while it has one, where the file system knows none without."""


class DirectFile:
    """A file in `folder` that no other process can open, and that the kernel removes when this process ends, however it
    ends. `direct`: whether reads and writes pass the page cache by; a file system that cannot do that is told to forget
    what was read and written.

    Any thread may read and write. Raises ConfigError where the folder cannot be used.
    """

    def __init__(self, folder: Path, readers: Callable[[], Reader] | None = None) -> None:
        """readers: gives each thread that reads its reader; None: the fastest there is."""
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _nameless(folder)
        except OSError as error:
            raise ConfigError(
                f"cannot keep rows in {str(folder)!r}: {error.strerror or error}; give a folder on a disk with room "
                "where you may write"
            ) from error
        self._readers, self._own, self._counting = readers or reader, threading.local(), threading.Lock()
        self.direct = _set_direct(self._file)
        self.bytes_read = self.bytes_written = 0
        self._end = weakref.finalize(self, os.close, self._file)

    def allocate(self, offset: int, size: int) -> None:
        """Takes the bytes [offset, offset + size) from the disk, so that no later write there can find it full. Raises
        OSError, and then the file is as long as it was."""
        try:
            os.posix_fallocate(self._file, offset, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, offset)
                raise
            os.ftruncate(self._file, offset + size)

    def read(self, requests: Requests, buffer: torch.Tensor, copies: RowCopies | None = None) -> None:
        """Reads whole blocks into `buffer` (uint8, from `aligned`), and makes `copies` of what came, some of them while
        others are read. Raises OSError."""
        if not hasattr(self._own, "reader"):
            self._own.reader = self._readers()
        self._own.reader.read(self._file, requests, buffer.numpy().data, copies)
        with self._counting:
            self.bytes_read += int(requests.size.sum())
        if not self.direct:
            for offset, size in zip(requests.offset.tolist(), requests.size.tolist(), strict=True):
                os.posix_fadvise(self._file, offset, size, os.POSIX_FADV_DONTNEED)

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Writes whole blocks of `data` (uint8, from `aligned`) from `offset` on. Raises OSError."""
        write(self._file, offset, [data.numpy().data])
        self.bytes_written += len(data)
        if not self.direct:
            os.fdatasync(self._file)
            os.posix_fadvise(self._file, offset, len(data), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Gives the disk's room back; a second call does nothing."""
        self._end()


def aligned(size: int) -> torch.Tensor:
    """uint8 `[size]` whose memory begins on a block, given back to the system when it is dropped."""
    assert size > 0
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8))


def _nameless(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    handle, name = tempfile.mkstemp(prefix=NAMED, suffix=".rows", dir=folder)
    for path in (Path(name), *folder.glob(f"{NAMED}*.rows")):  # and those of processes that were killed here
        path.unlink(missing_ok=True)
    return handle


def _set_direct(file: int) -> bool:
    """Makes reads and writes pass the page cache by; False where the file system cannot."""
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
        os.pread(file, 0, 0)
    except OSError:
        return False
    return True
