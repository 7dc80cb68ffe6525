"""A file without a name, a process's slow memory: read and written past the page cache, gone with the process."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ...errors import ConfigError
from ...utils.private_files import make_private_folder
from .block_file import BlockFile
from .file_table import FILE_BITS, FileTable
from .requests import Reader, Requests, reader
from .row_copy import RowCopies

BLOCK = 4096
"""Bytes: what is read and written past the page cache begins and ends on multiples of it, in the file and in memory."""


NAMED = ".offload-rt-"
"""What a file's name begins with while it has one, where the file system knows none without."""


class DirectFile(BlockFile):
    """A file in `folder` that no other process can open, and that the kernel removes when this process ends, however it
    ends. `files`: others that are read together with it, whose first is this one. Raises ConfigError where the folder
    cannot be used.
    """

    def __init__(self, folder: Path, readers: Callable[[], Reader] | None = None) -> None:
        """readers: gives each thread that reads its reader; None: the fastest there is."""
        self.folder = folder
        try:
            handle = nameless_file(folder)
        except OSError as error:
            raise ConfigError(
                f"cannot keep rows in {str(folder)!r}: {error.strerror or error}; give a folder on a disk with room "
                "where you may write"
            ) from error
        super().__init__(handle)
        self._readers, self._own, self._counting = readers or reader, threading.local(), threading.Lock()
        self.files = FileTable(handle, direct=self.direct)
        self.bytes_read = self.bytes_written = 0

    def read(self, requests: Requests, buffer: torch.Tensor, copies: RowCopies | None = None) -> None:
        """Reads whole blocks of `files` into `buffer` (uint8, from `aligned`), and makes `copies` of what came, some of
        them while others are read. Raises OSError."""
        if not hasattr(self._own, "reader"):
            self._own.reader = self._readers()
        handles = self.files.handles
        self._own.reader.read(handles, requests, buffer.numpy().data, copies)
        with self._counting:
            self.bytes_read += int(requests.size.sum())
        if not self.files.direct:
            places = zip(*np.divmod(requests.offset, 1 << FILE_BITS), requests.size, strict=True)
            for number, offset, size in places:
                os.posix_fadvise(int(handles[number]), int(offset), int(size), os.POSIX_FADV_DONTNEED)

    def write(self, offset: int, data: torch.Tensor) -> None:
        """`BlockFile.write`."""
        super().write(offset, data)
        self.bytes_written += len(data)


def aligned(size: int) -> torch.Tensor:
    """uint8 `[size]` whose memory begins on a block, given back to the system when it is dropped."""
    assert size > 0
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8))


def nameless_file(folder: Path) -> int:
    """Open a new file in `folder` that has no name and goes with the process. Raise OSError."""
    make_private_folder(folder)
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    handle, name = tempfile.mkstemp(prefix=NAMED, suffix=".rows", dir=folder)
    for path in (Path(name), *folder.glob(f"{NAMED}*.rows")):  # and those of processes that were killed here
        path.unlink(missing_ok=True)
    return handle
