"""Files with direct I/O, which bypasses the operating system's page cache."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import threading
import weakref
from pathlib import Path

import numpy as np
import torch

from ...errors import ConfigError
from ...utils.atomic_files import write_all
from ...utils.private_files import make_private_folder
from .requests import FILE_BITS, FileTable, Requests, reader
from .row_copy import RowCopies

NAMED = ".offload-rt-"  # prefix for named temporary files, which file systems without unnamed files need


class BlockFile:
    """An open file that is read and written in whole disk blocks. Thread-safe.

    Attributes:
        handle: The file descriptor. It is closed when the object is deleted.
        direct: Whether reads and writes bypass the page cache. If they do not, the kernel is advised to drop the pages
            after each read or write.
    """

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.direct = _enable_direct_io(handle)
        self._end = weakref.finalize(self, os.close, handle)
        self._end.atexit = False  # At exit, a daemon thread may still write, and the number could be reused.

    def allocate(self, offset: int, size: int) -> None:
        """Allocate disk space for the bytes [offset, offset + size). Raise OSError if there is not enough."""
        try:
            os.posix_fallocate(self.handle, offset, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                with contextlib.suppress(OSError):
                    os.ftruncate(self.handle, offset)
                raise
            os.ftruncate(self.handle, offset + size)

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Write `data`, a uint8 tensor of whole disk blocks created by `aligned`, at byte `offset`. Raises OSError."""
        write_all(self.handle, offset, data.numpy().data)
        if not self.direct:
            os.fdatasync(self.handle)
            os.posix_fadvise(self.handle, offset, len(data), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._end()


class DirectFile(BlockFile):
    """A temporary file in `folder`, which the operating system deletes when this process ends.

    Raises:
        ConfigError: The folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            handle = unnamed_file(folder)
        except OSError as error:
            raise ConfigError(
                f"cannot store KV in {str(folder)!r}: {error.strerror or error}; choose a writable folder on a "
                "disk with free space"
            ) from error
        super().__init__(handle)
        self._local = threading.local()
        self.files = FileTable(handle, direct=self.direct)  # files that `read` can access; entry 0 is this file

    def read(self, requests: Requests, buffer: torch.Tensor, copies: RowCopies | None = None) -> None:
        """Read whole disk blocks into `buffer`, a uint8 tensor created by `aligned`. Raises OSError.

        The requests refer to the open files in `files`. If `copies` is given, rows are also copied out of `buffer`,
        some of them while other requests are still being read.
        """
        if not hasattr(self._local, "reader"):
            self._local.reader = reader()
        handles = self.files.handles
        self._local.reader.read(handles, requests, buffer.numpy().data, copies)
        if not self.files.direct:
            pieces = zip(*np.divmod(requests.offset, 1 << FILE_BITS), requests.size, strict=True)
            for number, offset, size in pieces:
                os.posix_fadvise(int(handles[number]), int(offset), int(size), os.POSIX_FADV_DONTNEED)


def aligned(size: int) -> torch.Tensor:
    """Return a uint8 tensor `[size]` that is aligned to disk blocks. Its memory is unmapped when it is deleted."""
    assert size > 0
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8))


def unnamed_file(folder: Path) -> int:
    make_private_folder(folder)
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    handle, name = tempfile.mkstemp(prefix=NAMED, suffix=".rows", dir=folder)
    # `folder.glob` finds files that killed processes have left behind.
    for path in (Path(name), *folder.glob(f"{NAMED}*.rows")):
        path.unlink(missing_ok=True)
    return handle


def _enable_direct_io(handle: int) -> bool:
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
        os.pread(handle, 0, 0)
    except OSError:
        return False
    return True
