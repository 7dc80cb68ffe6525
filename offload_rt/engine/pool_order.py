"""Coordinate engines that share a KV pool. An engine waits if it cannot free memory itself.

All requests of a pool are ordered by the time they were added. An engine that runs out of memory preempts its requests
and waits for engines with older requests. The engine with the oldest request keeps its memory, and no other engine
admits requests while it waits. Therefore the oldest request always finishes.
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
"""Seconds after its last step until an engine counts as abandoned.

The memory of an abandoned engine, such as a stream that is not read, will not be freed.
"""

RECHECK_SECONDS = 0.1
"""An engine checks a full pool again after this time, because sessions free memory too and engines may be abandoned."""


class PoolOrder:
    """The engines of one KV pool and the order of their requests. All runners of the pool share it."""

    def __init__(self) -> None:
        self._members: WeakSet[PoolMember] = WeakSet()
        self._mutex = threading.Lock()
        self._arrivals = itertools.count()
        self.changed = threading.Condition()
        self.frees = self.ends = 0
        self.broken: EngineError | None = None
        """Reason why no engine of the pool can continue, or None."""
        self.reclaimables: list[Reclaimable] = []
        """Holders of memory between requests: the session stores of all engines."""

    def join(self, member: PoolMember) -> None:
        with self._mutex:
            self._members.add(member)

    def arrival(self) -> int:
        """Return the arrival number of a new request. Lower numbers are older."""
        return next(self._arrivals)

    def members(self) -> list[PoolMember]:
        """Return all engines of the pool."""
        with self._mutex:
            return list(self._members)

    def freed(self, *, ended: bool) -> None:
        """Wake up engines that wait for memory, after a request was preempted or has `ended`."""
        with self.changed:
            self.frees += 1
            self.ends += ended
            self.changed.notify_all()


class PoolMember(ABC):
    """One engine of a pool: the base class of its scheduler.

    All methods except `stepping` and `wait` need the pool's lock.
    """

    def __init__(self, order: PoolOrder) -> None:
        self.order = order
        self._thread, self._last_step, self._in_step = 0, -PATIENCE, False
        self._claim: int | None = None
        self._gave_way_at: int | None = None
        self._seen: int | None = None

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Mark the engine as driven by this thread, until `PATIENCE` seconds after the block."""
        self._thread, self._in_step, self._seen = threading.get_ident(), True, None
        try:
            yield
        finally:
            self._last_step, self._in_step = time.monotonic(), False

    @property
    @abstractmethod
    def holds(self) -> bool:
        """Whether a request of this engine has started, so that it holds memory."""

    @property
    @abstractmethod
    def oldest(self) -> int | None:
        """The lowest arrival number of this engine's requests, or None if there are none."""

    @property
    def claims(self) -> bool:
        """Whether this engine's oldest request claims the pool. Until it ends, no other engine admits requests."""
        return self._claim is not None and self.oldest is not None and self.oldest <= self._claim

    def wait_for_others(self) -> bool:
        """Return whether another engine may free memory. If this engine has the oldest request, claim the pool."""
        others = self._driven_others()
        older = self._older(others)
        if not older and not any(other.holds for other in others):
            return False
        if not older:
            self._claim = self.oldest
        self._seen = self.order.frees
        return True

    def give_way(self) -> None:
        """Admit no requests until a request of the pool has ended. Earlier, they would only be preempted again."""
        self._gave_way_at, self._seen = self.order.ends, self.order.frees

    def may_admit(self) -> bool:
        """Return whether to admit requests. False after `give_way`, and while an older request claims the pool."""
        older = self._older(self._driven_others())
        waits = older and self._gave_way_at == self.order.ends
        if waits or any(other.claims for other in older):
            self._seen = None if self.holds else self.order.frees
            return False
        self._gave_way_at = None
        return True

    def describe(self, error: PoolFullError) -> PoolFullError:
        """Return `error` with a hint if abandoned engines hold memory."""
        holding = sum(one is not self and one.holds for one in self.order.members())
        if not holding:
            return error
        return type(error)(
            f"{error}; {holding} unfinished streams or calls on this runtime hold memory and are not being read: read "
            "them to the end or close them"
        )

    def wait(self) -> None:
        """Wait until another engine frees memory, if the last step found none. Called without the pool's lock."""
        if (seen := self._seen) is not None:
            with self.order.changed:
                self.order.changed.wait_for(lambda: self.order.frees != seen, RECHECK_SECONDS)

    def _driven_others(self) -> list[PoolMember]:
        """Return the engines that other threads drive."""
        now, thread = time.monotonic(), threading.get_ident()
        return [
            one
            for one in self.order.members()
            if one._thread != thread and (one._in_step or now - one._last_step < PATIENCE)
        ]

    def _older(self, others: list[PoolMember]) -> list[PoolMember]:
        """Return the engines in `others` whose oldest request is older than the oldest request of this engine."""
        mine = self.oldest
        return [one for one in others if mine is not None and one.oldest is not None and one.oldest < mine]
