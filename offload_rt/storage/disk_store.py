"""The disk tier: one file per chunk, found by key, compared by content, written whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from pathlib import Path

from ..config import StoreOptions, format_size
from ..errors import StoreError
from ..pool.prefix_tree import chunk_key, root_key
from .chunk_file import ChunkHeader, ChunkName, checksum, data_offset
from .files import read_document, read_header, seal, sync_folder, write_document
from .index import DOCUMENTS, DiskIndex
from .writer import ChunkWriter

_CHUNKS, _TEMPORARY, _LOCK = ".kv", ".tmp", "lock"
_OURS = re.compile(
    r"[0-9a-f]{32}/([0-9a-f]{2}/[0-9a-f]{32}(\.kv|\.\d+\.\d+\.tmp)|[^/]+(\.doc|\.damaged|\.\d+\.\d+\.tmp))"
)
"""Paths below the folder that are the store's: whatever else a user keeps there is neither counted nor touched."""


@dataclass(frozen=True)
class StoredChunk:
    """A chunk that was found: reading a layer of it may still fail."""

    key: bytes
    path: Path
    header: ChunkHeader


class DiskStore:
    """Chunks and small documents in `folder`, never more than `options.limit` bytes of files, temporaries included.

    Files of one namespace (model, number format, layout) lie in a folder of its digest. A chunk's name is its key; what
    counts is the header (`format.ChunkName`), compared field by field. Damage of any kind, and a file that vanishes
    between two calls, is a miss; a damaged file is removed by the writer.

    One process writes, under an advisory lock (`fcntl.flock`, which ends with the process however it ends); any number
    read, without an index: a file is there or not, and is never changed after its name appeared. Files are open only
    during a call, so the limit on open files does not matter.

    The index (`disk_index.py`) is a scan of names, sizes and times at start: the order of eviction is that of
    `options.policy` over modification times, which `touch` moves, and over what `expect` said. Eviction spares what is
    pinned. Any thread may call; one lock guards the index.
    Raises StoreError where the folder cannot be used or another process writes to it.
    """

    def __init__(
        self,
        folder: Path,
        namespace: str,
        layers: int,
        options: StoreOptions | None = None,
        *,
        read_only: bool = False,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.options = options or StoreOptions()
        self.folder, self.namespace, self.layers = folder, namespace, layers
        self.read_only = read_only
        self.failures = 0
        self.last_error = ""
        self.evictions = 0
        self._root = root_key(namespace)
        self._own = folder / self._root.hex()
        self._index = DiskIndex(self.options.limit, self.options.policy, self.options.ttl, clock)
        self._sequence = 0
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
        return self._index.bytes_used

    def __len__(self) -> int:
        """Chunks stored, of all namespaces."""
        return sum(path.suffix == _CHUNKS for path in self._index.files)

    def __contains__(self, key: bytes) -> bool:
        return self._path(key) in self._index

    def key(self, parent: bytes, lineage: str, tokens: bytes) -> bytes:
        """The key of a chunk: `prefix_tree.chunk_key`, the same in every process."""
        return chunk_key(parent, lineage, tokens)

    # ------------------------------------------------------------------------------------------------------- reading

    def find(self, parent: bytes, lineage: str, tokens: bytes) -> StoredChunk | None:
        """The chunk with exactly these tokens (little-endian int64) behind `parent`; None is a miss."""
        name = ChunkName(self.namespace, parent, lineage, tokens)
        key = chunk_key(parent, lineage, tokens)
        path = self._path(key)
        if not self.read_only and path not in self._index:
            return None
        header = read_header(path)
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
        """`keys`, a path from the first chunk on, was used now: its end leaves before its beginning. With policy fifo
        nothing changes."""
        if self.read_only:
            return
        with self._mutex:
            for path in reversed([self._path(key) for key in keys]):
                self._index.use(path)

    def expect(self, keys: Sequence[bytes]) -> None:
        """Waiting turns will use `keys`, stored or not, soonest first, and nothing else: with policy lookahead these
        leave last, from the end on."""
        with self._mutex:
            self._index.window([self._path(key) for key in keys])

    def pin(self, keys: Iterable[bytes]) -> None:
        """Eviction spares `keys`, stored or not, until as many `unpin`."""
        with self._mutex:
            self._index.pin(self._path(key) for key in keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Takes a pin back."""
        with self._mutex:
            self._index.unpin(self._path(key) for key in keys)

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
            if path in self._index or not self._make_room(size):
                return None
            self._index.reserved += size
            self._sequence += 1
            temporary = path.with_name(f"{key.hex()}.{os.getpid()}.{self._sequence}{_TEMPORARY}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return ChunkWriter(self, name, self.layers, layer_bytes, temporary, path, size)
        except OSError as error:
            self.give_up(temporary, size, error)
            return None

    def finish(self, temporary: Path, path: Path, size: int) -> None:
        """See `chunk_writer.Room`."""
        with self._mutex:
            os.replace(temporary, path)
            self._index.reserved -= size
            self._index.enter(path, size)

    def give_up(self, temporary: Path, size: int, error: OSError | None) -> None:
        """See `chunk_writer.Room`."""
        with self._mutex:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._index.reserved -= size
            if error is not None:
                self.failures += 1
                self.last_error = f"cannot write {str(temporary)!r}: {error.strerror or error}"

    def remove(self, keys: Iterable[bytes], space: str | None = None) -> None:
        """Removes chunks, of this namespace or the one with digest `space`; unknown ones are ignored."""
        for key in keys:
            self._discard(self._path(key, space))

    def put(self, name: str, data: bytes) -> None:
        """Writes a small document, whole or not at all; chunks make room for it, within the limit and on a full disk,
        in the end also pinned ones (reading one that is gone is a miss). Raises StoreError."""
        assert not self.read_only
        path = self._own / f"{name}{DOCUMENTS}"
        record = seal(data)
        with self._mutex, self._usable():
            if not (self._make_room(len(record)) or self._make_room(len(record), pinned=True)):
                raise StoreError(
                    f"the store {str(self.folder)!r} is full: {format_size(len(record))} do not fit within "
                    f"{format_size(self.options.limit or 0)}; raise the limit or delete sessions"
                )
            self._own.mkdir(exist_ok=True)
            try:
                self._write(path, record)
            except OSError as error:
                if error.errno not in (ENOSPC, EDQUOT) or not self._free(len(record)):
                    raise
                self._write(path, record)
            self._index.enter(path, len(record))
            sync_folder(self._own)

    def _write(self, path: Path, record: bytes) -> None:
        self._sequence += 1
        write_document(path, path.with_name(f"{path.stem}.{os.getpid()}.{self._sequence}{_TEMPORARY}"), record)

    def _free(self, size: int) -> bool:
        """Removes chunks, the next to leave first, until the disk has `size` bytes more; False, and nothing is removed,
        where all of them are not enough."""
        chunks = self._index.chunks()
        if sum(have for _, have in chunks) < size:
            return False
        for path, have in chunks:
            self._discard(path)
            self.evictions += 1
            if (size := size - have) <= 0:
                break
        return True

    def get(self, name: str) -> bytes | None:
        """A document; None where there is none. A damaged one is put aside (`.damaged`) and counts as none."""
        path = self._own / f"{name}{DOCUMENTS}"
        data = read_document(path)
        if data is None and path.exists() and not self.read_only:
            with self._mutex, contextlib.suppress(OSError):
                aside = path.with_suffix(".damaged")
                size = path.stat().st_size
                os.replace(path, aside)
                self._index.forget(path)
                self._index.enter(aside, size)
        return data

    def documents(self) -> dict[str, bytes]:
        """All documents of every namespace that are whole: "namespace digest/name" -> content."""
        found = {}
        for path in sorted(self.folder.glob(f"*/*{DOCUMENTS}")):
            data = read_document(path)
            if data is not None:
                found[f"{path.parent.name}/{path.stem}"] = data
        return found

    def delete(self, name: str) -> bool:
        """Deletes a document of this namespace, or "namespace digest/name"; False where there is none."""
        path = (self.folder if "/" in name else self._own) / f"{name}{DOCUMENTS}"
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
            self._index.check_integrity()
            files, there = self._index.files, set(self._ours())
            assert there == set(files), there ^ set(files)
            assert all(path.stat().st_size == file.size for path, file in files.items())

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
        """Enters what is there. Temporaries of a writer that died are removed."""
        found = []
        for path in self._ours():
            with contextlib.suppress(OSError):
                if path.suffix == _TEMPORARY and not self.read_only:
                    path.unlink()
                elif path.suffix != _TEMPORARY:
                    status = path.stat()
                    found.append((status.st_mtime_ns, path, status.st_size))
        self._index.load(found)

    def _ours(self) -> Iterator[Path]:
        for pattern in ("*/*.*", "*/*/*.*"):
            for path in self.folder.glob(pattern):
                if _OURS.fullmatch(path.relative_to(self.folder).as_posix()) and path.is_file():
                    yield path

    def _make_room(self, size: int, *, pinned: bool = False) -> bool:
        """Evicts until `size` more bytes fit; False where that cannot be, and then nothing is evicted."""
        with self._mutex:
            victims = self._index.victims(size, pinned=pinned)
            for path in victims or ():
                self._discard(path)
                self.evictions += 1
            return victims is not None

    def _discard(self, path: Path) -> None:
        """Removes a file that is damaged or not wanted any more; readers leave that to the writer."""
        if self.read_only:
            return
        with self._mutex:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            self._index.forget(path)
