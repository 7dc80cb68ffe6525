"""An open file that is read and written in whole disk blocks, bypassing the page cache."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref

import torch

from .requests import write


class BlockFile:
    """The open file `handle`, closed when the object is deleted. Thread-safe.

    `direct` is True if reads and writes bypass the page cache. If the file system does not support that, the kernel is
    advised to drop the pages.
    """

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.direct = _set_direct(handle)
        self._end = weakref.finalize(self, os.close, handle)

    def allocate(self, offset: int, size: int) -> None:
        """Allocate the bytes [offset, offset + size), so that later writes there cannot run out of space.

        Raises OSError and restores the length of the file if there is no space.
        """
        try:
            os.posix_fallocate(self.handle, offset, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                with contextlib.suppress(OSError):
                    os.ftruncate(self.handle, offset)
                raise
            os.ftruncate(self.handle, offset + size)

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Write `data` (whole blocks, uint8, from `direct_file.aligned`) at `offset`. Raise OSError."""
        write(self.handle, offset, [data.numpy().data])
        if not self.direct:
            os.fdatasync(self.handle)
            os.posix_fadvise(self.handle, offset, len(data), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._end()


def _set_direct(handle: int) -> bool:
    """Enable direct I/O. Return False if the file system does not support it."""
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
        os.pread(handle, 0, 0)
    except OSError:
        return False
    return True
