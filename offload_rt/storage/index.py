"""Which files of a store count, how many bytes they have, and which leave when room is needed. No file is opened."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .policies import Order, make_live_order

DOCUMENTS, BEFORE = ".doc", ".before"
"""Suffixes of files that never leave by themselves: documents, and what they were before."""

_STAYING = (DOCUMENTS, BEFORE)


@dataclass
class _File:
    """A file that counts: its size in bytes, and when it was last used (fifo: written), in nanoseconds since 1970."""

    size: int
    used: int


class DiskIndex:
    """Files by path, in the order of `policy`. Stamps only ever grow, so that a clock that goes backwards disturbs
    nothing; what seems to come from the future counts as used now. Not thread-safe: the store's lock guards it."""

    def __init__(self, limit_bytes: int | None, policy: str, ttl: float | None, clock: Callable[[], int]) -> None:
        """ttl: seconds since the last use after which a file leaves when room is made; clock: nanoseconds."""
        self.limit_bytes = limit_bytes
        self.files: dict[Path, _File] = {}
        self.reserved = 0
        self._renew = policy != "fifo"
        self._order: Order[Path] = make_live_order(policy)
        self._ttl, self._clock = ttl, clock
        self._pins: Counter[Path] = Counter()
        self._wanted: set[Path] = set()
        self._stored = 0
        self._stamp = 0

    @property
    def bytes_used(self) -> int:
        """Bytes of all files, those being written at their full size."""
        return self._stored + self.reserved

    def __contains__(self, path: Path) -> bool:
        return path in self.files

    def load(self, found: Iterable[tuple[int, Path, int]]) -> list[Path]:
        """Enters files that were there before: (time of modification, path, size), in any order. Returns those that
        seem to come from the future: they count as used now, one after the other (`write_stamp`)."""
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
        """A file was written."""
        self.forget(path)
        self.files[path] = _File(size, 0)
        self._stored += size
        self._order.enter(path)
        if path in self._wanted:
            self._order.expect(path, 0)
        self._mark(path)

    def use(self, path: Path) -> None:
        """A file was used; unknown ones are ignored."""
        if self._renew and path in self.files:
            self._order.enter(path)
            self._mark(path)

    def forget(self, path: Path) -> None:
        """A file is gone."""
        if (file := self.files.pop(path, None)) is not None:
            self._stored -= file.size
            self._order.leave(path)

    def window(self, paths: Sequence[Path]) -> None:
        """Takes note that waiting requests will use `paths`, soonest first: they leave last, from the end on."""
        self._wanted = set(paths)
        for path in self._order.window(paths):
            self._mark(path)

    def pin(self, paths: Iterable[Path]) -> None:
        """`victims` spares `paths`, known or not, until as many `unpin`."""
        self._pins.update(paths)

    def unpin(self, paths: Iterable[Path]) -> None:
        """Takes a pin back."""
        self._pins.subtract(Counter(paths))
        self._pins += Counter()

    def victims(self, size: int, *, pinned: bool = False) -> list[Path] | None:
        """Returns what has to leave so that `size` more bytes fit: what is too old, then the next ones in order. With
        `pinned` also pinned ones, if nothing else is left; never documents. Returns None where that is not enough."""
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

    def chunks(self) -> list[tuple[Path, int]]:
        """Returns the files that are no documents with their sizes in bytes, the next to leave first, pinned ones after
        the others."""
        ranked = sorted(self._order.ranked(), key=lambda path: self._pins[path] > 0)
        return [(path, self.files[path].size) for path in ranked if path.suffix not in _STAYING]

    def check_integrity(self) -> None:
        """Asserts that counts, order and limit agree."""
        assert self.reserved >= 0
        assert self.limit_bytes is None or self.bytes_used <= self.limit_bytes
        ranked = list(self._order.ranked())
        assert len(ranked) == len(self.files) and set(ranked) == set(self.files)
        stamps = [self.files[path].used for path in ranked if self.files[path].used and not self._order.wants(path)]
        assert stamps == sorted(stamps), "not in order of use"
        assert self._stored == sum(file.size for file in self.files.values())

    def _mark(self, path: Path) -> None:
        """Used now, also for whoever scans the folder later."""
        self._stamp = max(self._clock(), self._stamp + 1)
        self.files[path].used = self._stamp
        self.write_stamp(path)

    def write_stamp(self, path: Path) -> None:
        """The file's time becomes the one that it counts as used at."""
        used = self.files[path].used
        with contextlib.suppress(OSError):
            os.utime(path, ns=(used, used), follow_symlinks=False)
