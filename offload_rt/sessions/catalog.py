"""What a folder of sessions holds, for people: no model is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from ..errors import InputError, StoreError
from ..storage.disk_store import DiskStore
from ..storage.index import DOCUMENTS
from .history import History, remove_orphans, unreadable


@dataclass(frozen=True)
class StoredFile:
    """A stored file: its bytes, and when it was last used, in seconds since 1970 (with the store policy fifo:
    written)."""

    bytes: int
    used: float


@dataclass(frozen=True)
class StoredSession:
    """A session on disk. document: "namespace digest/name" in the store; chunks: those of its rows that are there;
    own_bytes: of chunks no other session has; used: when it last was; damage: what is wrong with its last history, so
    that this is the one before it, else empty."""

    document: str
    history: History
    chunks: tuple[StoredFile, ...]
    own_bytes: int
    used: float
    damage: str

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


@dataclass(frozen=True)
class DamagedSession:
    """A session of whose history nothing can be read. document: "namespace digest/name" in the store."""

    document: str

    @property
    def space(self) -> str:
        """Digest of its namespace, which stands for its model."""
        return self.document.split("/")[0]

    @property
    def name(self) -> str:
        """The session's name."""
        return unquote(self.document.split("/")[1])


@dataclass(frozen=True)
class Catalog:
    """What a folder holds, by name. damaged: sessions of whose histories nothing can be read."""

    sessions: tuple[StoredSession, ...]
    damaged: tuple[DamagedSession, ...]

    def find_damaged(self, name: str) -> DamagedSession | None:
        """Returns the damaged session `name` or "name@namespace digest"; None where there is none, or several."""
        found = [one for one in self.damaged if name in (one.name, f"{one.name}@{one.space}")]
        return found[0] if len(found) == 1 else None


def read_catalog(folder: Path) -> Catalog:
    """Returns what is in `folder`, of every model. Raises InputError where there is no such folder."""
    if not folder.is_dir():
        raise InputError(f"there is no store at {str(folder)!r}: give the folder that `chat --store` was given")
    documents = DiskStore(folder, "", 0, read_only=True).documents()
    whole = {name: document for name, document in documents.items() if document is not None}
    found = {name: History.from_bytes(document.data) for name, document in whole.items()}
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
        sessions.append(StoredSession(name, history, tuple(chunks.values()), own, used, whole[name].damage))
    return Catalog(tuple(sessions), tuple(map(DamagedSession, sorted(unreadable(documents)))))


def _files(paths: Iterable[Path]) -> Iterator[tuple[str, StoredFile]]:
    """(stem, file) of those that are still there."""
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            yield path.stem, StoredFile(status.st_size, status.st_mtime)


def find_stored(folder: Path, name: str) -> StoredSession:
    """Returns the session `name`; where several models have one, "name@model" says which. Raises InputError for none or
    several, StoreError where it is damaged."""
    catalog = read_catalog(folder)
    found = [one for one in catalog.sessions if name in (one.history.name, f"{one.history.name}@{one.history.model}")]
    if len(found) == 1:
        return found[0]
    if not found and (damaged := catalog.find_damaged(name)) is not None:
        raise StoreError(
            f"nothing of the history of session {name!r} can be read ({damaged.document}{DOCUMENTS} in the store): "
            f"put a copy of the file back, or `offload-rt sessions repair {name}` rebuilds its text from its chunks"
        )
    known = ", ".join(f"{one.history.name}@{one.history.model}" for one in catalog.sessions) or "none"
    raise InputError(f"{'no' if not found else 'more than one'} session {name!r} in {str(folder)!r} (there: {known})")


@dataclass(frozen=True)
class Deleted:
    """A session that is gone: its name and its model (of a damaged one the digest of its namespace), and the bytes of
    chunks that went with it."""

    name: str
    model: str
    bytes: int


def delete_stored(folder: Path, name: str) -> Deleted:
    """Deletes a session, and the chunks that no other one has. Where nothing of another history of the model can be
    read, or of its own, chunks stay: nobody knows whose they are. Raises InputError, StoreError."""
    catalog = read_catalog(folder)
    damaged, keys = catalog.find_damaged(name), set[str]()
    if damaged is not None:
        gone, document, space = Deleted(damaged.name, damaged.space, 0), damaged.document, damaged.space
    else:
        one = find_stored(folder, name)
        document, space = one.document, one.space
        if space not in {other.space for other in catalog.damaged}:
            others = {key for other in catalog.sessions if other.document != document for key in other.history.keys}
            keys = set(one.history.keys) - others
        gone = Deleted(one.history.name, one.history.model, one.own_bytes if keys else 0)
    store = DiskStore(folder, "", 0)
    try:
        store.delete(document)
        store.remove((bytes.fromhex(key) for key in keys), space)
        remove_orphans(store)
    finally:
        store.close()
    return gone


def export_text(history: History) -> str:
    """Returns the conversation as plain text."""
    return "".join(f"### {role}\n{text}\n\n" for role, text in history.turns)
