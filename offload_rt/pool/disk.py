"""The disk tier: one file per chunk, found by key, compared by content, written whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from ..config import check_choice, format_size
from ..errors import StoreError
from .format import ChunkHeader, ChunkName, checksum, data_offset, header_bytes
from .prefix_tree import chunk_key, root_key

EvictionOrder = Literal["lru", "fifo"]

_CHUNKS, _DOCUMENTS, _TEMPORARY, _LOCK = ".kv", ".doc", ".tmp", "lock"
_OURS = re.compile(
    r"[0-9a-f]{32}/([0-9a-f]{2}/[0-9a-f]{32}(\.kv|\.\d+\.\d+\.tmp)|[^/]+(\.doc|\.damaged|\.\d+\.\d+\.tmp))"
)
"""Paths below the folder that are the store's: whatever else a user keeps there is neither counted nor touched."""


@dataclass
class _File:
    """A file that counts: its size, and when it was last used (fifo: written), in nanoseconds."""

    size: int
    used: int


@dataclass(frozen=True)
class StoredChunk:
    """A chunk that was found: reading a layer of it may still fail."""

    key: bytes
    path: Path
    header: ChunkHeader


class DiskStore:
    """Chunks and small documents in `folder`, never more than `limit_bytes` of files, temporaries included.

    Files of one namespace (model, number format, layout) lie in a folder of its digest. A chunk's name is its key; what
    counts is the header (`format.ChunkName`), compared field by field. Damage of any kind, and a file that vanishes
    between two calls, is a miss; a damaged file is removed by the writer.

    One process writes, under an advisory lock (`fcntl.flock`, which ends with the process however it ends); any number
    read, without an index: a file is there or not, and is never changed after its name appeared. Files are open only
    during a call, so the limit on open files does not matter.

    The index is a scan of names, sizes and times at start: the order of eviction is the order of modification times,
    which `touch` moves. A clock that goes backwards cannot disturb it: stamps only ever grow, and what seems to come
    from the future counts as used now. `ttl` is seconds since the last use.

    Any thread may call; one lock guards the index. Eviction spares what is pinned.
    Raises StoreError where the folder cannot be used or another process writes to it.
    """

    def __init__(
        self,
        folder: Path,
        namespace: str,
        layers: int,
        limit_bytes: int | None = None,
        *,
        order: EvictionOrder = "lru",
        ttl: float | None = None,
        read_only: bool = False,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        check_choice("order", order, ("lru", "fifo"))
        self.folder, self.namespace, self.layers = folder, namespace, layers
        self.limit_bytes = limit_bytes
        self.read_only = read_only
        self.failures = 0
        self.last_error = ""
        self._order, self._ttl, self._clock = order, ttl, clock
        self._root = root_key(namespace)
        self._own = folder / self._root.hex()
        self._files: OrderedDict[Path, _File] = OrderedDict()
        self._pins: Counter[Path] = Counter()
        self._stored = self._reserved = 0
        self._sequence = 0
        self._stamp = 0
        self._mutex = threading.RLock()
        self._lock = -1
        with self._usable():
            if not read_only:
                folder.mkdir(parents=True, exist_ok=True)
                self._take_lock()
            self._scan()
        if not read_only:
            self._make_room(0)

    @property
    def root(self) -> bytes:
        """The parent key of first chunks."""
        return self._root

    @property
    def bytes_used(self) -> int:
        """Bytes of all files, those being written at their full size."""
        return self._stored + self._reserved

    def __len__(self) -> int:
        """Chunks stored, of all namespaces."""
        return sum(path.suffix == _CHUNKS for path in self._files)

    def __contains__(self, key: bytes) -> bool:
        return self._path(key) in self._files

    def key(self, parent: bytes, lineage: str, tokens: bytes) -> bytes:
        """The key of a chunk: `prefix_tree.chunk_key`, the same in every process."""
        return chunk_key(parent, lineage, tokens)

    # ------------------------------------------------------------------------------------------------------- reading

    def find(self, parent: bytes, lineage: str, tokens: bytes) -> StoredChunk | None:
        """The chunk with exactly these tokens (little-endian int64) behind `parent`; None is a miss."""
        name = ChunkName(self.namespace, parent, lineage, tokens)
        key = chunk_key(parent, lineage, tokens)
        path = self._path(key)
        if not self.read_only and path not in self._files:
            return None
        header = _read_header(path)
        if header is None:
            self._discard(path)
        elif header.name == name and len(header.checksums) == self.layers:
            return StoredChunk(key, path, header)
        return None

    def read_layer(self, chunk: StoredChunk, layer: int, into: memoryview) -> bool:
        """Fills `into` (exactly one layer's bytes) and says whether they are what was written; False is a miss."""
        header = chunk.header
        if len(into) != header.layer_bytes:
            return False
        try:
            handle = os.open(chunk.path, os.O_RDONLY)
        except OSError:
            return False
        try:
            whole = os.preadv(handle, [into], header.data_offset + layer * header.layer_bytes) == header.layer_bytes
        except OSError:
            whole = False
        finally:
            os.close(handle)
        if whole and checksum(into) == header.checksums[layer]:
            return True
        self._discard(chunk.path)
        return False

    def verify(self, parent: bytes, lineage: str, tokens: bytes) -> bool:
        """Reads a chunk through; a damaged one is gone afterwards."""
        chunk = self.find(parent, lineage, tokens)
        if chunk is None:
            return False
        block = memoryview(bytearray(chunk.header.layer_bytes))
        return all(self.read_layer(chunk, layer, block) for layer in range(self.layers))

    def touch(self, keys: Iterable[bytes]) -> None:
        """`keys`, a path from the first chunk on, was used now: its end leaves before its beginning."""
        if self.read_only or self._order == "fifo":
            return
        with self._mutex:
            for path in reversed([self._path(key) for key in keys]):
                if path in self._files:
                    self._use(path)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Eviction spares `keys`, stored or not, until as many `unpin`."""
        with self._mutex:
            self._pins.update(self._path(key) for key in keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Takes a pin back."""
        with self._mutex:
            self._pins.subtract(Counter(self._path(key) for key in keys))
            self._pins += Counter()

    # ------------------------------------------------------------------------------------------------------- writing

    def begin(self, parent: bytes, lineage: str, tokens: bytes, layer_bytes: int) -> ChunkWriter | None:
        """Takes room for a chunk and starts its file; None where it is stored already, or where it cannot be: there is
        no room within the limit, or the disk refuses (`failures`, `last_error`)."""
        assert not self.read_only
        name = ChunkName(self.namespace, parent, lineage, tokens)
        key = chunk_key(parent, lineage, tokens)
        path = self._path(key)
        size = data_offset(name, self.layers) + self.layers * layer_bytes
        with self._mutex:
            if path in self._files or not self._make_room(size):
                return None
            self._reserved += size
            self._sequence += 1
            temporary = path.with_name(f"{key.hex()}.{os.getpid()}.{self._sequence}{_TEMPORARY}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return ChunkWriter(self, name, layer_bytes, temporary, path, size)
        except OSError as error:
            self._give_up(temporary, size, error)
            return None

    def remove(self, keys: Iterable[bytes], space: str | None = None) -> None:
        """Removes chunks, of this namespace or the one with digest `space`; unknown ones are ignored."""
        for key in keys:
            self._discard(self._path(key, space))

    def put(self, name: str, data: bytes) -> None:
        """Writes a small document, whole or not at all. Raises StoreError."""
        assert not self.read_only
        path = self._own / f"{name}{_DOCUMENTS}"
        record = xxhash.xxh3_64(data).digest() + data
        with self._mutex, self._usable():
            if not self._make_room(len(record)):
                raise StoreError(
                    f"the store {str(self.folder)!r} is full: {format_size(len(record))} do not fit within "
                    f"{format_size(self.limit_bytes or 0)}; raise the limit or delete sessions"
                )
            self._own.mkdir(exist_ok=True)
            self._sequence += 1
            temporary = path.with_name(f"{name}.{os.getpid()}.{self._sequence}{_TEMPORARY}")
            try:
                with temporary.open("wb") as file:
                    file.write(record)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            self._enter(path, len(record))
            _sync_folder(self._own)

    def get(self, name: str) -> bytes | None:
        """A document; None where there is none. A damaged one is put aside (`.damaged`) and counts as none."""
        path = self._own / f"{name}{_DOCUMENTS}"
        data = _read_document(path)
        if data is None and path.exists() and not self.read_only:
            with self._mutex, contextlib.suppress(OSError):
                aside = path.with_suffix(".damaged")
                size = path.stat().st_size
                os.replace(path, aside)
                self._forget(path)
                self._enter(aside, size)
        return data

    def documents(self) -> dict[str, bytes]:
        """All documents of every namespace that are whole: "namespace digest/name" -> content."""
        found = {}
        for path in sorted(self.folder.glob(f"*/*{_DOCUMENTS}")):
            data = _read_document(path)
            if data is not None:
                found[f"{path.parent.name}/{path.stem}"] = data
        return found

    def delete(self, name: str) -> bool:
        """Deletes a document of this namespace, or "namespace digest/name"; False where there is none."""
        path = (self.folder if "/" in name else self._own) / f"{name}{_DOCUMENTS}"
        known = path.exists()
        self._discard(path)
        return known

    def close(self) -> None:
        """Lets the next writer in. Nothing may be called after it but itself."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def check_integrity(self) -> None:
        """Asserts that index, files and limit agree (nobody may be writing)."""
        with self._mutex:
            assert self._reserved >= 0
            assert self.limit_bytes is None or self.bytes_used <= self.limit_bytes
            stamps = [file.used for file in self._files.values() if file.used]
            assert stamps == sorted(stamps), "not in order of use"
            assert self._stored == sum(file.size for file in self._files.values())
            there = set(self._ours())
            assert there == set(self._files), there ^ set(self._files)
            assert all(path.stat().st_size == file.size for path, file in self._files.items())

    # -------------------------------------------------------------------------------------------------- inner workings

    def _path(self, key: bytes, space: str | None = None) -> Path:
        name, folder = key.hex(), self._own if space is None else self.folder / space
        return folder / name[:2] / f"{name}{_CHUNKS}"

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(
                f"cannot use the store {str(self.folder)!r}: {error.strerror or error}; give a folder on a disk with "
                "room where you may write"
            ) from error

    def _take_lock(self) -> None:
        self._lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            self.close()
            raise StoreError(
                f"the store {str(self.folder)!r} is being written by another process ({holder or 'unknown'}): one "
                "process writes at a time; end that one, or use another folder"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()}\n".encode(), 0)

    def _scan(self) -> None:
        """Enters what is there, oldest first. Temporaries of a writer that died are removed."""
        now = self._clock()
        found = []
        for path in self._ours():
            with contextlib.suppress(OSError):
                if path.suffix == _TEMPORARY and not self.read_only:
                    path.unlink()
                elif path.suffix != _TEMPORARY:
                    status = path.stat()
                    found.append((status.st_mtime_ns, str(path), path, status.st_size))
        for used, _, path, size in sorted(found):
            self._files[path] = _File(size, min(used, now))
            self._stored += size
            self._stamp = min(used, now)

    def _ours(self) -> Iterator[Path]:
        for pattern in ("*/*.*", "*/*/*.*"):
            for path in self.folder.glob(pattern):
                if _OURS.fullmatch(path.relative_to(self.folder).as_posix()) and path.is_file():
                    yield path

    def _make_room(self, size: int) -> bool:
        """Evicts what is too old, then the oldest until `size` more bytes fit; False where that cannot be."""
        with self._mutex:
            horizon = self._clock() - int(self._ttl * 1e9) if self._ttl is not None else -1
            used, spared = self.bytes_used, 0
            victims = []
            for path, file in self._files.items():
                excess = self.limit_bytes is not None and used + size > self.limit_bytes
                if not excess and file.used >= horizon:
                    break
                if path.suffix == _DOCUMENTS or self._pins[path]:
                    spared += file.size
                    continue
                victims.append(path)
                used -= file.size
            if self.limit_bytes is not None and used + size > self.limit_bytes:
                return False
            for path in victims:
                self._discard(path)
            return True

    def _use(self, path: Path) -> None:
        self._stamp = max(self._clock(), self._stamp + 1)
        self._files[path].used = self._stamp
        self._files.move_to_end(path)
        with contextlib.suppress(OSError):
            os.utime(path, ns=(self._stamp, self._stamp))

    def _enter(self, path: Path, size: int) -> None:
        self._forget(path)
        self._files[path] = _File(size, 0)
        self._stored += size
        self._use(path)

    def _forget(self, path: Path) -> None:
        if (file := self._files.pop(path, None)) is not None:
            self._stored -= file.size

    def _discard(self, path: Path) -> None:
        """Removes a file that is damaged or not wanted any more; readers leave that to the writer."""
        if self.read_only:
            return
        with self._mutex:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self._forget(path)

    def _finish(self, temporary: Path, path: Path, size: int) -> None:
        with self._mutex:
            os.replace(temporary, path)
            self._reserved -= size
            self._enter(path, size)

    def _give_up(self, temporary: Path, size: int, error: OSError | None) -> None:
        with self._mutex:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._reserved -= size
            if error is not None:
                self.failures += 1
                self.last_error = f"cannot write {str(temporary)!r}: {error.strerror or error}"


class ChunkWriter:
    """One chunk on its way to disk: every layer once, in any order and from any one thread, then `commit`. Until then
    nobody can find it. What the disk refuses ends the writing; `commit` then says False."""

    def __init__(
        self, store: DiskStore, name: ChunkName, layer_bytes: int, temporary: Path, path: Path, size: int
    ) -> None:
        self._store, self._name, self._layer_bytes = store, name, layer_bytes
        self._temporary, self._path, self._size = temporary, path, size
        self._offset = data_offset(name, store.layers)
        self._checksums: dict[int, int] = {}
        self._open = True
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))

    def write(self, layer: int, block: memoryview) -> None:
        """One layer's bytes."""
        assert layer not in self._checksums and len(block) == self._layer_bytes
        self._checksums[layer] = checksum(block)
        if self._open:
            self._attempt(block, self._offset + layer * self._layer_bytes, sync=False)

    def commit(self) -> bool:
        """Makes the chunk durable and visible, in this order."""
        assert len(self._checksums) == self._store.layers
        header = ChunkHeader(
            self._name, self._layer_bytes, tuple(self._checksums[layer] for layer in range(self._store.layers))
        )
        if self._open:
            self._attempt(header.encode(), 0, sync=True)
        if self._open:
            try:
                self._store._finish(self._temporary, self._path, self._size)
            except OSError as error:
                self._end(error)
        done, self._open = self._open, False
        return done

    def abort(self) -> None:
        """Ends the writing and removes what was written; nothing happens after `commit`."""
        if self._open:
            self._end(None)

    def _attempt(self, data: bytes | memoryview, offset: int, *, sync: bool) -> None:
        try:
            handle = os.open(self._temporary, os.O_WRONLY | os.O_CLOEXEC)
            try:
                view = memoryview(data)
                while view:
                    written = os.pwrite(handle, view, offset)
                    view, offset = view[written:], offset + written
                if sync:
                    os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError | None) -> None:
        self._open = False
        self._store._give_up(self._temporary, self._size, error)


def _read_header(path: Path) -> ChunkHeader | None:
    """The header of a file, if it is whole and the file has the size it says."""
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


def _read_document(path: Path) -> bytes | None:
    try:
        record = path.read_bytes()
    except OSError:
        return None
    return record[8:] if xxhash.xxh3_64(record[8:]).digest() == record[:8] else None


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
