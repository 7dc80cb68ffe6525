"""Summaries of document files, kept as long as the files do not change.

A deletion needs the block keys of all sessions. Without this cache, it would read all histories again each time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from .block_store import Summarise, Summary
from .files import read_document

_SETTLED_NS = 2 * 10**9
"""Minimum age of a change, in nanoseconds, before the file is cached. A later change then has another time."""


@dataclass(frozen=True)
class Known:
    """The summary of an intact file. None means that the file is not a session history."""

    summary: Summary | None


class SummaryCache:
    """Cache of summaries by path and identity of the file. Thread-safe, because each entry is replaced as a whole."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], Known]] = {}

    def of(self, path: Path, summarise: Summarise) -> Known | None:
        """Return the summary of a file, or None if the file is damaged or does not exist."""
        try:
            status = path.lstat()
        except OSError:
            self._known.pop(path, None)
            return None
        # Copying or restoring a file can preserve its mtime, but not its ctime.
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        before, known = self._known.get(path, ((), None))
        if before == identity and known is not None:
            return known
        data = read_document(path).data
        if data is None:
            self._known.pop(path, None)
            return None
        known = Known(summarise(data))
        if time.time_ns() - status.st_ctime_ns > _SETTLED_NS:
            self._known[path] = identity, known
        return known
