"""Order the requests of all engines that share a KV pool, so that engines never wait for each other in a cycle.

Requests are ordered by the time when they were added. An engine that runs out of memory preempts its requests and waits
until engines with older requests free memory. The engine that has the oldest request keeps its memory. While that
engine waits, no other engine admits requests, so the oldest request always finishes.
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

from ..errors import EngineError, PoolFullError
from .cache_manager import Reclaimable

PATIENCE = 5.0
"""After this many seconds without a step, an engine counts as abandoned, and other engines do not wait for its memory.

For example, its caller may have stopped reading a stream.
"""

RECHECK_SECONDS = 0.1
"""Interval, in seconds, at which a waiting engine checks again whether the pool is still full.

Polling is needed because sessions free memory without waking up the engine, and because other engines may become
abandoned.
"""


class PoolOrder:
    """Order of the requests of all engines that use one KV pool. The runners of these engines share this object."""

    def __init__(self) -> None:
        self._members: WeakSet[PoolMember] = WeakSet()
        self._mutex = threading.Lock()
        self._arrivals = itertools.count()
        self.changed = threading.Condition()
        self.times_freed = self.requests_ended = 0
        self.broken: EngineError | None = None
        """The error that stops all engines of the pool, or None."""
        self.reclaimables: list[Reclaimable] = []
        """Session stores of all engines. The KV that they keep in memory can be freed between requests."""

    def join(self, member: PoolMember) -> None:
        with self._mutex:
            self._members.add(member)

    def arrival(self) -> int:
        return next(self._arrivals)

    def members(self) -> list[PoolMember]:
        with self._mutex:
            return list(self._members)

    def freed(self, *, ended: bool) -> None:
        """Wake up engines that wait for memory. Called after a request has ended (`ended` is True) or was preempted."""
        with self.changed:
            self.times_freed += 1
            self.requests_ended += ended
            self.changed.notify_all()


class PoolMember(ABC):
    """An engine that shares a KV pool with other engines. `Scheduler` is the only subclass.

    Callers must hold the pool's lock for all methods except `stepping` and `wait`.
    """

    def __init__(self, order: PoolOrder) -> None:
        self.order = order
        self._thread, self._last_step, self._in_step = 0, -PATIENCE, False
        self._reserved_for: int | None = None
        self._paused_at: int | None = None
        self._seen: int | None = None

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Mark this engine as active during the `with` statement and for `PATIENCE` seconds after it."""
        self._thread, self._in_step, self._seen = threading.get_ident(), True, None
        try:
            yield
        finally:
            self._last_step, self._in_step = time.monotonic(), False

    @property
    @abstractmethod
    def uses_memory(self) -> bool:
        """Whether at least one request of this engine has started and therefore uses the pool."""

    @property
    @abstractmethod
    def oldest(self) -> int | None:
        """Lowest arrival number among this engine's requests."""

    @property
    def reserves_pool(self) -> bool:
        """Whether the pool is reserved for this engine's oldest request. Other engines then admit no requests."""
        return self._reserved_for is not None and self.oldest is not None and self.oldest <= self._reserved_for

    def wait_for_others(self) -> bool:
        """Return whether another engine may free memory. If so, `wait` will wait for it after this step.

        If no other engine has an older request, the pool is then reserved for this engine (see `reserves_pool`).
        """
        others = self._active_others()
        older = self._older(others)
        if not older and not any(other.uses_memory for other in others):
            return False
        if not older:
            self._reserved_for = self.oldest
        self._seen = self.order.times_freed
        return True

    def pause_admission(self) -> None:
        """Admit no more requests until some request of the pool has ended. They would only be preempted again."""
        self._paused_at, self._seen = self.order.requests_ended, self.order.times_freed

    def may_admit(self) -> bool:
        older = self._older(self._active_others())
        paused = older and self._paused_at == self.order.requests_ended
        if paused or any(other.reserves_pool for other in older):
            self._seen = None if self.uses_memory else self.order.times_freed
            return False
        self._paused_at = None
        return True

    def add_hint(self, error: PoolFullError) -> PoolFullError:
        """If other engines use the pool, return `error` with a hint about them in the message."""
        users = sum(one is not self and one.uses_memory for one in self.order.members())
        if not users:
            return error
        return type(error)(
            f"{error}; {users} unfinished streams or calls on this runtime use memory and are not being read: read "
            "them to the end or close them"
        )

    def wait(self) -> None:
        """If the step ran out of memory, wait until another engine frees some, but at most `RECHECK_SECONDS`.

        Call this without holding the pool's lock.
        """
        if (seen := self._seen) is not None:
            with self.order.changed:
                self.order.changed.wait_for(lambda: self.order.times_freed != seen, RECHECK_SECONDS)

    def _active_others(self) -> list[PoolMember]:
        """Return the engines of other threads that are in a step or were in one within the last `PATIENCE` seconds."""
        now, thread = time.monotonic(), threading.get_ident()
        return [
            one
            for one in self.order.members()
            if one._thread != thread and (one._in_step or now - one._last_step < PATIENCE)
        ]

    def _older(self, others: list[PoolMember]) -> list[PoolMember]:
        own = self.oldest
        return [one for one in others if own is not None and one.oldest is not None and one.oldest < own]
