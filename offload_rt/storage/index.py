"""In-memory index of the files of a store: sizes, eviction order, pins and time to live. It opens no file."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .policies import EvictionOrder

DOCUMENTS, BEFORE = ".doc", ".before"
"""Suffixes of files that are never evicted: documents and their previous generations."""

_STAYING = (DOCUMENTS, BEFORE)


@dataclass
class _File:
    """Size of a file in bytes, and its last use (fifo: creation) in nanoseconds since 1970."""

    size: int
    used: int


class DiskIndex:
    """Index files by path, in the eviction order of `policy`.

    Time stamps increase monotonically, so a clock that goes backwards does not change the order. Time stamps in the
    future are replaced by the current time. Thread-safe: callers hold `mutex` to combine several calls.

    Args:
        limit_bytes: Maximum total size; None for no limit.
        policy: One of `LIVE_POLICIES`.
        ttl: Seconds after the last use when a file expires. Expired files are removed when space is made.
        clock: Returns nanoseconds since 1970.
    """

    def __init__(self, limit_bytes: int | None, policy: str, ttl: float | None, clock: Callable[[], int]) -> None:
        self.limit_bytes = limit_bytes
        self.files: dict[Path, _File] = {}
        self.reserved = 0
        self._renew = policy != "fifo"
        self._order = EvictionOrder[Path](policy)
        self._ttl, self._clock = ttl, clock
        self._pins: Counter[Path] = Counter()
        self._wanted: set[Path] = set()
        self._stored = 0
        self._stamp = 0
        self.mutex = threading.RLock()

    @property
    def bytes_used(self) -> int:
        return self._stored + self.reserved

    def __contains__(self, path: Path) -> bool:
        return path in self.files

    def load(self, found: Iterable[tuple[int, Path, int]]) -> list[Path]:
        """Add existing files, given as (modification time, path, size) in any order.

        Returns the files with a modification time in the future. They count as used now, and the caller updates their
        modification time (`write_stamp`).
        """
        now, ahead = self._clock(), []
        for used, path, size in sorted(found, key=lambda one: (one[0], str(one[1]))):
            self._stamp = used if used <= now else max(now, self._stamp + 1)
            if used > now:
                ahead.append(path)
            self.files[path] = _File(size, self._stamp)
            self._order.enter(path)
            self._stored += size
        return ahead

    def enter(self, path: Path, size: int) -> None:
        with self.mutex:
            self.forget(path)
            self.files[path] = _File(size, 0)
            self._stored += size
            self._order.enter(path)
            if path in self._wanted:
                self._order.expect(path)
            self._mark(path)

    def use(self, paths: Sequence[Path]) -> None:
        """Mark files as used now.

        Files at the end of `paths` are evicted before files at its start. The fifo policy ignores uses.
        """
        with self.mutex:
            for path in reversed(paths):
                if self._renew and path in self.files:
                    self._order.enter(path)
                    self._mark(path)

    def forget(self, path: Path) -> None:
        with self.mutex:
            if (file := self.files.pop(path, None)) is not None:
                self._stored -= file.size
                self._order.leave(path)

    def window(self, paths: Sequence[Path]) -> None:
        """Set the files that waiting requests will use, soonest first.

        With "lookahead", they are evicted last, in reverse order.
        """
        with self.mutex:
            self._wanted = set(paths)
            for path in self._order.window(paths):
                self._mark(path)

    def pin(self, paths: Iterable[Path]) -> None:
        """Exclude `paths`, known or not, from `victims`. Pins are counted; each needs one `unpin`."""
        with self.mutex:
            self._pins.update(paths)

    def unpin(self, paths: Iterable[Path]) -> None:
        with self.mutex:
            self._pins.subtract(Counter(paths))
            self._pins += Counter()

    def victims(self, size: int, *, pinned: bool = False) -> list[Path] | None:
        """Return the files to evict so that `size` more bytes fit.

        Expired files come first, then the others in eviction order. Documents are never evicted.

        Args:
            size: Bytes needed.
            pinned: Also evict pinned files, if nothing else is left.

        Returns:
            The files to evict, or None if evicting all candidates is not enough.
        """
        horizon = self._clock() - int(self._ttl * 1e9) if self._ttl is not None else -1
        used, limit = self.bytes_used + size, self.limit_bytes
        gone, spared = [], []
        for path in self._order.ranked():
            file = self.files[path]
            if (limit is None or used <= limit) and (file.used >= horizon or self._order.wants(path)):
                break
            if path.suffix in _STAYING or self._pins[path]:
                spared.append(path)
                continue
            gone.append(path)
            used -= file.size
        for path in spared if pinned else []:
            if limit is not None and used > limit and path.suffix not in _STAYING:
                gone.append(path)
                used -= self.files[path].size
        return gone if limit is None or used <= limit else None

    def blocks(self) -> list[tuple[Path, int]]:
        """Return the block files and their sizes in bytes, in eviction order. Pinned files come last."""
        ranked = sorted(self._order.ranked(), key=lambda path: self._pins[path] > 0)
        return [(path, self.files[path].size) for path in ranked if path.suffix not in _STAYING]

    def check_integrity(self) -> None:
        assert self.reserved >= 0
        assert self.limit_bytes is None or self.bytes_used <= self.limit_bytes
        ranked = list(self._order.ranked())
        assert len(ranked) == len(self.files) and set(ranked) == set(self.files)
        stamps = [self.files[path].used for path in ranked if self.files[path].used and not self._order.wants(path)]
        assert stamps == sorted(stamps), "not in order of use"
        assert self._stored == sum(file.size for file in self.files.values())

    def _mark(self, path: Path) -> None:
        self._stamp = max(self._clock(), self._stamp + 1)
        self.files[path].used = self._stamp
        self.write_stamp(path)

    def write_stamp(self, path: Path) -> None:
        """Set the modification time of a file to its last use."""
        used = self.files[path].used
        with contextlib.suppress(OSError):
            os.utime(path, ns=(used, used), follow_symlinks=False)
