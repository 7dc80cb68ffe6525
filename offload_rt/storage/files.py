"""Files of the store that are read or written in one go: headers of chunks, and documents.

A store may be damaged in any way, or hold what others put there: only regular files are opened, never a link or a pipe,
and never more bytes are read than a whole file can have.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ..utils.private_files import open_private
from .chunk_file import ChunkHeader, header_bytes

LARGEST_DOCUMENT = 1 << 28
"""Bytes of a document's file; a larger one is none of ours."""

_DIGEST = 8


@dataclass(frozen=True)
class Reading:
    """What a document's file gave: its content, or why there is none. Both empty: there is no such file."""

    data: bytes | None
    damage: str = ""


def open_regular(path: Path) -> int:
    """Returns a handle to read a file. Raises OSError, also where it is not a regular one."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(f"{str(path)!r} is no regular file")


def seal(data: bytes) -> bytes:
    """Returns the content of a document's file: its checksum and itself."""
    return xxhash.xxh3_64(data).digest() + data


def write_document(path: Path, record: bytes) -> None:
    """Writes a new file, durable before anybody gives it another name. Raises OSError, and then it is gone again."""
    try:
        with os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(record)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def read_document(path: Path) -> Reading:
    """Returns the document that `seal` sealed, or what is wrong with it."""
    try:
        handle = open_regular(path)
    except FileNotFoundError:
        return Reading(None)
    except OSError as error:
        return Reading(None, f"cannot be read ({error.strerror or 'it is no regular file'})")
    try:
        with os.fdopen(handle, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            record = file.read(size) if size <= LARGEST_DOCUMENT else b""
    except OSError as error:
        return Reading(None, f"cannot be read ({error.strerror or error})")
    if len(record) >= _DIGEST and xxhash.xxh3_64(record[_DIGEST:]).digest() == record[:_DIGEST]:
        return Reading(record[_DIGEST:])
    return Reading(None, "is damaged" if size else "is empty")


def read_header(path: Path) -> ChunkHeader | None:
    """Returns the header of a chunk's file; None unless it is whole and the file has the size it says."""
    try:
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            data = file.read(8192)
            missing = header_bytes(data) - len(data)
            if missing > 0:
                data += file.read(missing)
            header = ChunkHeader.decode(data)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    return header if header is not None and header.file_bytes == size else None


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
