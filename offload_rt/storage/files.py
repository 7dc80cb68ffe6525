"""Files of the store that are read or written in one go: headers of chunks, and documents."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import xxhash

from .chunk_file import ChunkHeader, header_bytes


def seal(data: bytes) -> bytes:
    """Returns the content of a document's file: its checksum and itself."""
    return xxhash.xxh3_64(data).digest() + data


def write_document(path: Path, temporary: Path, record: bytes) -> None:
    """Writes a file whole or not at all, durable before it has its name. Raises OSError."""
    try:
        with temporary.open("wb") as file:
            file.write(record)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_header(path: Path) -> ChunkHeader | None:
    """Returns the header of a chunk's file; None unless it is whole and the file has the size it says."""
    try:
        with path.open("rb", buffering=0) as file:
            data = file.read(8192)
            missing = header_bytes(data) - len(data)
            if missing > 0:
                data += file.read(missing)
            header = ChunkHeader.decode(data)
            size = os.fstat(file.fileno()).st_size
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return header if header is not None and header.file_bytes == size else None


def read_document(path: Path) -> bytes | None:
    """Returns the document that `seal` sealed; None where there is none that is whole."""
    try:
        record = path.read_bytes()
    except OSError:
        return None
    return record[8:] if xxhash.xxh3_64(record[8:]).digest() == record[:8] else None


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
