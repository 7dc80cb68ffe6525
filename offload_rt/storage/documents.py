"""Small files by name, the last two generations of each: one that is damaged costs what was written last, never all.

A document is written under a temporary name and synced; the one before it gets a second name (`.before`), and only then
does the new one take its place. Whenever the process ends, the newest name holds a whole document, the old or the new.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from errno import EDQUOT, ENOSPC
from pathlib import Path

from ..config import StoreOptions
from ..errors import StoreError
from ..utils.units import format_size
from .chunk_store import Document
from .files import LARGEST_DOCUMENT, read_document, seal, sync_folder, write_document
from .folder import DAMAGED, DOCUMENT_FILE, NAME, StoreFolder, spaces
from .index import BEFORE, DOCUMENTS


class Documents:
    """The documents of the namespace in the folder `own`, within the limit of the store's `folder`
    (`chunk_store.DocumentStore`)."""

    def __init__(self, folder: StoreFolder, own: Path, options: StoreOptions) -> None:
        self._folder, self._own, self._options = folder, own, options
        self._writing = threading.Lock()

    def put(self, name: str, data: bytes) -> None:
        """Writes a document, whole or not at all, and keeps the one before it. Chunks make room for it, within the
        limit and on a full disk, in the end also pinned ones (reading one that is gone is a miss). A damaged one that
        it replaces is put aside. Documents are written one after the other; chunks are read, written and removed while
        the disk is waited for. Raises StoreError."""
        folder = self._folder
        assert not folder.read_only
        newest, before = self._paths(name)
        record = seal(data)
        if len(record) > LARGEST_DOCUMENT:
            raise StoreError(f"{str(newest)!r} would have {format_size(len(record))}: begin another session")
        with self._writing, folder.usable():
            folder.make_subfolder(self._own)
            temporary = self._take_room(newest, len(record))
            try:
                try:
                    self._write(newest, before, temporary, record)
                except OSError as error:
                    if error.errno not in (ENOSPC, EDQUOT) or not folder.make_disk_room(len(record)):
                        raise
                    self._write(newest, before, temporary, record)
            except BaseException:
                folder.give_up(temporary, len(record), None)
                raise
            sync_folder(self._own)

    def _take_room(self, newest: Path, size: int) -> Path:
        """Returns the temporary file of a document that will be `newest`. Raises StoreError where there is no room."""
        folder = self._folder
        with folder.mutex:
            if not (folder.make_room(size) or folder.make_room(size, pinned=True)):
                raise StoreError(
                    f"the store {str(folder.path)!r} is full: {format_size(size)} do not fit within "
                    f"{format_size(self._options.limit or 0)}; raise the limit or delete sessions"
                )
            return folder.hold(newest, size)

    def _write(self, newest: Path, before: Path, temporary: Path, record: bytes) -> None:
        """Makes `record` the newest generation. Raises OSError, and then the newest is what it was."""
        folder = self._folder
        write_document(temporary, record)
        with folder.mutex:
            there = read_document(newest)
            if there.data is not None:
                self._keep(newest, before, seal(there.data))
            elif there.damage:
                folder.put_aside(newest)
            folder.finish(temporary, newest, len(record))

    def _keep(self, newest: Path, before: Path, record: bytes) -> None:
        """Makes what `newest` holds the generation before, without ever taking it from its own name."""
        temporary = self._folder.temporary(before)
        try:
            os.link(newest, temporary)
        except OSError:  # file systems without hard links
            write_document(temporary, record)
        os.replace(temporary, before)
        temporary.unlink(missing_ok=True)  # of two names of one file, as a process leaves that ends here, none moves
        self._folder.enter(before, len(record))

    def get(self, name: str) -> Document | None:
        """Returns the newest whole generation of a document; None where there is no such document. Raises StoreError
        where there is one and none of its generations can be read; nothing is changed then."""
        newest, before = self._paths(name)
        first, second = read_document(newest), read_document(before)
        if first.data is not None:
            return Document(first.data)
        if second.data is not None:
            return Document(second.data, f"{str(newest)!r} {first.damage or 'is missing'}")
        if not (first.damage or second.damage):
            return None
        said = [f"{str(newest)!r} {first.damage or 'is missing'}"]
        if second.damage:
            said.append(f"{str(before)!r}, the one before it, {second.damage}")
        raise StoreError(" and ".join(said))

    def documents(self) -> dict[str, Document | None]:
        """Returns all documents of every namespace: "namespace digest/name" -> the newest whole generation, None where
        none is whole."""
        names = {(path.parent, path.stem) for path in self._files() if path.suffix in (DOCUMENTS, BEFORE)}
        found: dict[str, Document | None] = {}
        for space, name in sorted(names):
            try:
                found[f"{space.name}/{name}"] = Documents(self._folder, space, self._options).get(name)
            except StoreError:
                found[f"{space.name}/{name}"] = None
        return found

    def delete(self, name: str, owns: Callable[[bytes], bool | None] | None = None) -> bool:
        """Delete all generations and put-aside copies of a document of this namespace, or of "namespace digest/name".

        owns: whether a file with this content is one of them, whatever its name is; None if the content does not say.
        Then, and for unreadable files, the name decides. The newest generation is deleted last: if the process ends in
        between, the document is still there, whole. Return False if there was none. Raise StoreError if a file cannot
        be deleted.
        """
        newest, _ = self._paths(name)
        doomed = []
        for path in self._files(newest.parent):
            data = read_document(path).data
            own = None if owns is None or data is None else owns(data)
            if path.stem == newest.stem if own is None else own:
                doomed.append(path)
        with self._writing:
            self._folder.remove(sorted(doomed, key=lambda path: path.suffix == DOCUMENTS))
        return bool(doomed)

    def _paths(self, name: str) -> tuple[Path, Path]:
        """The files of both generations, the newest first."""
        space, _, name = name.rpartition("/")
        assert NAME.fullmatch(name), name
        folder = self._folder.path / space if space else self._own
        return folder / f"{name}{DOCUMENTS}", folder / f"{name}{BEFORE}"

    def _files(self, *only: Path) -> Iterator[Path]:
        """Return the documents' files, except temporary ones, of the namespaces with folders `only`, or of all."""
        for space in spaces(self._folder.path):
            if not only or space in only:
                known = (path for path in space.iterdir() if DOCUMENT_FILE.fullmatch(path.name))
                yield from (path for path in known if path.suffix in (DOCUMENTS, BEFORE, DAMAGED))
