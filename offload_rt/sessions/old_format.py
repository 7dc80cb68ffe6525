"""Read stores written by versions up to 0.1.

In these stores, file names contained the session name, and block files contained tokens in clear text. Blocks and
original keys of sinks are removed when a store is opened for writing, and their KV is recomputed. Histories of format 1
are listed. When such a session is opened, its tokens and turns are written in the current format, and the old files are
removed. Delete this module when no such store is in use any more.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import StoreError
from ..storage.files import read_document
from ..storage.folder import DOCUMENT_FILE, spaces
from .history import FORMAT, History

_CHUNK = re.compile(r"[0-9a-f]{32}(\.kv|\.\d+\.\d+\.tmp)")
_DOCUMENT = re.compile(r"(?s:(.+))(\.doc|\.before|\.damaged)")
_TEMPORARY = re.compile(r"(?s:.+)\.\d+\.\d+\.tmp")
_SINKS = re.compile(r"[0-9a-f]{1,64}\.\d+\.sinks")


@dataclass(frozen=True)
class OldSession:
    """A session of format 1.

    Attributes:
        files: All generations and copies of its document, newest first.
        stem: Common file name without suffix.
        used: Time of the last use in seconds since 1970.
        history: Tokens and turns without KV, or None if no file is intact.
    """

    files: tuple[Path, ...]
    stem: str
    used: float
    history: History | None

    @property
    def space(self) -> str:
        """Digest of the namespace."""
        return self.files[0].parent.name

    def is_called(self, name: str) -> bool:
        """Return whether this is the session `name`."""
        # Without a history, the file name computed from `name` is compared. No name is parsed from a file name.
        return self.history.name == name if self.history is not None else quote(name, safe="") == self.stem

    def remove(self) -> None:
        """Delete the files, the newest last. Raise StoreError if one cannot be deleted."""
        for path in reversed(self.files):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StoreError(f"cannot delete {str(path)!r}: {error.strerror or error}") from error


def old_sessions(folder: Path) -> list[OldSession]:
    """Return the sessions of format 1 in a store folder, most recently used first."""
    found = []
    for space in spaces(folder):
        stems = {match[1] for path in space.iterdir() if (match := _old_document(path))}
        for stem in sorted(stems):
            files = tuple(path for end in (".doc", ".before", ".damaged") if (path := space / f"{stem}{end}").is_file())
            if files and not _holds_sinks(files[0], stem):
                used = max(path.stat().st_mtime for path in files)
                history = next((one for path in files if (one := _history(path)) is not None), None)
                found.append(OldSession(files, stem, used, history))
    return sorted(found, key=lambda one: -one.used)


def remove_old_chunks(folder: Path) -> None:
    """Remove old files with tokens or KV, except histories. The caller holds the write lock of the store."""
    for space in spaces(folder):
        with contextlib.suppress(OSError):
            for path in list(_old_chunks(space)):
                path.unlink(missing_ok=True)


def _old_chunks(space: Path) -> Iterator[Path]:
    for path in space.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from (file for file in path.iterdir() if _CHUNK.fullmatch(file.name) and not file.is_dir())
        elif not DOCUMENT_FILE.fullmatch(path.name):
            match = _DOCUMENT.fullmatch(path.name)
            if _TEMPORARY.fullmatch(path.name) or (match and _holds_sinks(path, match[1])):
                yield path


def _old_document(path: Path) -> re.Match[str] | None:
    return None if DOCUMENT_FILE.fullmatch(path.name) else _DOCUMENT.fullmatch(path.name)


def _holds_sinks(path: Path, stem: str) -> bool:
    """Return whether a file holds original keys of sinks. A session may have such a name, but its content is JSON."""
    return _SINKS.fullmatch(stem) is not None and not (read_document(path).data or b"").startswith(b"{")


def _history(path: Path) -> History | None:
    """Read the history in a file of format 1, without computed tokens. Return None if it cannot be read."""
    data = read_document(path).data
    if data is None:
        return None
    try:
        fields: dict[str, Any] = json.loads(data)
        if fields["format"] != 1:
            return None
        kept = {key: fields[key] for key in ("name", "model", "id", "tokens", "turns", "system") if key in fields}
        return History.from_bytes(json.dumps(kept | {"format": FORMAT}).encode())
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
