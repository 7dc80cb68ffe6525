"""Texts that the server remembers for its clients, in memory or in a folder: small heads to look through, bodies to
read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
import uuid
from collections import OrderedDict
from pathlib import Path
from typing import Any

from ..storage.files import open_regular
from ..utils.private_files import make_private, make_private_folder, open_private
from ..utils.small_files import parse_json

Head = dict[str, Any]

MOST = 10_000
"""Documents of one kind; the one used longest ago goes first."""

MOST_BYTES = {False: 64 << 20, True: 4 << 30}
"""Of all documents of one kind: in memory, on disk."""

_SUFFIX = ".json"
_FILE = re.compile(r"([0-9a-f]{32})\.json")
_TEMPORARY = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]{32})?\.tmp")
_STALE = 60.0
"""Seconds after which a temporary file is nobody's: another server may be writing a younger one."""


def digest(*parts: str) -> str:
    """A name for files that says nothing of `parts`: no path comes from a client."""
    text = "\0".join(f"{len(part)} {part}" for part in parts)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Documents:
    """Heads and bodies, JSON both, by name; names are made by `digest`. What does not fit any more is forgotten, the
    one used longest ago first. A file is one line with the head and one with the body, replaced as a whole: a server
    that is killed leaves the old one or the new one, and what another server writes there is seen. Files that are none
    of ours are left alone."""

    def __init__(self, folder: Path | None = None) -> None:
        """Raises OSError where the folder cannot be made."""
        self._folder = folder
        self._heads: OrderedDict[str, Head] = OrderedDict()
        self._bodies: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        if folder is not None:
            make_private_folder(folder)
            make_private(folder)
            self._clean(folder)
            self._look()

    def _clean(self, folder: Path) -> None:
        """Remove what a server that was killed was writing, and take everybody else's access to the files away."""
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if _TEMPORARY.fullmatch(path.name) and path.lstat().st_mtime < time.time() - _STALE:
                    path.unlink()
                elif _FILE.fullmatch(path.name):
                    make_private(path)

    def _look(self) -> None:
        """Takes note of all files that are there, in the order in which they were written."""
        if self._folder is None:
            return
        found = {}
        for entry in os.scandir(self._folder):
            if (match := _FILE.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    found[match[1]] = entry.stat().st_mtime_ns
        for name in self._heads.keys() - found.keys():
            self._lose(name)
        for name in sorted(found.keys() - self._heads.keys(), key=found.__getitem__):
            self._enter(name)

    def _enter(self, name: str) -> None:
        """Reads the head of a file that may be there, and may hold anything."""
        path = self._path(name)
        with contextlib.suppress(ValueError, OSError), os.fdopen(open_regular(path), "rb") as file:
            head = parse_json(file.readline(1 << 20))
            if isinstance(head, dict):
                self._heads[name], self._sizes[name] = head, path.stat().st_size

    def _lose(self, name: str) -> None:
        self._heads.pop(name, None)
        self._sizes.pop(name, None)
        self._bodies.pop(name, None)

    def heads(self) -> dict[str, Head]:
        """All heads by name, the one used longest ago first."""
        self._look()
        return dict(self._heads)

    def head(self, name: str) -> Head | None:
        """The head of a document, if there is one."""
        if self._folder is not None:
            self._enter(name)
        return self._heads.get(name)

    def put(self, name: str, head: Head, body: Any) -> list[Head]:
        """Keeps a document, in place of another of its name. Returns the heads of those that were forgotten for it.
        Raises OSError where it cannot be written."""
        content = (json.dumps(head, ensure_ascii=True) + "\n" + json.dumps(body, ensure_ascii=True)).encode()
        if self._folder is None:
            self._bodies[name] = content
        else:
            _replace(self._path(name), content)
        self._heads[name], self._sizes[name] = head, len(content)
        self._heads.move_to_end(name)
        forgotten = []
        while len(self._heads) > MOST or sum(self._sizes.values()) > MOST_BYTES[self._folder is not None]:
            oldest = next(iter(self._heads))
            forgotten.append(self._heads[oldest])
            self.delete(oldest)
        return forgotten

    def body(self, name: str) -> Any:
        """The body of a document; None where there is none, or its file is damaged."""
        if self.head(name) is None:
            return None
        self._heads.move_to_end(name)
        try:
            if self._folder is None:
                content = self._bodies[name]
            else:
                with os.fdopen(open_regular(self._path(name)), "rb") as file:
                    content = file.read()
            return parse_json(content.partition(b"\n")[2])
        except (OSError, ValueError):
            return None

    def delete(self, name: str) -> None:
        """Forgets a document. Nothing happens where there is none."""
        self._lose(name)
        if self._folder is not None:
            for path in (self._path(name), *self._folder.glob(f"{name}.*.tmp")):
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / (name + _SUFFIX)


def _replace(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    temporary = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.tmp")
    try:
        with os.fdopen(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
