"""Reading and writing of small files in a store (block headers and documents), each in one operation.

A store may be damaged, or contain files from other programs. Therefore, only regular files of limited size are read,
and never links or pipes.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ..utils.atomic_files import write_all
from .block_file import PROMPT_MARK, BlockHeader, header_bytes

LARGEST_DOCUMENT = 1 << 28
"""Maximum size of a document file in bytes. A larger file was not written by the store."""

_DIGEST = 8


@dataclass(frozen=True)
class DocumentContent:
    """Content of a document file. `data` is None if the file is missing, or if it is damaged as `damage` describes."""

    data: bytes | None
    damage: str = ""


def open_regular(path: Path) -> int:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(f"{str(path)!r} is not a regular file")


def seal(data: bytes) -> bytes:
    return xxhash.xxh3_64(data).digest() + data


def read_document(path: Path) -> DocumentContent:
    try:
        handle = open_regular(path)
    except FileNotFoundError:
        return DocumentContent(None)
    except OSError as error:
        return DocumentContent(None, f"cannot be read ({error.strerror or 'it is not a regular file'})")
    try:
        with os.fdopen(handle, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            record = file.read(size) if size <= LARGEST_DOCUMENT else b""
    except OSError as error:
        return DocumentContent(None, f"cannot be read ({error.strerror or error})")
    if len(record) >= _DIGEST and xxhash.xxh3_64(record[_DIGEST:]).digest() == record[:_DIGEST]:
        return DocumentContent(record[_DIGEST:])
    return DocumentContent(None, "is damaged" if size else "is empty")


def read_prompt_mark(path: Path) -> bool | None:
    """Return whether a block file has a prompt mark (see `DiskStore.mark_for_prompts`).

    Return False if the file is damaged, and None if it cannot be opened.
    """
    header = read_header(path)
    try:
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            return header is not None and os.pread(file.fileno(), len(PROMPT_MARK), header.mark_offset) == PROMPT_MARK
    except OSError:
        return None


def write_prompt_mark(path: Path, marked: bool) -> None:
    """Set or clear the prompt mark of a block file that is not damaged. Raises OSError."""
    if (header := read_header(path)) is None:
        return
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        write_all(handle, header.mark_offset, memoryview(PROMPT_MARK if marked else bytes(len(PROMPT_MARK))))
    finally:
        os.close(handle)


def read_header(path: Path) -> BlockHeader | None:
    """Return the header of a block file, or None if the header is damaged or does not match the file size."""
    try:
        with os.fdopen(open_regular(path), "rb", buffering=0) as file:
            data = file.read(8192)
            missing = header_bytes(data) - len(data)
            if missing > 0:
                data += file.read(missing)
            header = BlockHeader.decode(data)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    return header if header is not None and header.file_bytes == size else None
