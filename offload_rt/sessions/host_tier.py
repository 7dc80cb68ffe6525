"""Which sessions of a store are in host memory, and who comes and goes (CachedAttention §3.3).

An item is a session with all its rows, as in the paper. Everything in host memory is also on disk, or on its way there,
so that an item leaves at no cost; what leaves the disk is lost and computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..errors import PoolFullError
from ..storage.policies import Order, eviction_window, make_live_order, prefetch_window
from .context import SessionContext
from .session_kv import SessionKV

T = TypeVar("T")


@dataclass
class TierStats:
    """Where the tokens of all turns of a store came from so far (a turn that starts again counts again). Tokens are
    those before the new ones.

    host_tokens, disk_tokens: were in host memory when the turn began / came from disk while it began. computed_tokens:
    had been lost and were computed again. fetched: sessions that look-ahead brought from disk before their turn, and
    fetched_tokens theirs (counted under host_tokens too, if they had all arrived). evicted: sessions that left host
    memory for others. stall_seconds: waited for kv to come from disk, within prefills.
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


class HostTier:
    """The sessions of one store that are parked in host memory: idle, with their rows, until somebody needs the room.

    Who leaves first is `options.policy`'s to say (`storage/policies.py`). With "lookahead" the engine tells before
    every step which sessions' turns are waiting: `look_ahead` then spares those of the eviction window in host memory
    and on disk (L_ew = (C_mem + C_disk) / S_kv, its tail leaving first), keeps `options.free_host` of the pool free,
    and brings the sessions of the prefetch window (L_pw = C_free / S_kv) from disk, one after the other, while others
    are computed.
    """

    def __init__(self, context: SessionContext, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self._runner, self._pool, self._storage = context.runner, context.runner.pool, context.storage
        self._options, self._clock = context.options, clock
        self._order: Order[SessionKV] = make_live_order(context.options.policy)
        self._since: dict[SessionKV, float] = {}
        self._waiting: tuple[SessionKV, ...] = ()
        self._fetching: SessionKV | None = None
        self.stats = TierStats()

    @property
    def parked(self) -> list[SessionKV]:
        """The sessions that may leave host memory, the next to leave first."""
        return list(self._order.ranked())

    @property
    def free_bytes(self) -> int:
        """Bytes of host memory that nobody holds: free, or held by the prefix tree alone."""
        return (self._pool.free_chunks + self._pool.idle_chunks) * self._pool.chunk_bytes

    def windows(self, waiting: Sequence[SessionKV]) -> tuple[int, int]:
        """Returns (prefetch window, eviction window) in sessions, by the paper's formulas. S_kv is the mean of those
        that are parked or wait; without a limit on the disk the eviction window has no end."""
        sizes = [kv.pool_bytes for kv in {*waiting, *self._since} if kv.pool_bytes]
        mean = sum(sizes) / len(sizes) if sizes else 0.0
        fetching = max(1, prefetch_window(self.free_bytes, mean))  # one always: others leave for it
        if self._options.limit is None:
            return fetching, len(waiting)
        host = self._pool.chunk_count * self._pool.chunk_bytes
        return fetching, eviction_window(host, self._options.limit, mean)

    # -------------------------------------------------------------------------------------------- sessions come and go

    def park(self, kv: SessionKV) -> None:
        """Takes note that a session is idle: rows that it has in host memory may leave from now on."""
        if kv.sequence is not None:
            self._order.enter(kv)
            self._since[kv] = self._clock()
            self._order.window(self._waiting)

    def take(self, kv: SessionKV) -> None:
        """Takes note that a session is about to be used, or ends: its rows may not leave. Nothing happens if it is not
        parked."""
        if self._since.pop(kv, None) is not None:
            self._order.leave(kv)
        if self._fetching is kv:
            self._fetching = None

    def retry_after_reclaim(self, action: Callable[[], T]) -> T:
        """Returns what `action` returns; where the pool has no room for it, parked sessions leave, one by one, until it
        has: this store's in its order, also those that the disk cannot take, then other stores'
        (`Runner.retry_after_reclaim`). The session that it is for must not be parked. Raises PoolFullError when nobody
        is left to leave."""
        while self._since:
            try:
                return action()
            except PoolFullError:
                self._evict(self._order.victim())
        return self._runner.retry_after_reclaim(action)

    def reclaim(self) -> bool:
        """Evicts the next parked session whose rows are all on disk, or can be written now. Returns False where there
        is none: nobody loses rows to a request that is no turn of this store."""
        for kv in self.parked:
            if not kv.write_out():
                self._evict(kv)
                return True
        return False

    def look_ahead(self, waiting: Sequence[SessionKV]) -> None:
        """Prepares for the turns that wait: `waiting` are their sessions, soonest first, each once. It is called before
        every step. Parked sessions beyond their time to live leave in any case."""
        self._expire()
        if self._options.policy != "lookahead":
            return
        fetching, sparing = self.windows(waiting)
        spared = tuple(waiting[:sparing])
        if spared != self._waiting:
            self._waiting = spared
            self._order.window(spared)
            self._storage.expect([key for kv in spared for key in kv.history.chunk_keys])
        self._keep_free(waiting[:fetching])
        self._fetch(waiting[:fetching])

    def _evict(self, kv: SessionKV) -> None:
        self.take(kv)
        kv.leave_host()
        self.stats.evicted += 1

    def _expire(self) -> None:
        if self._options.ttl is not None:
            horizon = self._clock() - self._options.ttl
            for kv in [kv for kv, since in self._since.items() if since < horizon]:
                if not self._order.wants(kv):
                    self._evict(kv)

    def _keep_free(self, soon: Sequence[SessionKV]) -> None:
        """Evicts early, so that a buffer stays free for fetching, anybody but the sessions that are needed `soon`."""
        buffer = self._options.free_host * self._pool.chunk_count * self._pool.chunk_bytes
        while self.free_bytes < buffer and self._since:
            if (gone := self._order.victim()) in soon:
                return
            self._evict(gone)

    def _fetch(self, soon: Sequence[SessionKV]) -> None:
        """Begins to bring the first of `soon` that is not in host memory, when the one before has arrived."""
        if self._fetching is not None:
            if self._fetching.loader is not None and not self._fetching.loader.ended:
                return
            self._fetching = None
        for place, kv in enumerate(soon):
            if kv.sequence is not None or not kv.history.keys:
                continue
            while kv.pool_bytes > self.free_bytes:
                gone = next(self._order.ranked(), None)
                if gone is None or gone in soon[:place]:
                    return
                self._evict(gone)
            try:
                kv.fetch(whole=True)
            except PoolFullError:  # the last chunk of a block table is not counted, and another may have its prefix
                return
            if kv.loader is not None:
                self._fetching = kv
                self.stats.fetched += 1
                self.stats.fetched_tokens += kv.loaded_tokens
            self.park(kv)
            return

    def check_integrity(self) -> None:
        """Asserts that who is parked has rows to give."""
        parked = set(self._order.ranked())
        assert parked == set(self._since)
        assert all(kv.sequence is not None for kv in parked)
