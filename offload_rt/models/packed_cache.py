"""Cache of packed checkpoints on disk. Each checkpoint has one folder, which is either complete or missing."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ..utils.atomic_files import sync
from ..utils.native_code import cache_folder
from ..utils.private_files import make_private_folder, open_private
from ..utils.progress import report
from ..utils.units import parse_size

LIMIT_VARIABLE, DEFAULT_LIMIT = "OFFLOAD_RT_PACKED_LIMIT", "64GiB"
"""Environment variable for the maximum size of the cache, and the default size."""

DIGEST, ORIGIN = "model.digest", "origin"
"""Names of two files in each folder.

The first contains the digest of all other files, and is written last. The second contains the name of the original
checkpoint.
"""

_NEW = "new-"  # name prefix of incomplete folders
_LOCK = "lock"
_BYTES_AT_ONCE = 1 << 24
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedEntry:
    folder: Path
    origin: str  # name of the original checkpoint
    size: int  # in bytes
    used: float  # time of the last use, in seconds since the epoch


def packed_cache_folder() -> Path:
    return cache_folder() / "packed"


def cache_limit() -> int:
    return parse_size(os.environ.get(LIMIT_VARIABLE) or DEFAULT_LIMIT, LIMIT_VARIABLE)


def is_complete(folder: Path) -> bool:
    """Return whether `folder` contains a complete packed checkpoint. Its digest is not verified."""
    return (folder / DIGEST).exists()


def cached_folder(folder: Path, origin: str, write: Callable[[Path], None]) -> Path:
    """Return `folder`, which contains a packed checkpoint. If it is not cached yet, call `write` to create it.

    `origin` is the name of the original checkpoint. If several processes need the checkpoint, one writes it and the
    others wait. Raise OSError if the folder cannot be written.
    """
    if is_complete(folder):
        os.utime(folder)  # the modification time is the time of the last use
        return folder
    with _locked(folder.parent):
        if not is_complete(folder):
            for leftover in folder.parent.glob(f"{_NEW}*"):  # left by processes that were killed
                shutil.rmtree(leftover, ignore_errors=True)
            _write(folder, origin, write)
        _limit(folder.parent, cache_limit(), folder)
    return folder


def _write(folder: Path, origin: str, write: Callable[[Path], None]) -> None:
    new = folder.with_name(f"{_NEW}{folder.name}")
    make_private_folder(new)
    try:
        write(new)
        (new / ORIGIN).write_text(origin)
        (new / DIGEST).write_text(_digest(new))
        for file in (*new.iterdir(), new):
            sync(file)
        if folder.exists():  # the rest of an interrupted deletion
            shutil.rmtree(folder)
        os.replace(new, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def is_intact(folder: Path) -> bool:
    """Return whether the files of a cached checkpoint match the digest that was stored with them."""
    try:
        return (folder / DIGEST).read_text() == _digest(folder)
    except OSError:
        return False


def _digest(folder: Path) -> str:
    digest, buffer = xxhash.xxh3_128(), bytearray(_BYTES_AT_ONCE)
    for path in sorted(folder.iterdir()):
        if path.name != DIGEST:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    make_private_folder(home)
    handle = open_private(home / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that packs weights")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def packed_entries(home: Path) -> list[PackedEntry]:
    entries = []
    for folder in home.iterdir() if home.is_dir() else ():
        # the entry has been deleted in the meantime, or it is a file
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if not folder.name.startswith(_NEW):
                size = sum(file.stat().st_size for file in folder.iterdir())
                origin = (folder / ORIGIN).read_text() if (folder / ORIGIN).exists() else folder.name
                entries.append(PackedEntry(folder, origin, size, folder.stat().st_mtime))
    return sorted(entries, key=lambda entry: entry.used)


def shrink_packed(home: Path, limit: int) -> list[PackedEntry]:
    """Delete the least recently used checkpoints until at most `limit` bytes remain, and return them.

    If the limit is 0, the files that mark checkpoints as not convertible are deleted as well.
    """
    if not home.is_dir():
        return []
    with _locked(home):
        for leftover in (*home.glob(f"{_NEW}*"), *(home.glob("*.refused") if limit == 0 else ())):
            leftover.unlink() if leftover.is_file() else shutil.rmtree(leftover, ignore_errors=True)
        return _limit(home, limit, None)


def delete_packed(home: Path, chosen: Callable[[PackedEntry], bool]) -> list[PackedEntry]:
    if not home.is_dir():
        return []
    with _locked(home):
        deleted = [entry for entry in packed_entries(home) if chosen(entry)]
        for entry in deleted:
            _delete(entry)
    return deleted


def _limit(home: Path, limit: int, keep: Path | None) -> list[PackedEntry]:
    entries, deleted = packed_entries(home), []
    total = sum(entry.size for entry in entries)
    for entry in entries:
        if total > limit and entry.folder != keep:
            _delete(entry)
            total -= entry.size
            deleted.append(entry)
    return deleted


def _delete(entry: PackedEntry) -> None:
    # Running processes that have mapped the weights can continue to use them.
    (entry.folder / DIGEST).unlink(missing_ok=True)
    shutil.rmtree(entry.folder, ignore_errors=True)
    _log.info("deleted the packed weights of %s", entry.origin)
