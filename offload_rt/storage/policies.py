"""Eviction policies for stored KV: LRU, FIFO, CachedAttention's look-ahead (§3.3) and Belady's oracle.

The live store (`index.py`, `sessions/host_tier.py`) and the simulator share this implementation. Items are any hashable
objects, such as files, sessions or the blocks of a trace.
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
"""Next use of an item that is not used again."""

K = TypeVar("K", bound=Hashable)


def prefetch_window(free_bytes: int, mean_bytes: float) -> int:
    """Return the prefetch window L_pw = C_mem / S_kv (§3.3.1), in waiting requests.

    Args:
        free_bytes: Host memory available for prefetching.
        mean_bytes: Mean KV size of a session.
    """
    return int(free_bytes / mean_bytes) if mean_bytes > 0 else 0


def eviction_window(host_bytes: int, disk_bytes: int, mean_bytes: float) -> int:
    """Return the eviction window L_ew = (C_mem + C_disk) / S_kv (§3.3.2), in waiting requests.

    The KV of requests in the window is evicted last. `mean_bytes` is the mean KV size of a session.
    """
    return int((host_bytes + disk_bytes) / mean_bytes) if mean_bytes > 0 else 0


class Order(Protocol[K]):
    """Eviction order of the items of one tier."""

    def enter(self, item: K, next_use: int = NEVER) -> None:
        """Add an item or record its use. `next_use` is the next request that uses it; only Belady reads it."""
        ...

    def leave(self, item: K) -> None:
        """Remove an item."""
        ...

    def expect(self, item: K, request: int) -> None:
        """Record that waiting request number `request` has entered the eviction window and will use the item."""
        ...

    def window(self, items: Sequence[K]) -> list[K]:
        """Set the eviction window to `items`, soonest needed first, and return the items that left it.

        Unknown items are ignored.
        """
        ...

    def wants(self, item: K) -> bool:
        """Return whether the item is in the eviction window."""
        ...

    def ranked(self) -> Iterator[K]:
        """Iterate over all items in eviction order. The order must not change during the iteration."""
        ...

    def victim(self) -> K:
        """Return the next item to evict. The order must not be empty."""
        ...


class ByAge(Generic[K]):
    """Evict the oldest item first, without look-ahead.

    The order is LRU. With `renew=False`, using an item does not renew its age, and the order is FIFO.
    """

    def __init__(self, *, renew: bool) -> None:
        self._items: OrderedDict[K, None] = OrderedDict()
        self._renew = renew

    def enter(self, item: K, next_use: int = NEVER) -> None:
        if self._renew or item not in self._items:
            self._items[item] = None
            self._items.move_to_end(item)

    def leave(self, item: K) -> None:
        del self._items[item]

    def expect(self, item: K, request: int) -> None:
        """Do nothing: this policy ignores waiting requests."""

    def window(self, items: Sequence[K]) -> list[K]:
        return []

    def wants(self, item: K) -> bool:
        return False

    def ranked(self) -> Iterator[K]:
        return iter(self._items)

    def victim(self) -> K:
        return next(self.ranked())


class LookAhead(Generic[K]):
    """Evict items outside the eviction window first (CachedAttention §3.3.2).

    Items outside the window are evicted in LRU order. Items in the window follow, those needed last first. If no
    requests wait, the order is LRU.
    """

    def __init__(self) -> None:
        self._others: OrderedDict[K, None] = OrderedDict()
        self._wanted: OrderedDict[K, None] = OrderedDict()

    def enter(self, item: K, next_use: int = NEVER) -> None:
        if item not in self._wanted:
            self._others[item] = None
            self._others.move_to_end(item)

    def leave(self, item: K) -> None:
        self._others.pop(item, None)
        self._wanted.pop(item, None)

    def expect(self, item: K, request: int) -> None:
        if self._others.pop(item, NEVER) is None:
            self._wanted[item] = None

    def done(self, item: K) -> None:
        """Move the item out of the window, because no waiting request uses it any more."""
        if self._wanted.pop(item, NEVER) is None:
            self._others[item] = None

    def window(self, items: Sequence[K]) -> list[K]:
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
        return item in self._wanted

    def ranked(self) -> Iterator[K]:
        yield from self._others
        yield from reversed(self._wanted)

    def victim(self) -> K:
        return next(self.ranked())


class Belady(Generic[K]):
    """Belady's oracle: evict the item with the farthest next use."""

    def __init__(self) -> None:
        self._next: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._entries = 0

    def enter(self, item: K, next_use: int = NEVER) -> None:
        self._next[item] = next_use
        self._entries += 1  # tie-breaker, because items need not be comparable
        heapq.heappush(self._heap, (-next_use, self._entries, item))

    def leave(self, item: K) -> None:
        del self._next[item]

    def expect(self, item: K, request: int) -> None:
        """Do nothing: `enter` already recorded the next use."""

    def window(self, items: Sequence[K]) -> list[K]:
        return []

    def wants(self, item: K) -> bool:
        return False

    def ranked(self) -> Iterator[K]:
        return iter(sorted(self._next, key=lambda item: -self._next[item]))

    def victim(self) -> K:
        while True:
            use, _, item = self._heap[0]
            if self._next.get(item) == -use:
                return item
            heapq.heappop(self._heap)


def make_order(policy: str) -> Order[K]:
    """Return an empty order for `policy`, one of `POLICIES`. Raises ConfigError for an unknown policy."""
    check_choice("policy", policy, POLICIES)
    if policy == "belady":
        return Belady()
    return LookAhead() if policy == "lookahead" else ByAge(renew=policy == "lru")


def make_live_order(policy: str) -> Order[K]:
    """Return an empty order for a live store, which cannot look beyond the request queue.

    `policy` is one of `LIVE_POLICIES`. Raises ConfigError for any other policy.
    """
    check_choice("store policy", policy, LIVE_POLICIES)
    return make_order(policy)
