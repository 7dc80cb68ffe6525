"""Engines of one host pool, each driven by a thread of its own: where one finds the pool full and nothing of its own
could make room, it waits for what the others will free."""

from __future__ import annotations

import threading
import time
from typing import Protocol
from weakref import WeakSet, ref

PATIENCE = 5.0
"""Seconds after its last step for which an engine counts as going on: one that nobody drives, such as a stream whose
reader does something else, frees nothing."""

WAITS = (0.002, 0.1)
"""Seconds between two looks at a full pool, the first and the longest: each takes the turn of those who compute."""


class Holder(Protocol):
    """What may hold chunks while it runs: a scheduler."""

    @property
    def holds(self) -> bool:
        """Whether something of it is computed."""
        ...


class Neighbours:
    """The engines of one host pool: made beside it, and handed on to every runner of that pool."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._all: WeakSet[Neighbour] = WeakSet()

    def join(self, holder: Holder) -> Neighbour:
        """One more engine, of which `holder` has what runs."""
        neighbour = Neighbour(self, holder)
        with self._mutex:
            self._all.add(neighbour)
        return neighbour

    def everyone(self) -> list[Neighbour]:
        """All engines that there are now."""
        with self._mutex:
            return list(self._all)


class Neighbour:
    """One engine among those of its pool. Everything but its making is done with the pool's lock held."""

    def __init__(self, neighbours: Neighbours, holder: Holder) -> None:
        self._neighbours, self._holder = neighbours, ref(holder)  # which has this one
        self._thread, self._last, self._looks = 0, -PATIENCE, 0

    def stepped(self) -> None:
        """Its engine has taken a step."""
        self._thread, self._last = threading.get_ident(), time.monotonic()

    def may_free(self) -> bool:
        """Whether another thread's engine goes on with something, whose chunks will be free. If so, another look at the
        pool was in vain."""
        now, thread = time.monotonic(), threading.get_ident()
        others = [one for one in self._neighbours.everyone() if one._thread != thread and now - one._last < PATIENCE]
        found = any(holder.holds for one in others if (holder := one._holder()) is not None)
        self._looks = self._looks + 1 if found else 0
        return found

    def found_room(self) -> None:
        """There was room, or it is no longer wanted."""
        self._looks = 0

    def wait(self) -> None:
        """Without the lock: waits where the last look was in vain, a little longer each time."""
        first, longest = WAITS
        if self._looks:
            time.sleep(min(longest, first * 2 ** min(self._looks, 16)))
