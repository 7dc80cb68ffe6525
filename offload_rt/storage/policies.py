"""What leaves a tier of stored KV next: LRU, FIFO, CachedAttention's look-ahead (§3.3), and Belady's oracle.

One implementation for the live store (`index.py`, `sessions/host_tier.py`) and for the simulator. What is ordered is
anything hashable: a file, a session, a block of a trace.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, Literal, Protocol, TypeVar, get_args

from ..config import LIVE_POLICIES
from ..utils.config_fields import check_choice

StorePolicy = Literal["lookahead", "lru", "fifo", "belady"]
POLICIES: tuple[str, ...] = get_args(StorePolicy)
NEVER = 1 << 60
"""The next use of what is not used again."""

K = TypeVar("K", bound=Hashable)


def prefetch_window(free_bytes: int, mean_bytes: float) -> int:
    """Returns L_pw = C_mem / S_kv (§3.3.1): how many waiting requests are fetched ahead, from the bytes of host memory
    free for fetching and the mean bytes of a session's KV."""
    return int(free_bytes / mean_bytes) if mean_bytes > 0 else 0


def eviction_window(host_bytes: int, disk_bytes: int, mean_bytes: float) -> int:
    """Returns L_ew = (C_mem + C_disk) / S_kv (§3.3.2): of how many waiting requests eviction spares the KV."""
    return int((host_bytes + disk_bytes) / mean_bytes) if mean_bytes > 0 else 0


class Order(Protocol[K]):
    """Which item of one tier leaves next."""

    def enter(self, item: K, next_use: int = NEVER) -> None:
        """An item came, or was used; `next_use` is the request that will use it next (only Belady may look)."""
        ...

    def leave(self, item: K) -> None:
        """The item is gone."""
        ...

    def expect(self, item: K, request: int) -> None:
        """Waiting request number `request` came into the eviction window and will use the item."""
        ...

    def window(self, items: Sequence[K]) -> list[K]:
        """The eviction window is exactly `items` now, soonest needed first (those that are not here are ignored).
        Returns the items that left it."""
        ...

    def wants(self, item: K) -> bool:
        """Whether the item is in the eviction window."""
        ...

    def ranked(self) -> Iterator[K]:
        """Returns all items, the next to leave first. Nothing may change meanwhile."""
        ...

    def victim(self) -> K:
        """Returns the item that is to leave next; there must be one."""
        ...


class ByAge(Generic[K]):
    """The oldest item leaves first: least recently used, or with `renew=False` first in, first out, where being used
    does not make an item younger. Neither looks ahead."""

    def __init__(self, *, renew: bool) -> None:
        self._items: OrderedDict[K, None] = OrderedDict()
        self._renew = renew

    def enter(self, item: K, next_use: int = NEVER) -> None:
        """The item is the youngest from now on; with `renew=False` only if it is new."""
        if self._renew or item not in self._items:
            self._items[item] = None
            self._items.move_to_end(item)

    def leave(self, item: K) -> None:
        """The item is gone."""
        del self._items[item]

    def expect(self, item: K, request: int) -> None:
        """Changes nothing: waiting requests do not count."""

    def window(self, items: Sequence[K]) -> list[K]:
        """Changes nothing, and no item leaves the window."""
        return []

    def wants(self, item: K) -> bool:
        """Returns False: there is no window."""
        return False

    def ranked(self) -> Iterator[K]:
        """Returns all items, the oldest first."""
        return iter(self._items)

    def victim(self) -> K:
        """Returns the oldest item."""
        return next(self.ranked())


class LookAhead(Generic[K]):
    """Items of requests in the eviction window are spared (CachedAttention §3.3.2): of the others the least recently
    used leaves first, then what is wanted last in the window. Without a queue this is LRU."""

    def __init__(self) -> None:
        self._others: OrderedDict[K, None] = OrderedDict()
        self._wanted: OrderedDict[K, None] = OrderedDict()

    def enter(self, item: K, next_use: int = NEVER) -> None:
        """The item is the youngest of those outside the window; `expect` and `window` say what is in it."""
        if item not in self._wanted:
            self._others[item] = None
            self._others.move_to_end(item)

    def leave(self, item: K) -> None:
        """The item is gone."""
        self._others.pop(item, None)
        self._wanted.pop(item, None)

    def expect(self, item: K, request: int) -> None:
        """The item is spared from now on."""
        if self._others.pop(item, NEVER) is None:
            self._wanted[item] = None

    def done(self, item: K) -> None:
        """No waiting request of the window wants the item any more."""
        if self._wanted.pop(item, NEVER) is None:
            self._others[item] = None

    def window(self, items: Sequence[K]) -> list[K]:
        """The window is exactly `items` now; returns those that left it."""
        now = dict.fromkeys(items)
        left = [item for item in self._wanted if item not in now]
        for item in left:
            self.done(item)
        for item in now:
            self.expect(item, 0)
            if item in self._wanted:
                self._wanted.move_to_end(item)
        return left

    def wants(self, item: K) -> bool:
        """Whether the item is in the window."""
        return item in self._wanted

    def ranked(self) -> Iterator[K]:
        """Returns all items: those outside the window, the oldest first, then the window, its end first."""
        yield from self._others
        yield from reversed(self._wanted)

    def victim(self) -> K:
        """Returns the item that is to leave next."""
        return next(self.ranked())


class Belady(Generic[K]):
    """Belady's oracle: the item whose next use is farthest away leaves."""

    def __init__(self) -> None:
        self._next: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._entries = 0

    def enter(self, item: K, next_use: int = NEVER) -> None:
        """The item came, or was used, and will be used next by request `next_use`."""
        self._next[item] = next_use
        self._entries += 1  # items need not be comparable
        heapq.heappush(self._heap, (-next_use, self._entries, item))

    def leave(self, item: K) -> None:
        """The item is gone."""
        del self._next[item]

    def expect(self, item: K, request: int) -> None:
        """Changes nothing: `enter` has said when the item is used next."""

    def window(self, items: Sequence[K]) -> list[K]:
        """Changes nothing, and no item leaves the window."""
        return []

    def wants(self, item: K) -> bool:
        """Returns False: there is no window."""
        return False

    def ranked(self) -> Iterator[K]:
        """Returns all items, the one whose next use is farthest away first."""
        return iter(sorted(self._next, key=lambda item: -self._next[item]))

    def victim(self) -> K:
        """Returns the item whose next use is farthest away, and drops entries of the heap that are out of date."""
        while True:
            use, _, item = self._heap[0]
            if self._next.get(item) == -use:
                return item
            heapq.heappop(self._heap)


def make_order(policy: str) -> Order[K]:
    """Returns an empty order of the policy `policy`, any of `POLICIES`. Raises ConfigError for an unknown one."""
    check_choice("policy", policy, POLICIES)
    if policy == "belady":
        return Belady()
    return LookAhead() if policy == "lookahead" else ByAge(renew=policy == "lru")


def make_live_order(policy: str) -> Order[K]:
    """Returns the same for a store that runs, where the future beyond the queue is not known: any of `LIVE_POLICIES`.
    Raises ConfigError."""
    check_choice("store policy", policy, LIVE_POLICIES)
    return make_order(policy)
