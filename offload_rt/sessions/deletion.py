"""Delete a session's history from a store, together with the blocks that are then no longer used.

A history contains the keys of its session's blocks. Requests without a session name have no history, so the store marks
their blocks (`DiskStore.mark_for_prompts`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..storage.disk_store import DiskStore
from ..storage.documents import Summary
from .history import SINKS, History, document_name


@dataclass(frozen=True)
class Removed:
    """Result of a deletion.

    Attributes:
        unreadable: Histories of other sessions that cannot be read. The keys of their blocks are unknown, so these
            blocks were deleted too.
        kept: Unreadable files that were kept because they may belong to another session.
    """

    bytes: int = 0
    unreadable: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        notes = []
        if self.unreadable:
            files = {name.partition(".")[0] for name in self.kept}  # named in the next sentence
            named = ", ".join(name for name in self.unreadable if name not in files)
            notes.append(
                f"{len(self.unreadable):,} other documents cannot be read{named and f' ({named})'}: their blocks "
                "cannot be identified, so these were deleted too and will be computed again if you put a copy of the "
                "file back"
            )
        if self.kept:
            notes.append(
                f"files that cannot be read were kept ({', '.join(self.kept)}): a file that was renamed before it was "
                "damaged may hold text of the deleted session"
            )
        return "; ".join(notes)


def remove_session(store: DiskStore, namespace: str, document: str, needed: Iterable[bytes] = ()) -> Removed:
    """Delete a session and all unused blocks of its namespace. Raises StoreError if a file cannot be deleted.

    Unused blocks may also come from an edit, a truncation or a crash. `needed` contains the keys of blocks that open
    sessions need.
    """
    removed = _delete_unused(store, namespace, document, needed, keep_marked=True)
    # The history is deleted last. If the process ends before that, the session can be deleted again.
    kept = store.documents.delete(f"{namespace}/{document}", summary_of)
    return replace(removed, kept=tuple(kept))


def summary_of(data: bytes) -> Summary | None:
    history = History.from_bytes(data)
    if history is None:
        return None
    return Summary(document_name(history.name), tuple(history.block_keys), history.sinks_document)


def remove_prompt_blocks(store: DiskStore, namespace: str) -> Removed:
    """Delete all blocks that are used only by requests without a session name. No such request may be running.

    Raises StoreError if a file cannot be changed.
    """
    return _delete_unused(store, namespace, "", (), keep_marked=False)


def _delete_unused(
    store: DiskStore, namespace: str, document: str, needed: Iterable[bytes], *, keep_marked: bool
) -> Removed:
    """Delete unused blocks, and the files with the attention sinks of deleted sessions.

    Blocks of the session `document` are deleted unless another session needs them or `needed` contains their key. If
    `keep_marked` is True, blocks of requests without a session name are kept.
    """
    keys, sinks, unreadable = set(needed), set[str](), []
    documents = store.documents.summaries(namespace, summary_of)
    for other, summary in documents.items():
        if summary is None and other != document and not other.startswith(SINKS):
            unreadable.append(other)
        elif summary is not None and summary.document != document:
            keys.update(summary.blocks)
            sinks.add(summary.sinks)
    freed = store.retain(keys, namespace, keep_marked=keep_marked)
    for other in documents:
        if other.startswith(SINKS) and other not in sinks:
            store.documents.delete(f"{namespace}/{other}")
    return Removed(freed, tuple(unreadable))
