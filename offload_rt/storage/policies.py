"""What leaves a tier of stored KV next: LRU, FIFO, CachedAttention's look-ahead (§3.3), and Belady's oracle.

One implementation for the live store (`index.py`, `sessions/host_tier.py`) and for the simulator. What is ordered is
anything hashable: a file, a session, a block of a trace.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, Literal, Protocol, TypeVar, get_args

from ..config import LIVE_POLICIES, check_choice

StorePolicy = Literal["lookahead", "lru", "fifo", "belady"]
POLICIES: tuple[str, ...] = get_args(StorePolicy)
NEVER = 1 << 60
"""The next use of what is not used again."""

K = TypeVar("K", bound=Hashable)


def prefetch_window(free_bytes: int, mean_bytes: float) -> int:
    """L_pw = C_mem / S_kv (§3.3.1): how many waiting requests are fetched ahead, from the bytes of host memory free for
    fetching and the mean KV of a session."""
    return int(free_bytes / mean_bytes) if mean_bytes > 0 else 0


def eviction_window(host_bytes: int, disk_bytes: int, mean_bytes: float) -> int:
    """L_ew = (C_mem + C_disk) / S_kv (§3.3.2): how many waiting requests' KV eviction spares."""
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
        """All items, the next to leave first. Nothing may change meanwhile."""
        ...

    def victim(self) -> K:
        """The item that is to leave next; there must be one."""
        ...


class ByAge(Generic[K]):
    """LRU; with `renew=False` FIFO: being used does not make an item younger. Neither looks ahead."""

    def __init__(self, *, renew: bool) -> None:
        self._items: OrderedDict[K, None] = OrderedDict()
        self._renew = renew

    def enter(self, item: K, next_use: int = NEVER) -> None:
        """See `Order`."""
        if self._renew or item not in self._items:
            self._items[item] = None
            self._items.move_to_end(item)

    def leave(self, item: K) -> None:
        """See `Order`."""
        del self._items[item]

    def expect(self, item: K, request: int) -> None:
        """See `Order`."""

    def window(self, items: Sequence[K]) -> list[K]:
        """See `Order`."""
        return []

    def wants(self, item: K) -> bool:
        """See `Order`."""
        return False

    def ranked(self) -> Iterator[K]:
        """The oldest first."""
        return iter(self._items)

    def victim(self) -> K:
        """The oldest."""
        return next(self.ranked())


class LookAhead(Generic[K]):
    """CachedAttention §3.3.2: items of requests in the eviction window are spared; of the others the least recently
    used leaves first, then what is wanted last in the window. Without a queue this is LRU."""

    def __init__(self) -> None:
        self._others: OrderedDict[K, None] = OrderedDict()
        self._wanted: OrderedDict[K, None] = OrderedDict()

    def enter(self, item: K, next_use: int = NEVER) -> None:
        """See `Order`; the window is told by `expect` or `window`."""
        if item not in self._wanted:
            self._others[item] = None
            self._others.move_to_end(item)

    def leave(self, item: K) -> None:
        """See `Order`."""
        self._others.pop(item, None)
        self._wanted.pop(item, None)

    def expect(self, item: K, request: int) -> None:
        """Spared from now on."""
        if self._others.pop(item, NEVER) is None:
            self._wanted[item] = None

    def done(self, item: K) -> None:
        """No waiting request of the window wants the item any more."""
        if self._wanted.pop(item, NEVER) is None:
            self._others[item] = None

    def window(self, items: Sequence[K]) -> list[K]:
        """See `Order`."""
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
        """See `Order`."""
        return item in self._wanted

    def ranked(self) -> Iterator[K]:
        """See the class."""
        yield from self._others
        yield from reversed(self._wanted)

    def victim(self) -> K:
        """See the class."""
        return next(self.ranked())


class Belady(Generic[K]):
    """The oracle: the item whose next use is farthest away leaves."""

    def __init__(self) -> None:
        self._next: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._entries = 0

    def enter(self, item: K, next_use: int = NEVER) -> None:
        """See `Order`."""
        self._next[item] = next_use
        self._entries += 1  # items need not be comparable
        heapq.heappush(self._heap, (-next_use, self._entries, item))

    def leave(self, item: K) -> None:
        """See `Order`."""
        del self._next[item]

    def expect(self, item: K, request: int) -> None:
        """It knows."""

    def window(self, items: Sequence[K]) -> list[K]:
        """It knows."""
        return []

    def wants(self, item: K) -> bool:
        """See `Order`."""
        return False

    def ranked(self) -> Iterator[K]:
        """See the class."""
        return iter(sorted(self._next, key=lambda item: -self._next[item]))

    def victim(self) -> K:
        """See the class; entries that are out of date are dropped."""
        while True:
            use, _, item = self._heap[0]
            if self._next.get(item) == -use:
                return item
            heapq.heappop(self._heap)


def make_order(policy: str) -> Order[K]:
    """An empty order of the policy `policy`, any of `POLICIES`. Raises ConfigError for an unknown one."""
    check_choice("policy", policy, POLICIES)
    if policy == "belady":
        return Belady()
    return LookAhead() if policy == "lookahead" else ByAge(renew=policy == "lru")


def make_live_order(policy: str) -> Order[K]:
    """The same for a store that runs: the future beyond the queue is not known there. Raises ConfigError."""
    check_choice("store policy", policy, LIVE_POLICIES)
    return make_order(policy)
