"""Folder of a disk store: write lock, size limit and eviction of files."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from errno import ELOOP
from pathlib import Path

from ..errors import StoreError, StoreInUseError
from ..utils.private_files import make_private, make_private_folder, open_private
from .files import read_document, read_header, read_prompt_mark, write_prompt_mark
from .index import BEFORE, DOCUMENTS, DiskIndex
from .options import StoreOptions

BLOCKS, DAMAGED = ".kv", ".damaged"
"""Suffixes of KV block files and of damaged documents. Damaged documents are renamed and kept."""

_MANY = 100  # if at least this many files have the same size, they are assumed to be full blocks

NAMESPACE = re.compile(r"[0-9a-f]{32}")
"""Folder name of a namespace: its digest."""

SERVER_FOLDER = "server"  # subfolder of a store for the server's conversations and responses
_TEMPORARY, _LOCK = ".tmp", "lock"
_FAN = re.compile(r"[0-9a-f]{2}")
_OLD_CHUNK, _OLD_HISTORY = re.compile(r"[0-9a-f]{32}\.kv"), re.compile(rb'\{"format": 1,')
_BLOCK_FILE = re.compile(r"[0-9a-f]{64}(\.kv|\.\d+\.\d+\.tmp)")
NAME = re.compile(r"[a-z]+-[0-9a-f]{32,64}(?:-[0-9a-f]{1,4})?")
DOCUMENT_FILE = re.compile(rf"{NAME.pattern}(\.doc|\.before|\.damaged|\.\d+\.\d+\.tmp)")
"""Patterns of document names and of document files.

Names never contain text chosen by a user. Files that match no pattern do not belong to the store, so they are neither
counted nor changed.
"""


class StoreFolder:
    """Files of one store in the folder `path`. Thread-safe. To make several calls atomic, hold `mutex`.

    Including temporary files, the files take at most `options.limit` bytes.

    Only one process may write. It holds an advisory lock (`fcntl.flock`), which the kernel releases when the process
    ends. Any number of processes may read.

    Files are readable only by their owner. Symbolic links in place of subfolders are not followed.

    Args:
        clock: Function that returns the time in nanoseconds since 1970.

    Raises:
        StoreError: The folder cannot be used.
        StoreInUseError: Another process writes to the folder.
    """

    def __init__(self, path: Path, options: StoreOptions, *, read_only: bool, clock: Callable[[], int]) -> None:
        self.path, self.read_only = path, read_only
        self.last_error = ""
        self.index = DiskIndex(options.limit, options.policy, options.ttl, clock)
        self.mutex = self.index.mutex
        self._temporaries = 0
        self._lock = -1
        try:
            with self.usable():
                _refuse_old(path)
                if not read_only:
                    make_private_folder(path)
                    self._take_lock()
                    self._correct_modes()
                self._load_index()
            if not read_only:
                self.free_space(0)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def usable(self) -> Iterator[None]:
        """Convert an OSError raised inside the `with` block to a StoreError that names the folder."""
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"cannot use the store {str(self.path)!r}: {error.strerror or error}; choose a writable folder on a "
                "disk with free space"
            ) from error

    # ---------------------------------------------------------------------------------------------------------- space

    def free_space(self, size: int, *, pinned: bool = False, cost: int | None = None) -> bool:
        """Evict files until `size` more bytes fit within the limit.

        If this is not possible, no file is evicted and False is returned. For `pinned` and `cost`, see
        `DiskIndex.victims`.
        """
        with self.mutex:
            victims = self.index.victims(size, pinned=pinned, cost=cost)
            for path in victims or ():
                self.discard(path)
            return victims is not None and not any(path in self.index for path in victims)

    def free_disk_space(self, size: int) -> bool:
        """Remove block files to free `size` bytes on a full disk.

        If all block files together are smaller than `size`, no file is removed and False is returned.
        """
        with self.mutex:
            blocks = self.index.blocks()
            if sum(have for _, have in blocks) < size:
                return False
            for path, have in blocks:
                self.discard(path)
                if (size := size - have) <= 0:
                    break
            return True

    def reserve(self, path: Path, size: int, cost: int, *, for_prompt: bool) -> Path | None:
        """Reserve `size` bytes for the new block file `path`. Return the temporary file to write to.

        Return None if there is no space or if `path` exists. For `cost` and `for_prompt`, see `DiskStore.begin`.
        """
        with self.mutex:
            if for_prompt:
                self.mark_for_prompts([path])
            if path in self.index or not self.free_space(size, cost=cost):
                return None
            return self.reserve_bytes(path, size)

    def reserve_bytes(self, path: Path, size: int) -> Path:
        """Reserve `size` bytes, which `free_space` has made available. Return the temporary file to write to.

        The caller must later pass the temporary file to `finish` or `give_up`.
        """
        with self.mutex:
            self.index.reserved += size
            return self.temporary(path)

    def temporary(self, path: Path) -> Path:
        with self.mutex:
            self._temporaries += 1
            return path.with_name(f"{path.stem}.{os.getpid()}.{self._temporaries}{_TEMPORARY}")

    def finish(self, temporary: Path, path: Path, size: int, cost: int = 0, *, marked: bool = False) -> None:
        """Rename a complete and synced temporary file to `path`, replacing any existing file. Raises OSError.

        `marked` is True if the new file has a prompt mark. If the replaced file had one, the new file gets it too.
        """
        with self.mutex:
            was_marked = self.is_marked(path)
            os.replace(temporary, path)
            self.index.reserved -= size
            self.index.add(path, size, cost)
            self.index.files[path].marked = marked
            if was_marked:
                self.mark_for_prompts([path])

    def mark_for_prompts(self, paths: Iterable[Path]) -> None:
        if self.read_only:
            return
        for path in paths:
            with self.mutex:  # released between two files, so that other threads can use the index
                file = self.index.files.get(path)
                if file is not None and not self.is_marked(path):
                    with contextlib.suppress(OSError):  # Without the mark, a deletion may remove the block.
                        write_prompt_mark(path, True)
                        file.marked = True
                        self.index.write_stamp(path)

    def is_marked(self, path: Path) -> bool:
        with self.mutex:
            file = self.index.files.get(path)
            if file is None:
                return False
            if file.marked is None:
                file.marked = read_prompt_mark(path)
                self.index.write_stamp(path)  # Reading may have changed the access time, which stores the rank.
            return bool(file.marked)

    def files_without_block(self, paths: Iterable[Path]) -> set[Path]:
        """Return those of `paths` that do not contain a block.

        All full blocks in a namespace have the same size, so a file is not read if at least `_MANY` files have its
        size. Once a valid header was found in a file, the file is read again only if its size changes.
        """
        sizes = dict[Path, int]()
        for path in paths:
            with contextlib.suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    sizes[path] = status.st_size
        number = Counter(sizes.values())
        return {path for path, size in sizes.items() if number[size] < _MANY and not self._has_header(path, size)}

    def _has_header(self, path: Path, size: int) -> bool:
        with self.mutex:  # The saver thread might otherwise evict the file.
            file = self.index.files.get(path)
            if file is None or not file.has_header or file.size != size:
                if read_header(path) is None:
                    return False
                if file is not None:
                    file.has_header = True
                    self.index.write_stamp(path)  # Reading may have changed the access time, which stores the rank.
            return True

    def unmark(self, paths: Iterable[Path]) -> None:
        with self.mutex, self.usable():
            for path in paths:
                if self.is_marked(path):
                    write_prompt_mark(path, False)
                    self.index.files[path].marked = False
                    self.index.write_stamp(path)

    def give_up(self, temporary: Path, size: int, error: OSError | None) -> None:
        """Remove a temporary file and free its reserved space. If writing it failed, `error` becomes `last_error`."""
        with self.mutex:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            self.index.reserved -= size
            if error is not None:
                self.last_error = f"cannot write {str(temporary)!r}: {error.strerror or error}"

    def put_aside(self, path: Path) -> None:
        """Rename a damaged document, so that the store ignores it and a user can inspect it."""
        with self.mutex, contextlib.suppress(OSError):
            aside = path.with_suffix(DAMAGED)
            status = path.lstat()
            os.replace(path, aside)
            self.index.remove(path)
            if stat.S_ISREG(status.st_mode):
                self.index.add(aside, status.st_size)

    def discard(self, path: Path) -> None:
        """Remove a damaged or unneeded file, unless the store is read-only."""
        if self.read_only:
            return
        with self.mutex, contextlib.suppress(OSError):  # A file that cannot be removed still counts towards the limit.
            self._check_inside(path)
            path.unlink(missing_ok=True)
            self.index.remove(path)

    def remove(self, paths: Iterable[Path]) -> int:
        """Remove files, and return their total size in bytes.

        If a file cannot be removed, StoreError is raised after all other files have been removed.
        """
        assert not self.read_only
        freed, refused = 0, ""
        for path in paths:
            try:
                with self.mutex:
                    self._check_inside(path)
                    status = path.lstat()
                    if not stat.S_ISDIR(status.st_mode):  # A folder with the name of a file is not part of the store.
                        path.unlink()
                        freed += status.st_size
                    self.index.remove(path)
            except FileNotFoundError:
                self.index.remove(path)
            except OSError as error:
                refused = f"cannot delete {str(path)!r}: {error.strerror or error}"
        if refused:
            raise StoreError(
                f"{refused}; some files could not be deleted and are still in the store: "
                "make the folder writable and try again"
            )
        return freed

    def make_subfolder(self, path: Path) -> None:
        """Create a subfolder that only its owner can read. Raises OSError, also if the path is a symbolic link."""
        make_private_folder(path)
        self._check_inside(path / "any")

    def _check_inside(self, path: Path) -> None:
        # A symbolic link may lead to the files of another program.
        for folder in path.relative_to(self.path).parents:
            if (self.path / folder).is_symlink() and folder != Path():
                raise OSError(ELOOP, "a symbolic link replaces a folder of the store")

    # --------------------------------------------------------------------------------------------------- lock and scan

    def close(self) -> None:
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
            raise StoreInUseError(
                f"the store {str(self.path)!r} is being written by another process ({holder or 'unknown'}): one "
                "process writes at a time; end that process, or use another folder"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()}\n".encode(), 0)

    def _load_index(self) -> None:
        found = []
        for path in self._store_files():
            with contextlib.suppress(OSError):
                if path.suffix == _TEMPORARY and not self.read_only:
                    path.unlink()
                elif path.suffix != _TEMPORARY:
                    status = path.stat()
                    found.append((status.st_mtime_ns, path, status.st_size, status.st_atime_ns))
        for path in self.index.load(found):
            if not self.read_only:
                self.index.write_stamp(path)

    def _correct_modes(self) -> None:
        """Make the files of a store private to their owner, because earlier versions left them readable for others."""
        with contextlib.suppress(PermissionError):  # The folder may belong to another user and still be writable.
            known = (_LOCK, SERVER_FOLDER)
            if all(path.name in known or NAMESPACE.fullmatch(path.name) for path in self.path.iterdir()):
                make_private(self.path)
        for namespace in namespace_folders(self.path):
            make_private(namespace)
            for path in namespace.iterdir():
                if _FAN.fullmatch(path.name) and _is_folder(path):
                    make_private(path)
                    each: Iterable[Path] = path.iterdir()
                else:
                    each = [path]
                for file in each:
                    if file.suffix in (BLOCKS, DAMAGED, DOCUMENTS, BEFORE, _TEMPORARY) and not file.is_dir():
                        make_private(file)

    def _store_files(self) -> Iterator[Path]:
        for namespace in namespace_folders(self.path):
            found = (path for path in namespace.iterdir() if DOCUMENT_FILE.fullmatch(path.name))
            for path in itertools.chain(found, _block_files(namespace)):
                if path.is_file() and not path.is_symlink():
                    yield path

    def check_integrity(self) -> None:
        with self.mutex:
            self.index.check_integrity()
            files, found = self.index.files, set(self._store_files())
            assert found == set(files), found ^ set(files)
            assert all(path.stat().st_size == file.size for path, file in files.items())
            assert all(read_prompt_mark(path) for path, file in files.items() if file.marked), (
                "a prompt mark is not on disk"
            )


def namespace_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if NAMESPACE.fullmatch(path.name) and _is_folder(path))


def _refuse_old(folder: Path) -> None:
    """Raise StoreError for a version 0.1 store from before 2026-11-24, because its file names contain text of users."""
    for namespace in namespace_folders(folder) if folder.is_dir() else ():
        for path in namespace.iterdir():
            if _FAN.fullmatch(path.name) and _is_folder(path):
                old = any(_OLD_CHUNK.fullmatch(file.name) for file in path.iterdir())
            else:
                named = path.suffix in (DOCUMENTS, BEFORE) and not DOCUMENT_FILE.fullmatch(path.name)
                old = named and _OLD_HISTORY.match((read_document(path).data or b"")[:100]) is not None
            if old:
                raise StoreError(
                    f"the store {str(folder)!r} was written by an earlier version, with tokens in clear text "
                    f"({str(path)!r}), and cannot be read: continue it with that version, or delete the folder"
                )


def block_paths(namespace: Path) -> Iterator[Path]:
    """Yield the paths in a namespace folder whose names are those of block files. They may also be folders or links."""
    return (path for path in _block_files(namespace) if path.suffix == BLOCKS)


def _block_files(namespace: Path) -> Iterator[Path]:
    if _is_folder(namespace):
        for fan in namespace.iterdir():
            if _FAN.fullmatch(fan.name) and _is_folder(fan):
                yield from (path for path in fan.iterdir() if _BLOCK_FILE.fullmatch(path.name))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
