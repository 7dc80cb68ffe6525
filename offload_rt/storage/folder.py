"""The folder of a disk store: one writer at a time, its files within a limit, and what leaves when there is no room."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from errno import ELOOP
from pathlib import Path

from ..config import StoreOptions
from ..errors import StoreError
from ..utils.private_files import make_private, make_private_folder, open_private
from .index import BEFORE, DOCUMENTS, DiskIndex

CHUNKS, DAMAGED = ".kv", ".damaged"
"""Suffixes of chunks, and of documents that were put aside."""

SPACE = re.compile(r"[0-9a-f]{32}")
"""Name of the folder of a namespace: its digest."""

_TEMPORARY, _LOCK = ".tmp", "lock"
_FAN = re.compile(r"[0-9a-f]{2}")
_CHUNK_FILE = re.compile(r"[0-9a-f]{64}(\.kv|\.\d+\.\d+\.tmp)")
NAME = re.compile(r"[a-z]+-[0-9a-f]{32,64}(?:-[0-9a-f]{1,4})?")
DOCUMENT_FILE = re.compile(rf"{NAME.pattern}(\.doc|\.before|\.damaged|\.\d+\.\d+\.tmp)")
"""Names of documents, and of the store's files. No part of them is text that a user chose, so no such text is parsed.
Whatever else a user keeps in the folder matches none of them, and is neither counted nor touched."""


class StoreFolder:
    """The files of one store in the folder `path`, never more than `options.limit` bytes, temporaries included.

    One process writes, under an advisory lock (`fcntl.flock`, which ends with the process however it ends); any number
    read. The index is a scan of names, sizes and times at start: the order of eviction is that of `options.policy` over
    modification times, which `touch` moves, and over what `expect` said. Eviction spares what is pinned. Any thread may
    call; one lock (`mutex`) guards the index, and callers hold it where two calls belong together.

    Only their owner can read the files. Opening for writing repairs the modes of everything that is the store's, and of
    `path` itself if it was created here or holds nothing else. A link in place of a subfolder is not followed.

    Raises StoreError where the folder cannot be used or another process writes to it.
    """

    def __init__(self, path: Path, options: StoreOptions, *, read_only: bool, clock: Callable[[], int]) -> None:
        """clock: nanoseconds since 1970."""
        self.path, self.read_only = path, read_only
        self.last_error = ""
        self.mutex = threading.RLock()
        self._index = DiskIndex(options.limit, options.policy, options.ttl, clock)
        self._temporaries = 0
        self._lock = -1
        try:
            with self.usable():
                if not read_only:
                    make_private_folder(path)
                    self._take_lock()
                    self._protect()
                self._scan()
            if not read_only:
                self.make_room(0)
        except BaseException:
            self.close()
            raise

    @property
    def bytes_used(self) -> int:
        """Bytes of all files, those being written at their full size."""
        return self._index.bytes_used

    def __contains__(self, path: Path) -> bool:
        return path in self._index

    @contextlib.contextmanager
    def usable(self) -> Iterator[None]:
        """Turns an OSError of what is done within into a StoreError that names the folder."""
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"cannot use the store {str(self.path)!r}: {error.strerror or error}; give a folder on a disk with "
                "room where you may write"
            ) from error

    # ------------------------------------------------------------------------------------------------ order of leaving

    def touch(self, paths: Sequence[Path]) -> None:
        """Takes note that `paths` were used now, the last one first: it leaves before those ahead of it. With policy
        fifo nothing changes."""
        if self.read_only:
            return
        with self.mutex:
            for path in reversed(paths):
                self._index.use(path)

    def expect(self, paths: Sequence[Path]) -> None:
        """Takes note that `paths`, known or not, will be used, soonest first, and nothing else."""
        with self.mutex:
            self._index.window(paths)

    def pin(self, paths: Iterable[Path]) -> None:
        """Keeps `paths`, known or not, from being evicted until as many `unpin`."""
        with self.mutex:
            self._index.pin(paths)

    def unpin(self, paths: Iterable[Path]) -> None:
        """Takes a pin back."""
        with self.mutex:
            self._index.unpin(paths)

    # ----------------------------------------------------------------------------------------------------------- room

    def make_room(self, size: int, *, pinned: bool = False) -> bool:
        """Evicts until `size` more bytes fit within the limit, with `pinned` also what is pinned. Returns False where
        that cannot be, and then nothing is evicted."""
        with self.mutex:
            victims = self._index.victims(size, pinned=pinned)
            for path in victims or ():
                self.discard(path)
            return victims is not None and not any(path in self._index for path in victims)

    def make_disk_room(self, size: int) -> bool:
        """Removes chunks, the next to leave first, until a full disk has `size` bytes more. Returns False, and removes
        nothing, where all of them are not enough."""
        with self.mutex:
            chunks = self._index.chunks()
            if sum(have for _, have in chunks) < size:
                return False
            for path, have in chunks:
                self.discard(path)
                if (size := size - have) <= 0:
                    break
            return True

    def reserve(self, path: Path, size: int) -> Path | None:
        """Takes `size` bytes for the file `path`. Returns the temporary file to write; None where `path` is there
        already, or where there is no room."""
        with self.mutex:
            if path in self._index or not self.make_room(size):
                return None
            return self.hold(path, size)

    def hold(self, path: Path, size: int) -> Path:
        """Takes `size` bytes, for which room was made, for the file `path`, which may replace another one. Returns the
        temporary file to write, for `finish` or `give_up`."""
        with self.mutex:
            self._index.reserved += size
            return self.temporary(path)

    def temporary(self, path: Path) -> Path:
        """Returns the name of a new temporary file beside `path`."""
        with self.mutex:
            self._temporaries += 1
            return path.with_name(f"{path.stem}.{os.getpid()}.{self._temporaries}{_TEMPORARY}")

    def finish(self, temporary: Path, path: Path, size: int) -> None:
        """Gives a reserved file, which is whole and durable, its name. Raises OSError."""
        with self.mutex:
            os.replace(temporary, path)
            self._index.reserved -= size
            self._index.enter(path, size)

    def give_up(self, temporary: Path, size: int, error: OSError | None) -> None:
        """Removes what was written of a reserved file; `error` says what the disk refused, if it did."""
        with self.mutex:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._index.reserved -= size
            if error is not None:
                self.last_error = f"cannot write {str(temporary)!r}: {error.strerror or error}"

    def enter(self, path: Path, size: int) -> None:
        """Takes note of a file that was written, or replaced."""
        with self.mutex:
            self._index.enter(path, size)

    def put_aside(self, path: Path) -> None:
        """Renames a damaged document, so that nobody finds it and a person still can."""
        with self.mutex, contextlib.suppress(OSError):
            aside = path.with_suffix(DAMAGED)
            status = path.lstat()
            os.replace(path, aside)
            self._index.forget(path)
            if stat.S_ISREG(status.st_mode):
                self._index.enter(aside, status.st_size)

    def discard(self, path: Path) -> None:
        """Removes a file that is damaged or not wanted any more; readers leave that to the writer."""
        if self.read_only:
            return
        with self.mutex, contextlib.suppress(OSError):  # what cannot be removed still counts
            self._check_inside(path)
            path.unlink(missing_ok=True)
            self._index.forget(path)

    def remove(self, paths: Iterable[Path]) -> int:
        """Remove files that must not stay. Return their bytes. Raise StoreError after the last one if any is left."""
        assert not self.read_only
        freed, refused = 0, ""
        for path in paths:
            try:
                with self.mutex:
                    self._check_inside(path)
                    status = path.lstat()
                    if not stat.S_ISDIR(status.st_mode):  # a folder in place of a file holds nothing of ours
                        path.unlink()
                        freed += status.st_size
                    self._index.forget(path)
            except FileNotFoundError:
                self._index.forget(path)
            except OSError as error:
                refused = f"cannot delete {str(path)!r}: {error.strerror or error}"
        if refused:
            raise StoreError(
                f"{refused}; what was to be deleted is still in the store: make it writable, and try again"
            )
        return freed

    def make_subfolder(self, path: Path) -> None:
        """Create a folder below this one that only its owner can read. Raise OSError, also for a link in its place."""
        make_private_folder(path)
        self._check_inside(path / "any")

    def _check_inside(self, path: Path) -> None:
        """Raise OSError if a folder between the store's and `path` is a link: the file may be anybody's."""
        for folder in path.relative_to(self.path).parents:
            if (self.path / folder).is_symlink() and folder != Path():
                raise OSError(ELOOP, "a link is in the place of a folder of the store")

    # --------------------------------------------------------------------------------------------------- lock and scan

    def close(self) -> None:
        """Lets the next writer in. A second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> None:
        self._lock = open_private(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            self.close()
            raise StoreError(
                f"the store {str(self.path)!r} is being written by another process ({holder or 'unknown'}): one "
                "process writes at a time; end that one, or use another folder"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()}\n".encode(), 0)

    def _scan(self) -> None:
        """Enters what is there. Temporaries of a writer that died are removed."""
        found = []
        for path in self._ours():
            with contextlib.suppress(OSError):
                if path.suffix == _TEMPORARY and not self.read_only:
                    path.unlink()
                elif path.suffix != _TEMPORARY:
                    status = path.stat()
                    found.append((status.st_mtime_ns, path, status.st_size))
        for path in self._index.load(found):
            if not self.read_only:
                self._index.write_stamp(path)

    def _protect(self) -> None:
        """Take everybody else's access to the store's folders and files away, also to those of earlier versions."""
        with contextlib.suppress(PermissionError):  # another user's folder, in which this one may write
            if all(path.name == _LOCK or SPACE.fullmatch(path.name) for path in self.path.iterdir()):
                make_private(self.path)
        for space in spaces(self.path):
            make_private(space)
            for path in space.iterdir():
                if _FAN.fullmatch(path.name) and _is_folder(path):
                    make_private(path)
                    each: Iterable[Path] = path.iterdir()
                else:
                    each = [path]
                for file in each:
                    if file.suffix in (CHUNKS, DAMAGED, DOCUMENTS, BEFORE, _TEMPORARY) and not file.is_dir():
                        make_private(file)

    def _ours(self) -> Iterator[Path]:
        """Return all regular files that have names of the store's."""
        for space in spaces(self.path):
            found = (path for path in space.iterdir() if DOCUMENT_FILE.fullmatch(path.name))
            for path in itertools.chain(found, _chunk_files(space)):
                if path.is_file() and not path.is_symlink():
                    yield path

    def check_integrity(self) -> None:
        """Asserts that index, files and limit agree (nobody may be writing)."""
        with self.mutex:
            self._index.check_integrity()
            files, there = self._index.files, set(self._ours())
            assert there == set(files), there ^ set(files)
            assert all(path.stat().st_size == file.size for path, file in files.items())


def spaces(folder: Path) -> list[Path]:
    """Return the folders of all namespaces in the store at `folder`."""
    return sorted(path for path in folder.iterdir() if SPACE.fullmatch(path.name) and _is_folder(path))


def chunk_paths(space: Path) -> Iterator[Path]:
    """Return everything in the folder of a namespace that has a chunk's name, of whatever kind it is."""
    return (path for path in _chunk_files(space) if path.suffix == CHUNKS)


def _chunk_files(space: Path) -> Iterator[Path]:
    if _is_folder(space):
        for fan in space.iterdir():
            if _FAN.fullmatch(fan.name) and _is_folder(fan):
                yield from (path for path in fan.iterdir() if _CHUNK_FILE.fullmatch(path.name))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
