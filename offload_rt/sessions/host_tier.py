"""Evict sessions from host memory and prefetch them from disk (CachedAttention §3.3).

As in the paper, sessions are evicted and prefetched as a whole. KV in host memory is also on disk or is being written
there, so eviction needs no copy. KV that is evicted from the disk must be computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ..errors import PoolFullError
from ..storage.policies import EvictionOrder, eviction_window, prefetch_window
from .context import SessionContext
from .session_kv import SessionKV

T = TypeVar("T")


@dataclass
class TierStats:
    """Statistics of the turns of a store. They show where the KV of earlier tokens was when each turn started.

    If a turn starts again, it is counted again.

    Attributes:
        host_tokens: Tokens whose KV was in host memory.
        disk_tokens: Tokens whose KV was loaded from disk for the turn.
        computed_tokens: Tokens whose KV was lost, so that the turn had to compute it again.
        fetched: Number of times that a session was prefetched from disk before its turn.
        fetched_tokens: Tokens of prefetched sessions. After a complete prefetch, they also count as `host_tokens`.
        evicted: Number of times that a session was evicted from host memory.
        stall_seconds: Total time, in seconds, that prefills waited for KV from disk.
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
        """Count one turn.

        Args:
            computed: Number of tokens whose KV was computed by earlier turns.
            known: Number of earlier tokens whose KV is in host memory or on disk.
            loaded: Number of earlier tokens whose KV is only on disk.
        """
        self.turns += 1
        self.host_tokens += known - loaded
        self.disk_tokens += loaded
        self.computed_tokens += max(0, computed - known)


class HostTier:
    """Moves the KV of idle ("parked") sessions between host memory and disk.

    `options.policy` sets the eviction order. With the policy "lookahead", the queue of turns determines it:

    * The sessions of the first L_ew queued turns are evicted last, in reverse order of the queue. L_ew = (C_mem +
      C_disk) / S_kv, where C_mem and C_disk are the capacities of memory and disk, and S_kv is the mean size of a
      session.
    * Before every step, `look_ahead` evicts sessions until the fraction `options.free_host` of the pool is free. It
      then loads the sessions of the next L_pw = C_free / S_kv queued turns, one at a time, while other sessions
      compute.
    """

    def __init__(self, context: SessionContext) -> None:
        self._runner, self._pool, self._storage = context.runner, context.runner.pool, context.storage
        self._options, self._clock = context.options, time.monotonic
        self._order = EvictionOrder[SessionKV](context.options.policy)
        self._since: dict[SessionKV, float] = {}
        self._waiting: tuple[SessionKV, ...] = ()
        self._fetching: SessionKV | None = None
        self.stats = TierStats()

    @property
    def parked(self) -> list[SessionKV]:
        """Idle sessions, beginning with the one that will be evicted first."""
        return list(self._order.ranked())

    @property
    def free_bytes(self) -> int:
        """Size in bytes of free host memory, including blocks that only the prefix tree uses."""
        return (self._pool.free_blocks + self._pool.idle_blocks) * self._pool.block_bytes

    def windows(self, waiting: Sequence[SessionKV]) -> tuple[int, int]:
        """Return how many queued sessions to load (L_pw) and to keep (L_ew). If the disk has no limit, keep all."""
        sizes = [kv.pool_bytes for kv in {*waiting, *self._since} if kv.pool_bytes]
        mean = sum(sizes) / len(sizes) if sizes else 0.0
        # At least one session is prefetched, because `_fetch` evicts other sessions for it.
        fetching = max(1, prefetch_window(self.free_bytes, mean))
        if self._options.limit is None:
            return fetching, len(waiting)
        host = self._pool.block_count * self._pool.block_bytes
        return fetching, eviction_window(host, self._options.limit, mean)

    # ----------------------------------------------------------------------------------------- eviction and prefetching

    def park(self, kv: SessionKV) -> None:
        """Mark a session as idle, so that it may be evicted from host memory."""
        if kv.sequence is not None:
            self._order.add(kv)
            self._since[kv] = self._clock()
            self._order.set_window(self._waiting)

    def unpark(self, kv: SessionKV) -> None:
        """Mark a session as no longer idle, before it is used or closed."""
        if self._since.pop(kv, None) is not None:
            self._order.remove(kv)
        if self._fetching is kv:
            self._fetching = None

    @contextmanager
    def unparked(self, kv: SessionKV) -> Iterator[None]:
        self.unpark(kv)
        try:
            yield
        finally:
            self.park(kv)

    def retry_after_reclaim(self, action: Callable[[], T]) -> T:
        """Return the result of `action`. If it raises PoolFullError, evict a session and try again.

        Parked sessions of this store are evicted first, even if the disk has no space for their KV. Sessions of other
        stores follow (see `Runner.retry_after_reclaim`). The session that `action` uses must not be parked. Raises
        PoolFullError when there is no session left to evict.
        """
        while self._since:
            try:
                return action()
            except PoolFullError:
                self._evict(self._order.first())
        return self._runner.retry_after_reclaim(action)

    def reclaim(self) -> bool:
        """Evict the first parked session whose KV is on disk or can be written there. Return False if there is none."""
        # KV that does not fit on disk may be evicted only for turns of this store (`retry_after_reclaim`).
        for kv in self.parked:
            if not kv.write_out():
                self._evict(kv)
                return True
        return False

    def look_ahead(self, waiting: Sequence[SessionKV]) -> None:
        """Evict expired sessions, and make room for the `waiting` turns. Call this before every step.

        The sessions of the first L_ew turns (see the class) never expire.
        """
        self._expire()
        if self._options.policy != "lookahead":
            return
        fetching, sparing = self.windows(waiting)
        spared = tuple(waiting[:sparing])
        if spared != self._waiting:
            self._waiting = spared
            self._order.set_window(spared)
            self._storage.expect([key for kv in spared for key in kv.history.block_keys])
        self._keep_free(waiting[:fetching])
        self._fetch(waiting[:fetching])

    def _evict(self, kv: SessionKV) -> None:
        self.unpark(kv)
        kv.evict()
        self.stats.evicted += 1

    def _expire(self) -> None:
        if self._options.ttl is not None:
            horizon = self._clock() - self._options.ttl
            for kv in [kv for kv, since in self._since.items() if since < horizon]:
                if not self._order.in_window(kv):
                    self._evict(kv)

    def _keep_free(self, soon: Sequence[SessionKV]) -> None:
        buffer = self._options.free_host * self._pool.block_count * self._pool.block_bytes
        while self.free_bytes < buffer and self._since:
            if (victim := self._order.first()) in soon:
                return
            self._evict(victim)

    def _fetch(self, soon: Sequence[SessionKV]) -> None:
        """Start loading the first session of `soon` that is not in host memory, unless another one is being loaded."""
        if self._fetching is not None:
            if self._fetching.loader is not None and not self._fetching.loader.ended:
                return
            self._fetching = None
        for i, kv in enumerate(soon):
            if kv.sequence is not None or not kv.history.keys:
                continue
            while kv.pool_bytes > self.free_bytes:
                victim = next(self._order.ranked(), None)
                if victim is None or victim in soon[:i]:
                    return
                self._evict(victim)
            try:
                kv.fetch(all_layers=True)
            except PoolFullError:  # the size estimate ignores the last block, and evicted sessions may share blocks
                return
            if kv.loader is not None:
                self._fetching = kv
                self.stats.fetched += 1
                self.stats.fetched_tokens += kv.loaded_tokens
            self.park(kv)
            return

    def check_integrity(self) -> None:
        parked = set(self._order.ranked())
        assert parked == set(self._since)
        assert all(kv.sequence is not None for kv in parked)
