"""An unnamed temporary file with direct I/O, deleted when the process ends."""

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

BLOCK = 4096  # bytes; direct I/O needs this alignment in the file and in memory

NAMED = ".offload-rt-"  # prefix of the temporary name if the file system does not support unnamed files


class DirectFile(BlockFile):
    """An unnamed file in `folder` that the kernel deletes when this process ends, even after a crash.

    `files` is the table of files that `read` can access. Its first entry is this file.

    Args:
        folder: Folder on a disk with enough space.
        readers: Creates the reader of each thread that reads. None selects the fastest available one.

    Raises:
        ConfigError: The folder cannot be used.
    """

    def __init__(self, folder: Path, readers: Callable[[], Reader] | None = None) -> None:
        self.folder = folder
        try:
            handle = nameless_file(folder)
        except OSError as error:
            raise ConfigError(
                f"cannot store KV in {str(folder)!r}: {error.strerror or error}; give a folder on a disk with space "
                "where you may write"
            ) from error
        super().__init__(handle)
        self._readers, self._own, self._counting = readers or reader, threading.local(), threading.Lock()
        self.files = FileTable(handle, direct=self.direct)
        self.bytes_read = self.bytes_written = 0

    def read(self, requests: Requests, buffer: torch.Tensor, copies: RowCopies | None = None) -> None:
        """Read whole blocks of `files` into `buffer` (uint8, from `aligned`) and perform `copies` from it.

        Copies may run while other requests are still being read. Raises OSError.
        """
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
        """Write whole blocks (`BlockFile.write`)."""
        super().write(offset, data)
        self.bytes_written += len(data)


def aligned(size: int) -> torch.Tensor:
    """Return block-aligned uint8 memory `[size]`, unmapped when it is deleted."""
    assert size > 0
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8))


def nameless_file(folder: Path) -> int:
    """Open a new unnamed file in `folder` that is deleted when the process ends. Raise OSError."""
    make_private_folder(folder)
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    handle, name = tempfile.mkstemp(prefix=NAMED, suffix=".rows", dir=folder)
    for path in (Path(name), *folder.glob(f"{NAMED}*.rows")):  # also files of killed processes
        path.unlink(missing_ok=True)
    return handle
