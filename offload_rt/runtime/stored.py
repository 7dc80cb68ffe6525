"""What a folder of sessions holds, for people: no model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from ..pool.disk import DiskStore
from .history import History, remove_orphans


@dataclass(frozen=True)
class StoredSession:
    """A session on disk. document: "namespace digest/name" in the store; own_bytes: of chunks no other session has."""

    document: str
    history: History
    bytes: int
    own_bytes: int

    @property
    def space(self) -> str:
        """Digest of its namespace."""
        return self.document.split("/")[0]


def stored_sessions(folder: Path) -> list[StoredSession]:
    """All sessions in `folder`, of every model, by name. Raises InputError where there is no such folder."""
    if not folder.is_dir():
        raise InputError(f"there is no store at {str(folder)!r}: give the folder that `chat --store` was given")
    documents = DiskStore(folder, "", 0, read_only=True).documents()
    found = {name: History.from_bytes(data) for name, data in documents.items()}
    histories = {name: history for name, history in found.items() if history is not None}
    sizes = {path.stem: path.stat().st_size for path in folder.glob("*/*/*.kv")}
    users: dict[str, int] = {}
    for history in histories.values():
        for key in history.keys:
            users[key] = users.get(key, 0) + 1
    return [
        StoredSession(
            name,
            history,
            sum(sizes.get(key, 0) for key in history.keys),
            sum(sizes.get(key, 0) for key in history.keys if users[key] == 1),
        )
        for name, history in sorted(histories.items(), key=lambda item: (item[1].name, item[0]))
    ]


def find_stored(folder: Path, name: str) -> StoredSession:
    """The session `name`; where several models have one, "name@model". Raises InputError for none or several."""
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
    """The conversation as plain text."""
    return "".join(f"### {role}\n{text}\n\n" for role, text in history.turns)
