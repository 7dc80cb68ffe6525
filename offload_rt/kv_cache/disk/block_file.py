"""An open file that is read and written in whole blocks, past the page cache."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref

import torch

from .requests import write


class BlockFile:
    """The open file `handle`, which is closed with the object. `direct`: whether reads and writes pass the page cache
    by; a file system that cannot do that is told to forget what was read and written. Any thread may read and write."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.direct = _set_direct(handle)
        self._end = weakref.finalize(self, os.close, handle)

    def allocate(self, offset: int, size: int) -> None:
        """Takes the bytes [offset, offset + size) from the disk, so that no later write there can find it full. Raises
        OSError, and then the file is as long as it was."""
        try:
            os.posix_fallocate(self.handle, offset, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                with contextlib.suppress(OSError):
                    os.ftruncate(self.handle, offset)
                raise
            os.ftruncate(self.handle, offset + size)

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Writes whole blocks of `data` (uint8, from `direct_file.aligned`) from `offset` on. Raises OSError."""
        write(self.handle, offset, [data.numpy().data])
        if not self.direct:
            os.fdatasync(self.handle)
            os.posix_fadvise(self.handle, offset, len(data), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Gives the handle back; a second call does nothing."""
        self._end()


def _set_direct(handle: int) -> bool:
    """Makes reads and writes pass the page cache by; False where the file system cannot."""
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
        os.pread(handle, 0, 0)
    except OSError:
        return False
    return True
