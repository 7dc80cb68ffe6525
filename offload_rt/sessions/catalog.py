"""What a folder of sessions holds, for people: no model is loaded."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError, StoreError
from ..storage.disk_store import DiskStore
from ..storage.folder import chunk_paths, spaces
from ..storage.index import DOCUMENTS
from .deletion import Removed, remove_session
from .history import SINKS, History, document_name
from .old_format import OldSession, old_sessions, remove_old_chunks


@dataclass(frozen=True)
class StoredFile:
    """A stored file: its bytes, and when it was last used, in seconds since 1970 (with the store policy fifo:
    written)."""

    bytes: int
    used: float


@dataclass(frozen=True)
class StoredSession:
    """A session on disk.

    document: "namespace digest/name" in the store; chunks: those that are there; own_bytes: of chunks that no other
    session has; used: when it last was; damage: what is wrong with its last history, so that this is the one before it,
    else empty; old: its files, if an earlier version wrote them.
    """

    document: str
    history: History
    chunks: tuple[StoredFile, ...]
    own_bytes: int
    used: float
    damage: str
    old: OldSession | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all its chunks."""
        return sum(chunk.bytes for chunk in self.chunks)

    def bytes_unused_since(self, time: float) -> int:
        """Returns the bytes of chunks that nobody has used since `time`: what a time to live gives up. Its text stays
        in any case."""
        return sum(chunk.bytes for chunk in self.chunks if chunk.used < time)

    def is_called(self, name: str, model: str | None) -> bool:
        """Whether this is the session `name`, of the model with the name `model` unless that is None."""
        return self.history.name == name and model in (None, self.history.model)


@dataclass(frozen=True)
class DamagedSession:
    """A session of whose history nothing can be read. document: "namespace digest/name" in the store; old: its files,
    if an earlier version wrote them."""

    document: str
    old: OldSession | None = None

    @property
    def space(self) -> str:
        """Digest of its namespace, which stands for its model."""
        return self.document.partition("/")[0]

    @property
    def name(self) -> str:
        """The name of its document: the session's own name cannot be read."""
        return self.document.partition("/")[2]

    def is_called(self, name: str, model: str | None) -> bool:
        """Whether this is the session `name`, or the document `name`, of the namespace `model` unless that is None."""
        own = self.name == document_name(name) if self.old is None else self.old.is_called(name)
        return (own or self.name == name) and model in (None, self.space)


@dataclass(frozen=True)
class Catalog:
    """What a folder holds, by name. damaged: sessions of whose histories nothing can be read."""

    sessions: tuple[StoredSession, ...]
    damaged: tuple[DamagedSession, ...]


def read_catalog(folder: Path) -> Catalog:
    """Returns what is in `folder`, of every model. Raises InputError where there is no such folder."""
    if not folder.is_dir():
        raise InputError(f"there is no store at {str(folder)!r}: give the folder that `chat --store` was given")
    documents = DiskStore(folder, "", 0, read_only=True).documents()
    files = {(space.name, key): file for space in spaces(folder) for key, file in _files(chunk_paths(space))}
    told = {name: file.used for name in documents for _, file in _files([folder / f"{name}{DOCUMENTS}"])}
    histories, damaged = dict[str, History](), []
    for name, document in documents.items():
        history = None if document is None else History.from_bytes(document.data)
        kind = name.partition("/")[2]
        if history is not None and document_name(history.name) == kind:
            histories[name] = history
        elif not kind.startswith(SINKS):
            damaged.append(DamagedSession(name))
    users = Counter((name.partition("/")[0], key) for name, one in histories.items() for key in set(one.keys))
    sessions = []
    for name, history in histories.items():
        space, document = name.partition("/")[0], documents[name]
        chunks = {key: files[space, key] for key in history.keys if (space, key) in files}
        own = sum(chunk.bytes for key, chunk in chunks.items() if users[space, key] == 1)
        used = max([told.get(name, 0.0), *(chunk.used for chunk in chunks.values())])
        damage = "" if document is None else document.damage
        sessions.append(StoredSession(name, history, tuple(chunks.values()), own, used, damage))
    for old in old_sessions(folder):
        name = f"{old.space}/{old.stem}"
        if old.history is None:
            damaged.append(DamagedSession(name, old))
        else:
            sessions.append(StoredSession(name, old.history, (), 0, old.used, "", old))
    sessions.sort(key=lambda one: (one.history.name, one.document))
    return Catalog(tuple(sessions), tuple(sorted(damaged, key=lambda one: one.document)))


def _files(paths: Iterable[Path]) -> Iterator[tuple[str, StoredFile]]:
    """(stem, file) of those that are still there."""
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.lstat()
            yield path.stem, StoredFile(status.st_size, status.st_mtime)


def find_stored(folder: Path, name: str, model: str | None = None) -> StoredSession:
    """Return the session `name`, of `model` if several models have one. Raise InputError for none or several,
    StoreError if it is damaged."""
    one = _find(folder, name, model)
    if isinstance(one, DamagedSession):
        raise StoreError(
            f"nothing of the history of session {name!r} can be read ({one.document}{DOCUMENTS} in the store): "
            "put a copy of the file back, or delete the session"
        )
    return one


def _find(folder: Path, name: str, model: str | None) -> StoredSession | DamagedSession:
    catalog = read_catalog(folder)
    whole = [one for one in catalog.sessions if one.is_called(name, model)]
    damaged = [one for one in catalog.damaged if one.is_called(name, model)]
    found: list[StoredSession | DamagedSession] = [*whole] or [*damaged]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{one.history.name!r} of {one.history.model}" for one in catalog.sessions) or "none"
    if found:
        raise InputError(f"more than one session {name!r} in {str(folder)!r}: say which with --model (there: {known})")
    raise InputError(f"no session {name!r} in {str(folder)!r} (there: {known})")


@dataclass(frozen=True)
class Deleted:
    """A session that is gone: its name and its model (of a damaged one the digest of its namespace), and what went with
    it."""

    name: str
    model: str
    removed: Removed


def delete_stored(folder: Path, name: str, model: str | None = None) -> Deleted:
    """Delete a session, and all chunks of its model that no other session in the folder has. Raise InputError,
    StoreError."""
    one = _find(folder, name, model)
    space, _, document = one.document.partition("/")
    store = DiskStore(folder, "", 0)
    try:
        remove_old_chunks(folder)
        removed = remove_session(store, space, document) if one.old is None else Removed()
        if one.old is not None:
            one.old.remove()
    finally:
        store.close()
    if isinstance(one, DamagedSession):
        return Deleted(one.name, one.space, removed)
    return Deleted(one.history.name, one.history.model, removed)


def export_text(history: History) -> str:
    """Returns the conversation as plain text."""
    return "".join(f"### {role}\n{text}\n\n" for role, text in history.turns)
