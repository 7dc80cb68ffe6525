"""Which sessions of a store are in host memory, and who comes and goes (CachedAttention §3.3).

An item is a session with all its rows, as in the paper. Everything in host memory is also on disk, or on its way there,
so that an item leaves at no cost; what leaves the disk is lost and computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..config import StoreOptions
from ..engine.runner import Runner
from ..errors import PoolFullError
from ..storage.disk_store import DiskStore
from ..storage.policies import Order, eviction_window, make_live_order, prefetch_window
from .session_kv import SessionRows, keys_of

T = TypeVar("T")


@dataclass
class TierStats:
    """Of all turns of a store so far (one that starts again counts again). Tokens: those before the new ones.

    host_tokens, disk_tokens: were in host memory when the turn began / came from disk while it began. computed_tokens:
    had been lost and were computed again. fetched: sessions that look-ahead brought from disk before their turn, and
    fetched_tokens theirs (counted under host_tokens too, if they had all arrived). evicted: sessions that left host
    memory for others. stall_seconds: waited for rows to come from disk, within prefills.
    """

    turns: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    computed_tokens: int = 0
    fetched: int = 0
    fetched_tokens: int = 0
    evicted: int = 0
    stall_seconds: float = 0.0

    def count(self, computed: int, known: int, loaded: int) -> None:
        """A turn has begun: of the `computed` tokens of its history host memory and disk had `known`, `loaded` of them
        the disk alone."""
        self.turns += 1
        self.host_tokens += known - loaded
        self.disk_tokens += loaded
        self.computed_tokens += max(0, computed - known)


class Tiers:
    """The sessions of one store that are parked in host memory: idle, with their rows, until somebody needs the room.

    Who leaves first is `options.policy`'s to say (`storage/policies.py`). With "lookahead" the engine tells before
    every step which sessions' turns are waiting: `look_ahead` then spares those of the eviction window in host memory
    and on disk (L_ew = (C_mem + C_disk) / S_kv, its tail leaving first), keeps `options.free_host` of the pool free,
    and brings the sessions of the prefetch window (L_pw = C_free / S_kv) from disk, one after the other, while others
    are computed.
    """

    def __init__(
        self, runner: Runner, disk: DiskStore, options: StoreOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._runner, self._pool = runner, runner.pool
        self._disk, self._options, self._clock = disk, options, clock
        self._order: Order[SessionRows] = make_live_order(options.policy)
        self._since: dict[SessionRows, float] = {}
        self._waiting: tuple[SessionRows, ...] = ()
        self._fetching: SessionRows | None = None
        self.stats = TierStats()

    @property
    def parked(self) -> list[SessionRows]:
        """Sessions that may leave, the next to leave first."""
        return list(self._order.ranked())

    @property
    def free_bytes(self) -> int:
        """Of host memory, that nobody holds: free, or kept by the prefix tree alone."""
        return (self._pool.free_chunks + self._pool.idle_chunks) * self._pool.chunk_bytes

    def windows(self, waiting: Sequence[SessionRows]) -> tuple[int, int]:
        """(prefetch window, eviction window) in sessions, by the paper's formulas. S_kv is the mean of those that are
        parked or wait; without a limit on the disk the eviction window has no end."""
        sizes = [rows.pool_bytes for rows in {*waiting, *self._since} if rows.pool_bytes]
        mean = sum(sizes) / len(sizes) if sizes else 0.0
        fetching = max(1, prefetch_window(self.free_bytes, mean))  # one always: others leave for it
        if self._options.limit is None:
            return fetching, len(waiting)
        host = self._pool.chunk_count * self._pool.chunk_bytes
        return fetching, eviction_window(host, self._options.limit, mean)

    # -------------------------------------------------------------------------------------------- sessions come and go

    def park(self, rows: SessionRows) -> None:
        """A session is idle; if it has rows in host memory they may leave from now on."""
        if rows.sequence is not None:
            self._order.enter(rows)
            self._since[rows] = self._clock()
            self._order.window(self._waiting)

    def take(self, rows: SessionRows) -> None:
        """A session is about to be used, or ends: its rows may not leave. Nothing happens if it is not parked."""
        if self._since.pop(rows, None) is not None:
            self._order.leave(rows)
        if self._fetching is rows:
            self._fetching = None

    def retry_after_reclaim(self, action: Callable[[], T]) -> T:
        """What `action` returns; where the pool has no room for it, parked sessions leave, one by one, until it has:
        this store's in its order, also those that the disk cannot take, then other stores'
        (`Runner.retry_after_reclaim`). The session that it is for must not be parked. Raises PoolFullError when nobody
        is left to leave."""
        while self._since:
            try:
                return action()
            except PoolFullError:
                self._evict(self._order.victim())
        return self._runner.retry_after_reclaim(action)

    def reclaim(self) -> bool:
        """The next parked session whose rows are all on disk, or can be written now, leaves; False where there is none:
        nobody loses rows to a request that is no turn of this store."""
        for rows in self.parked:
            if not rows.write_out():
                self._evict(rows)
                return True
        return False

    def look_ahead(self, waiting: Sequence[SessionRows]) -> None:
        """Sessions whose turns wait, soonest first, each once: to be told before every step. Parked sessions beyond
        their time to live leave in any case."""
        self._expire()
        if self._options.policy != "lookahead":
            return
        fetching, sparing = self.windows(waiting)
        spared = tuple(waiting[:sparing])
        if spared != self._waiting:
            self._waiting = spared
            self._order.window(spared)
            self._disk.expect([key for rows in spared for key in keys_of(rows.history)])
        self._keep_free(waiting[:fetching])
        self._fetch(waiting[:fetching])

    def _evict(self, rows: SessionRows) -> None:
        self.take(rows)
        rows.leave_host()
        self.stats.evicted += 1

    def _expire(self) -> None:
        if self._options.ttl is not None:
            horizon = self._clock() - self._options.ttl
            for rows in [rows for rows, since in self._since.items() if since < horizon]:
                if not self._order.wants(rows):
                    self._evict(rows)

    def _keep_free(self, soon: Sequence[SessionRows]) -> None:
        """Early eviction: a buffer stays free for fetching, at the expense of everybody but who is needed `soon`."""
        buffer = self._options.free_host * self._pool.chunk_count * self._pool.chunk_bytes
        while self.free_bytes < buffer and self._since:
            if (gone := self._order.victim()) in soon:
                return
            self._evict(gone)

    def _fetch(self, soon: Sequence[SessionRows]) -> None:
        """Begins to bring the first of `soon` that is not in host memory, when the one before has arrived."""
        if self._fetching is not None:
            if self._fetching.preload is not None and not self._fetching.preload.ended:
                return
            self._fetching = None
        for place, rows in enumerate(soon):
            if rows.sequence is not None or not rows.history.keys:
                continue
            while rows.pool_bytes > self.free_bytes:
                gone = next(self._order.ranked(), None)
                if gone is None or gone in soon[:place]:
                    return
                self._evict(gone)
            try:
                rows.fetch(whole=True)
            except (
                PoolFullError
            ):  # the last chunk of a block table is not counted, and a prefix may have been taken meanwhile
                return
            if rows.preload is not None:
                self._fetching = rows
                self.stats.fetched += 1
                self.stats.fetched_tokens += rows.loaded_tokens
            self.park(rows)
            return

    def check_integrity(self) -> None:
        """Asserts that who is parked has rows to give."""
        parked = set(self._order.ranked())
        assert parked == set(self._since)
        assert all(rows.sequence is not None for rows in parked)
