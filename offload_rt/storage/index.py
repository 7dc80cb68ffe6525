"""In-memory index of a store's files, with their sizes, eviction order, pins and time to live. It opens no files."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..core import BLOCK_SIZE
from .policies import EvictionOrder, recomputation_cost

DOCUMENTS, BEFORE = ".doc", ".before"
"""Suffixes of files that are never evicted: documents and their previous generations."""

_STAYING = (DOCUMENTS, BEFORE)

NS_PER_TOKEN = 10**9
"""How much later a file is evicted per token of recomputation cost, in nanoseconds.

With one second per token, the KV of a conversation with 5,000 tokens is kept longer than the KV of a request with 300
tokens, even if the request came an hour later.
"""

LONGEST_KEEP = 30 * 86400 * 10**9
"""Maximum difference in nanoseconds between rank and last use, for files that exist when the store is opened."""


@dataclass
class _File:
    """Index entry of a file. Times are in nanoseconds since 1970.

    Attributes:
        last_used: Time of the last use. With the policy "fifo", this is the time of creation.
        rank: Position in the eviction order (see `DiskIndex`).
        marked: Whether the file contains a prompt mark, or None if this is not known yet.
        has_header: Whether a valid block header was found in the file.
    """

    size: int
    last_used: int
    rank: int
    marked: bool | None = None
    has_header: bool = False


class DiskIndex:
    """Index of a store's files, in the eviction order of `policy`.

    Files with the lowest rank are evicted first. With "lookahead", the rank is the time of the last use plus
    `NS_PER_TOKEN` per token of recomputation cost. In the file system, the modification time of a file stores the last
    use, and the access time stores the rank. Timestamps always increase, even if the clock is set back.

    Thread-safe. To make several calls atomic, hold `mutex`.

    Args:
        limit_bytes: Maximum total size of the files, or None for no limit.
        policy: One of `LIVE_POLICIES`.
        ttl: Seconds from the last use until a file expires, or None if files never expire. Expired files are removed
            when space is needed.
        clock: Function that returns the time in nanoseconds since 1970.
    """

    def __init__(self, limit_bytes: int | None, policy: str, ttl: float | None, clock: Callable[[], int]) -> None:
        self.limit_bytes = limit_bytes
        self.files: dict[Path, _File] = {}
        self.reserved = 0
        self._renew, self._weighs = policy != "fifo", policy == "lookahead"
        self._order = EvictionOrder[Path](policy)
        self._ttl, self._clock = ttl, clock
        self._pins: Counter[Path] = Counter()
        self._stored = 0
        self._stamp = 0
        self.mutex = threading.RLock()

    @property
    def bytes_used(self) -> int:
        return self._stored + self.reserved

    def __contains__(self, path: Path) -> bool:
        return path in self.files

    def load(self, found: Iterable[tuple[int, Path, int, int]]) -> list[Path]:
        """Add existing files, given as (modification time, path, size, access time), in any order.

        Return the files whose modification time is in the future. For these, the index uses the current time instead,
        and the caller must store it with `write_stamp`.
        """
        now, ahead = self._clock(), []
        for used, path, size, accessed in sorted(found, key=lambda one: (one[0], str(one[1]))):
            self._stamp = used if used <= now else max(now, self._stamp + 1)
            if used > now:
                ahead.append(path)
            # If the last use is corrected, shift the rank by the same amount, so that the delay stays the same.
            keep = self._stamp + (min(max(accessed - used, 0), LONGEST_KEEP) if self._weighs else 0)
            self.files[path] = _File(size, self._stamp, keep)
            self._order.add(path, keep)
            self._stored += size
        return ahead

    def add(self, path: Path, size: int, cost: int = 0) -> None:
        """Add a file and mark it as used now. `cost` is its recomputation cost in tokens."""
        with self.mutex:
            self.remove(path)
            self.files[path] = _File(size, 0, 0)
            self._stored += size
            self._mark(path, cost)

    def mark_used(self, paths: Sequence[Path]) -> None:
        """Mark the block files of a sequence as used now. `paths` must be in the order of the blocks.

        Later blocks are evicted before earlier blocks. With the policy "fifo", this has no effect.
        """
        tokens = len(paths) * BLOCK_SIZE
        with self.mutex:
            for i, path in reversed(list(enumerate(paths))):
                if self._renew and path in self.files:
                    self._mark(path, recomputation_cost(tokens, i * BLOCK_SIZE))

    def remove(self, path: Path) -> None:
        with self.mutex:
            if (file := self.files.pop(path, None)) is not None:
                self._stored -= file.size
                self._order.remove(path)

    def set_window(self, paths: Sequence[Path]) -> None:
        """Set which files waiting requests will use, in the order of the requests. These files are evicted last."""
        with self.mutex:
            for path in self._order.set_window(paths):
                self._mark(path)

    def pin(self, paths: Iterable[Path]) -> None:
        """Protect `paths` from eviction, even if the files do not exist yet. Each call needs a matching `unpin`."""
        with self.mutex:
            self._pins.update(paths)

    def unpin(self, paths: Iterable[Path]) -> None:
        with self.mutex:
            self._pins.subtract(Counter(paths))
            self._pins += Counter()

    def victims(self, size: int, *, pinned: bool = False, cost: int | None = None) -> list[Path] | None:
        """Return the files to evict so that `size` more bytes fit, or None if this is not possible.

        Expired files come first, followed by all other files in eviction order. Documents are never evicted.

        Args:
            pinned: Whether pinned files may also be evicted once no other files are left.
            cost: Recomputation cost of the new file in tokens, or None if it is a document. With "lookahead", a new
                block file does not evict files that have a higher rank.
        """
        horizon = self._clock() - int(self._ttl * 1e9) if self._ttl is not None else -1
        used, limit = self.bytes_used + size, self.limit_bytes
        # The time stamp of the new file must also be later than all earlier ones.
        now = max(self._clock(), self._stamp + 1)
        rank = None if cost is None or not self._weighs else now + cost * NS_PER_TOKEN
        gone, spared = dict[Path, None](), []
        for path in self._expired(horizon):
            gone[path] = None
            used -= self.files[path].size
        for path in self._order.ranked():
            file = self.files[path]
            if (
                limit is None
                or used <= limit
                or (rank is not None and file.rank > rank and not self._order.in_window(path))
            ):
                break
            if path.suffix in _STAYING or self._pins[path]:
                spared.append(path)
            elif path not in gone:
                gone[path] = None
                used -= file.size
        for path in spared if pinned else []:
            if limit is not None and used > limit and path.suffix not in _STAYING:
                gone[path] = None
                used -= self.files[path].size
        return list(gone) if limit is None or used <= limit else None

    def _expired(self, horizon: int) -> Iterator[Path]:
        for path, file in self.files.items():  # sorted by last use
            if file.last_used >= horizon:
                return
            if path.suffix not in _STAYING and not self._pins[path] and not self._order.in_window(path):
                yield path

    def blocks(self) -> list[tuple[Path, int]]:
        """Return the block files and their sizes in bytes, in eviction order, but with pinned files last."""
        ranked = sorted(self._order.ranked(), key=lambda path: self._pins[path] > 0)
        return [(path, self.files[path].size) for path in ranked if path.suffix not in _STAYING]

    def check_integrity(self) -> None:
        assert self.reserved >= 0
        assert self.limit_bytes is None or self.bytes_used <= self.limit_bytes
        ranked = list(self._order.ranked())
        assert len(ranked) == len(self.files) and set(ranked) == set(self.files)
        ranks = [self.files[path].rank for path in ranked if not self._order.in_window(path)]
        assert ranks == sorted(ranks), "not in eviction order"
        uses = [file.last_used for file in self.files.values()]
        assert uses == sorted(uses), "not in order of use"
        assert self._stored == sum(file.size for file in self.files.values())

    def _mark(self, path: Path, cost: int = 0) -> None:
        self._stamp = max(self._clock(), self._stamp + 1)
        file = self.files.pop(path)
        # If a shorter sequence uses only the first blocks of a longer one, these blocks keep the higher rank.
        keep = max(file.rank, self._stamp + cost * NS_PER_TOKEN) if self._weighs else self._stamp
        self.files[path] = replace(file, last_used=self._stamp, rank=keep)
        self._order.add(path, keep)
        self.write_stamp(path)

    def write_stamp(self, path: Path) -> None:
        file = self.files[path]
        with contextlib.suppress(OSError):
            os.utime(path, ns=(file.rank, file.last_used), follow_symlinks=False)
