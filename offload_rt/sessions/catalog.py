"""List, find and delete the sessions in a store folder without loading a model."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError, StoreError
from ..storage.disk_store import DiskStore
from ..storage.folder import block_paths, namespace_folders
from ..storage.index import DOCUMENTS
from .deletion import Removed, remove_prompt_blocks, remove_session
from .history import SINKS, History, document_name


@dataclass(frozen=True)
class StoredFile:
    """Size of a file in a store, in bytes, and the time of its last use. With "fifo", it is the time of its creation.

    Times are in seconds since 1970.
    """

    bytes: int
    used: float


@dataclass(frozen=True)
class StoredSession:
    """A session in a store folder.

    Attributes:
        document: Name of the history file, in the form "digest of the namespace/file name".
        history: The newest readable history. If `damage` is set, a newer history exists but cannot be read.
        blocks: Files of the session's blocks on disk.
        own_bytes: Size in bytes of the blocks that no other session uses.
        used: Time of the last use in seconds since 1970.
        damage: Why the newest history cannot be read, or "" if it can.
    """

    document: str
    history: History
    blocks: tuple[StoredFile, ...]
    own_bytes: int
    used: float
    damage: str

    @property
    def bytes(self) -> int:
        return sum(block.bytes for block in self.blocks)

    def bytes_unused_since(self, time: float) -> int:
        """Return the size in bytes of the blocks that have not been used since `time` (seconds since 1970)."""
        return sum(block.bytes for block in self.blocks if block.used < time)

    def is_called(self, name: str, model: str | None) -> bool:
        return self.history.name == name and model in (None, self.history.model)


@dataclass(frozen=True)
class DamagedSession:
    """A session whose history cannot be read. Its name and model are therefore unknown."""

    document: str

    @property
    def namespace(self) -> str:
        """Digest of the namespace. It takes the place of the unknown model name."""
        return self.document.partition("/")[0]

    @property
    def name(self) -> str:
        """Name of the history file. It takes the place of the unknown session name."""
        return self.document.partition("/")[2]

    def is_called(self, name: str, model: str | None) -> bool:
        """Return whether `name` names this session or its history file, and `model` is None or its namespace."""
        return self.name in (document_name(name), name) and model in (None, self.namespace)


@dataclass(frozen=True)
class Catalog:
    """Contents of a store folder.

    Attributes:
        sessions: Sessions with a readable history, sorted by name.
        damaged: Sessions without a readable history, sorted by the name of the history file.
    """

    sessions: tuple[StoredSession, ...]
    damaged: tuple[DamagedSession, ...]


def read_catalog(folder: Path) -> Catalog:
    """Return the sessions of all models in a store folder.

    Raises:
        InputError: The folder does not exist.
        StoreError: The store was written by an earlier version.
    """
    _check_folder(folder)
    documents = DiskStore(folder, "", 0, read_only=True).documents.read_all()
    histories, damaged = dict[str, History](), []
    for path, document in documents.items():
        history = None if document is None else History.from_bytes(document.data)
        name = path.partition("/")[2]
        if history is not None and document_name(history.name) == name:
            histories[path] = history
        elif not name.startswith(SINKS):
            damaged.append(DamagedSession(path))
    files = {
        (namespace.name, key): file
        for namespace in namespace_folders(folder)
        for key, file in _files(block_paths(namespace))
    }
    users = Counter((path.partition("/")[0], key) for path, history in histories.items() for key in set(history.keys))
    sessions = []
    for path, history in histories.items():
        namespace, document = path.partition("/")[0], documents[path]
        blocks = {key: files[namespace, key] for key in history.keys if (namespace, key) in files}
        own = sum(block.bytes for key, block in blocks.items() if users[namespace, key] == 1)
        written = [file.used for _, file in _files([folder / f"{path}{DOCUMENTS}"])]
        used = max([*written, *(block.used for block in blocks.values())], default=0.0)
        damage = "" if document is None else document.damage
        sessions.append(StoredSession(path, history, tuple(blocks.values()), own, used, damage))
    sessions.sort(key=lambda session: (session.history.name, session.document))
    return Catalog(tuple(sessions), tuple(sorted(damaged, key=lambda session: session.document)))


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise InputError(f"there is no store at {str(folder)!r}: give the folder of `chat --store` or `serve --store`")


def _files(paths: Iterable[Path]) -> Iterator[tuple[str, StoredFile]]:
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.lstat()
            yield path.stem, StoredFile(status.st_size, status.st_mtime)


def find_stored(folder: Path, name: str, model: str | None = None) -> StoredSession:
    """Return the session `name`. `model` is needed only if several models have a session of this name.

    Raises:
        InputError: No session matches, or several do.
        StoreError: The history of the session cannot be read.
    """
    found = _find(folder, name, model)
    if isinstance(found, DamagedSession):
        raise StoreError(
            f"the history of session {name!r} cannot be read ({found.document}{DOCUMENTS} in the store): "
            "put a copy of the file back, or delete the session"
        )
    return found


def _find(folder: Path, name: str, model: str | None) -> StoredSession | DamagedSession:
    catalog = read_catalog(folder)
    found: list[StoredSession | DamagedSession]
    found = [session for session in catalog.sessions if session.is_called(name, model)]
    found = found or [session for session in catalog.damaged if session.is_called(name, model)]
    if len(found) == 1:
        return found[0]
    if found:
        models = ", ".join(one.namespace if isinstance(one, DamagedSession) else one.history.model for one in found)
        raise InputError(f"more than one session {name!r} in {str(folder)!r}: choose one with --model ({models})")
    known = ", ".join(f"{session.history.name!r} of {session.history.model}" for session in catalog.sessions) or "none"
    raise InputError(f"no session {name!r} in {str(folder)!r} (there: {known})")


@dataclass(frozen=True)
class Deleted:
    """A deleted session. If it was damaged, this holds the `name` and `namespace` of the `DamagedSession`."""

    name: str
    model: str
    removed: Removed


def delete_stored(folder: Path, name: str, model: str | None = None) -> Deleted:
    """Delete a session and all blocks that are then unused.

    Blocks that other sessions or unnamed requests of the same model use are kept.

    Args:
        name: Name of the session, or of its history file if the history cannot be read.
        model: Name of the model, or the digest of the namespace if the history cannot be read. Needed only if several
            sessions match.

    Raises:
        InputError: No session matches, or several do.
        StoreError: Another process is writing to the store, or a file cannot be deleted.
    """
    found = _find(folder, name, model)
    namespace, _, document = found.document.partition("/")
    store = DiskStore(folder, "", 0)
    try:
        removed = remove_session(store, namespace, document)
    finally:
        store.close()
    if isinstance(found, DamagedSession):
        return Deleted(found.name, found.namespace, removed)
    return Deleted(found.history.name, found.history.model, removed)


def clear_prompts(folder: Path) -> Removed:
    """Delete the KV of all requests without a session name, for every model.

    Raises:
        InputError: The folder does not exist.
        StoreError: Another process is writing to the store, or a file cannot be deleted.
    """
    _check_folder(folder)
    store = DiskStore(folder, "", 0)
    try:
        each = [remove_prompt_blocks(store, namespace.name) for namespace in namespace_folders(folder)]
    finally:
        store.close()
    return Removed(sum(one.bytes for one in each), tuple(name for one in each for name in one.unreadable))


def export_text(history: History) -> str:
    return "".join(f"### {role}\n{text}\n\n" for role, text in history.turns)
