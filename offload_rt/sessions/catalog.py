"""What a folder of sessions holds, for people: no model is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from ..storage.disk_store import DiskStore
from ..storage.index import DOCUMENTS
from .history import History, remove_orphans


@dataclass(frozen=True)
class StoredFile:
    """A stored file: its bytes, and when it was last used, in seconds since 1970 (with the store policy fifo:
    written)."""

    bytes: int
    used: float


@dataclass(frozen=True)
class StoredSession:
    """A session on disk. document: "namespace digest/name" in the store; chunks: those of its rows that are there;
    own_bytes: of chunks no other session has; used: when it last was."""

    document: str
    history: History
    chunks: tuple[StoredFile, ...]
    own_bytes: int
    used: float

    @property
    def bytes(self) -> int:
        """Bytes of all its chunks."""
        return sum(chunk.bytes for chunk in self.chunks)

    def bytes_unused_since(self, time: float) -> int:
        """Returns the bytes of chunks that nobody has used since `time`: what a time to live gives up. Its text stays
        in any case."""
        return sum(chunk.bytes for chunk in self.chunks if chunk.used < time)

    @property
    def space(self) -> str:
        """Digest of its namespace."""
        return self.document.split("/")[0]


def stored_sessions(folder: Path) -> list[StoredSession]:
    """Returns all sessions in `folder`, of every model, by name. Raises InputError where there is no such folder."""
    if not folder.is_dir():
        raise InputError(f"there is no store at {str(folder)!r}: give the folder that `chat --store` was given")
    documents = DiskStore(folder, "", 0, read_only=True).documents()
    found = {name: History.from_bytes(data) for name, data in documents.items()}
    histories = {name: history for name, history in found.items() if history is not None}
    files = dict(_files(folder.glob("*/*/*.kv")))
    told = {name: file.used for name in histories for _, file in _files([folder / f"{name}{DOCUMENTS}"])}
    users: dict[str, int] = {}
    for history in histories.values():
        for key in history.keys:
            users[key] = users.get(key, 0) + 1
    sessions = []
    for name, history in sorted(histories.items(), key=lambda item: (item[1].name, item[0])):
        chunks = {key: files[key] for key in history.keys if key in files}
        own = sum(chunk.bytes for key, chunk in chunks.items() if users[key] == 1)
        used = max([told.get(name, 0.0), *(chunk.used for chunk in chunks.values())])
        sessions.append(StoredSession(name, history, tuple(chunks.values()), own, used))
    return sessions


def _files(paths: Iterable[Path]) -> Iterator[tuple[str, StoredFile]]:
    """(stem, file) of those that are still there."""
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            yield path.stem, StoredFile(status.st_size, status.st_mtime)


def find_stored(folder: Path, name: str) -> StoredSession:
    """Returns the session `name`; where several models have one, "name@model" says which. Raises InputError for none or
    several."""
    everything = stored_sessions(folder)
    found = [one for one in everything if name in (one.history.name, f"{one.history.name}@{one.history.model}")]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{one.history.name}@{one.history.model}" for one in everything) or "none"
    raise InputError(f"{'no' if not found else 'more than one'} session {name!r} in {str(folder)!r} (there: {known})")


def delete_stored(folder: Path, name: str) -> StoredSession:
    """Deletes a session, and the chunks that no other one has. Raises InputError, StoreError."""
    gone = find_stored(folder, name)
    others = {key for one in stored_sessions(folder) if one.document != gone.document for key in one.history.keys}
    store = DiskStore(folder, "", 0)
    try:
        store.delete(gone.document)
        store.remove((bytes.fromhex(key) for key in gone.history.keys if key not in others), gone.space)
        remove_orphans(store)
    finally:
        store.close()
    return gone


def export_text(history: History) -> str:
    """Returns the conversation as plain text."""
    return "".join(f"### {role}\n{text}\n\n" for role, text in history.turns)
