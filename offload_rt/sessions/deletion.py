"""Deleting a session: its documents, and every chunk and sink that no session left in the store refers to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..storage.chunk_store import StorageTier
from .history import SINKS, History, document_name


@dataclass(frozen=True)
class Removed:
    """What a deletion did. bytes: of chunks that were freed. unreadable: documents of other sessions of the same model
    that cannot be read. Their chunks cannot be told from orphans and are gone too."""

    bytes: int = 0
    unreadable: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """A sentence about `unreadable`, or an empty text."""
        if not self.unreadable:
            return ""
        return (
            f"{len(self.unreadable):,} other documents of this model cannot be read ({', '.join(self.unreadable)}): "
            "which chunks were theirs is not known, so these were deleted too and will be computed again if you put a "
            "copy of the file back; a file that was renamed before it was damaged may hold text of the deleted session"
        )


def remove_session(store: StorageTier, space: str, document: str, held: Iterable[bytes] = ()) -> Removed:
    """Delete the session with the document `document` in the namespace with digest `space`.

    All chunks that no readable history of the namespace refers to go with it: not only the session's own, but also what
    edits, regenerations, truncations, crashes and interrupted turns of any session left behind. They hold KV of tokens
    that no session has any more. `held`: keys of chunks that open sessions need. Chunks go first and the newest
    document last, so that a process that ends in between leaves a session that can be deleted again.

    Raises StoreError if a file cannot be deleted.
    """

    def owns(data: bytes) -> bool | None:
        """Whether this is a history of the session. The content decides, because a file may have been renamed."""
        history = History.from_bytes(data)
        return None if history is None else document_name(history.name) == document

    keys, sinks, unreadable = set(held), set[str](), []
    documents = {key.split("/")[1]: found for key, found in store.documents().items() if key.startswith(f"{space}/")}
    for other, found in documents.items():
        history = None if found is None else History.from_bytes(found.data)
        if history is None and other != document and not other.startswith(SINKS):
            unreadable.append(other)
        elif history is not None and document_name(history.name) != document:
            keys.update(history.chunk_keys)
            sinks.add(history.sinks_document)
    freed = store.retain(keys, space)
    for other in documents:
        if other.startswith(SINKS) and other not in sinks:
            store.delete(f"{space}/{other}")
    store.delete(f"{space}/{document}", owns)
    return Removed(freed, tuple(unreadable))
