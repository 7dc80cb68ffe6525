"""Small named files (documents). Each document has two *generations*, its newest and its previous version.

If the newest generation is damaged, only the last change is lost. A new generation is first written to a temporary
file. Then the current generation gets a second name (suffix `.before`), and the temporary file takes over the name of
the document. This name therefore always refers to an intact generation, even if the process is killed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from pathlib import Path

from ..errors import StoreError
from ..utils.atomic_files import sync, write_synced
from ..utils.units import format_size
from .files import LARGEST_DOCUMENT, read_document, seal
from .folder import DAMAGED, DOCUMENT_FILE, NAME, StoreFolder, namespace_folders
from .index import BEFORE, DOCUMENTS

_SETTLED_NS = 2 * 10**9
"""Minimum age of a file's last change, in nanoseconds, before its summary is cached.

This ensures that a later change has a different timestamp.
"""


@dataclass(frozen=True)
class Document:
    """Newest intact generation of a document.

    `damage` is the reason why the newest generation could not be read. It is empty if there was no problem.
    """

    data: bytes
    damage: str = ""


@dataclass(frozen=True)
class Summary:
    """Data from a session history that is needed to delete files and blocks.

    Attributes:
        document: Name of the document to which the history belongs, even if the file was renamed.
        blocks: Keys of the KV blocks that the session uses.
        sinks: Name of the document that stores the keys of the session's attention sinks.
    """

    document: str
    blocks: tuple[bytes, ...]
    sinks: str


Summarise = Callable[[bytes], Summary | None]
"""Function that parses the content of a document and returns None if the content is not a valid session history."""


@dataclass(frozen=True)
class CachedSummary:
    """Summary of an intact document file. `summary` is None if the file is not a session history."""

    summary: Summary | None


class SummaryCache:
    """Caches summaries of document files until the files change. Thread-safe.

    Without the cache, each deletion would read the histories of all sessions.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], CachedSummary]] = {}

    def get(self, path: Path, summarise: Summarise) -> CachedSummary | None:
        try:
            status = path.lstat()
        except OSError:
            self._known.pop(path, None)
            return None
        # Copying or restoring a file can preserve its mtime, but not its ctime.
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        before, known = self._known.get(path, ((), None))
        if before == identity and known is not None:
            return known
        data = read_document(path).data
        if data is None:
            self._known.pop(path, None)
            return None
        known = CachedSummary(summarise(data))
        if time.time_ns() - status.st_ctime_ns > _SETTLED_NS:
            self._known[path] = identity, known
        return known


class DocumentStore:
    """Stores the documents of one namespace in the folder `own`. Thread-safe.

    Document names match the pattern `folder.NAME` and contain no text from users. Documents are never evicted, but they
    count towards `limit` (in bytes).
    """

    def __init__(self, folder: StoreFolder, own: Path, limit: int | None) -> None:
        self._folder, self._own, self._limit = folder, own, limit
        self._writing = threading.Lock()
        self._summaries = SummaryCache()

    def put(self, name: str, data: bytes) -> None:
        """Write a document atomically, and keep the previous generation (under another name if it is damaged).

        If the limit or the disk leaves no space, KV blocks are evicted, with pinned blocks last. Only one document is
        written at a time, but operations on blocks do not have to wait.

        Raises:
            StoreError: The document is too large, the store is full, or the file cannot be written.
        """
        folder = self._folder
        assert not folder.read_only
        newest, before = self._paths(name)
        record = seal(data)
        if len(record) > LARGEST_DOCUMENT:
            raise StoreError(f"{str(newest)!r} would be too large ({format_size(len(record))}): start another session")
        with self._writing, folder.usable():
            folder.make_subfolder(self._own)
            temporary = self._reserve(newest, len(record))
            try:
                try:
                    self._write(newest, before, temporary, record)
                except OSError as error:
                    if error.errno not in (ENOSPC, EDQUOT) or not folder.free_disk_space(len(record)):
                        raise
                    self._write(newest, before, temporary, record)
            except BaseException:
                folder.give_up(temporary, len(record), None)
                raise
            sync(self._own)

    def _reserve(self, newest: Path, size: int) -> Path:
        folder = self._folder
        with folder.mutex:
            if not (folder.free_space(size) or folder.free_space(size, pinned=True)):
                raise StoreError(
                    f"the store {str(folder.path)!r} is full: {format_size(size)} do not fit within "
                    f"{format_size(self._limit or 0)}; raise the limit or delete sessions"
                )
            return folder.reserve_bytes(newest, size)

    def _write(self, newest: Path, before: Path, temporary: Path, record: bytes) -> None:
        folder = self._folder
        write_synced(temporary, record)
        with folder.mutex:
            current = read_document(newest)
            if current.data is not None:
                self._keep_previous(newest, before, seal(current.data))
            elif current.damage:
                folder.put_aside(newest)
            folder.finish(temporary, newest, len(record))

    def _keep_previous(self, newest: Path, before: Path, record: bytes) -> None:
        temporary = self._folder.temporary(before)
        try:
            os.link(newest, temporary)
        except OSError:  # The file system does not support hard links.
            write_synced(temporary, record)
        os.replace(temporary, before)
        # `os.replace` has no effect if a crash left both names linked to the same file.
        temporary.unlink(missing_ok=True)
        self._folder.index.add(before, len(record))

    def get(self, name: str) -> Document | None:
        """Return the newest intact generation of a document, or None if it does not exist.

        Raises StoreError if no generation of the document is intact.
        """
        newest, before = self._paths(name)
        first, second = read_document(newest), read_document(before)
        if first.data is not None:
            return Document(first.data)
        if second.data is not None:
            return Document(second.data, f"{str(newest)!r} {first.damage or 'is missing'}")
        if not (first.damage or second.damage):
            return None
        reasons = [f"{str(newest)!r} {first.damage or 'is missing'}"]
        if second.damage:
            reasons.append(f"{str(before)!r}, the previous version, {second.damage}")
        raise StoreError(" and ".join(reasons))

    def read_all(self) -> dict[str, Document | None]:
        """Return the newest intact generation of each document in all namespaces, by "namespace digest/name".

        The value is None if no generation of the document is intact.
        """
        names = {(path.parent, path.stem) for path in self._files() if path.suffix in (DOCUMENTS, BEFORE)}
        found: dict[str, Document | None] = {}
        for name in sorted(f"{namespace.name}/{name}" for namespace, name in names):
            try:
                found[name] = self.get(name)
            except StoreError:
                found[name] = None
        return found

    def summaries(self, namespace: str, summarise: Summarise) -> dict[str, Summary | None]:
        """Return the summary of each document in a namespace, by document name.

        The value is None if no generation of the document is intact, or if the document is not a session history.
        """
        files = {path for path in self._files(self._folder.path / namespace) if path.suffix in (DOCUMENTS, BEFORE)}
        found: dict[str, Summary | None] = {}
        for name in sorted({path.stem for path in files}):
            generations = [path for path in self._paths(f"{namespace}/{name}") if path in files]
            known = (self._summaries.get(path, summarise) for path in generations)
            found[name] = next((one.summary for one in known if one is not None), None)
        return found

    def delete(self, name: str, summarise: Summarise | None = None) -> list[str]:
        """Delete all generations and copies of a document, with the newest generation last. Raises StoreError.

        Args:
            name: Name of the document, or "namespace digest/name".
            summarise: If given, the content of a file decides whether the file belongs to the document, because files
                may have been renamed. If the content is not a session history, the file name decides.

        Returns:
            The sorted names of unreadable files, which may also belong to the document. Empty without `summarise`.
        """
        newest, _ = self._paths(name)
        doomed, unreadable = list[Path](), list[str]()
        for path in self._files(newest.parent):
            known = None if summarise is None else self._summaries.get(path, summarise)
            summary = None if known is None else known.summary
            if newest.stem == (path.stem if summary is None else summary.document):
                doomed.append(path)
            elif summarise is not None and known is None:
                unreadable.append(path.name)
        with self._writing:
            self._folder.remove(sorted(doomed, key=lambda path: path.suffix == DOCUMENTS))
        return sorted(unreadable)

    def _paths(self, name: str) -> tuple[Path, Path]:
        namespace, _, name = name.rpartition("/")
        assert NAME.fullmatch(name), name
        folder = self._folder.path / namespace if namespace else self._own
        return folder / f"{name}{DOCUMENTS}", folder / f"{name}{BEFORE}"

    def _files(self, *only: Path) -> Iterator[Path]:
        for namespace in namespace_folders(self._folder.path):
            if not only or namespace in only:
                known = (path for path in namespace.iterdir() if DOCUMENT_FILE.fullmatch(path.name))
                yield from (path for path in known if path.suffix in (DOCUMENTS, BEFORE, DAMAGED))
