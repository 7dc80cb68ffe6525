"""Atomic and durable writes of files."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from .private_files import open_private


def write_atomic(path: Path, data: bytes, *, private: bool = True, keep: bool = False, durable: bool = True) -> None:
    """Write a file atomically, using a temporary file in the same folder.

    Several processes may do this at the same time.

    If the write fails, an existing file is not changed. If the process is killed, a temporary file `STEM.*.tmp` may
    remain.

    Args:
        private: Whether only the owner can access the file. If False, the umask decides.
        keep: Whether to keep an existing file instead of writing `data`.
        durable: Whether to wait until the content is on disk. If False, a power failure can erase the content.

    Raises:
        OSError: The file cannot be written.
    """
    temporary = path.with_name(f"{path.stem}.{secrets.token_hex(16)}.tmp")
    _write(temporary, data, private=private, durable=durable)
    try:
        if keep:
            _put_new(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _put_new(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError:  # the file system has no hard links; other processes may see an empty file for a moment
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return
        try:
            os.replace(temporary, path)
        except OSError:
            path.unlink()
            raise


def write_synced(path: Path, data: bytes, *, private: bool = True) -> None:
    """Write a file and wait until it is on disk. If this fails, remove the file and re-raise the error."""
    _write(path, data, private=private, durable=True)


def _write(path: Path, data: bytes, *, private: bool, durable: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        handle = open_private(path, flags) if private else os.open(path, flags | os.O_CLOEXEC, 0o666)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def write_all(handle: int, offset: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(handle, data, offset)
        offset, data = offset + count, data[count:]


def sync(path: Path) -> None:
    """Wait until the content of a file, or the list of files in a folder, is on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
