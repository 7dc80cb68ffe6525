"""Eviction order of stored KV: LRU, FIFO, and CachedAttention's look-ahead (§3.3) with recomputation cost."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from ..utils.config_fields import check_choice
from .options import LIVE_POLICIES

K = TypeVar("K", bound=Hashable)


def prefetch_window(free_bytes: int, mean_bytes: float) -> int:
    """Return L_pw = C_mem / S_kv: the number of queued requests whose KV can be prefetched.

    In CachedAttention §3.3.1, C_mem is the host memory for prefetching, and S_kv the mean size of a session's KV.
    """
    return int(free_bytes / mean_bytes) if mean_bytes > 0 else 0


def eviction_window(host_bytes: int, disk_bytes: int, mean_bytes: float) -> int:
    """Return L_ew = (C_mem + C_disk) / S_kv: the number of queued requests whose KV is evicted last.

    In CachedAttention §3.3.2, C_mem is the host memory for KV, C_disk the size limit of the disk store, and S_kv the
    mean size of a session's KV.
    """
    return int((host_bytes + disk_bytes) / mean_bytes) if mean_bytes > 0 else 0


def recomputation_cost(tokens: int, start: int) -> int:
    """Return the cost, in tokens, of computing KV again if the block at token `start` of a text is lost.

    The cost is higher in long texts, and for earlier blocks, because all later blocks are useless without them.
    """
    return 2 * tokens - start


class EvictionOrder(Generic[K]):
    """The order in which files (`index.py`) or sessions (`sessions/host_tier.py`) are evicted.

    The item with the lowest rank is evicted first. Among equal ranks, this is the least recently used item, or with
    "fifo" the oldest item.

    "lookahead" has an *eviction window*: the items that queued requests need. These are evicted after all other items,
    in reverse order of need (CachedAttention §3.3.2).
    """

    def __init__(self, policy: str) -> None:
        check_choice("store policy", policy, LIVE_POLICIES)
        self._renew, self._looks_ahead = policy != "fifo", policy == "lookahead"
        self._uses = itertools.count()
        self._others: dict[K, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, K]] = []
        """Heap of (rank, sequence number of the use, item). Entries that differ from `_others` are outdated."""
        self._wanted: OrderedDict[K, None] = OrderedDict()

    def add(self, item: K, rank: int = 0) -> None:
        """Add an item, or record its use. Items in the eviction window are not changed."""
        if item not in self._wanted and (self._renew or item not in self._others):
            self._rank(item, rank)

    def _rank(self, item: K, rank: int) -> None:
        number = next(self._uses)
        self._others[item] = rank, number
        heapq.heappush(self._heap, (rank, number, item))
        if len(self._heap) > 2 * len(self._others) + 64:
            self._heap = [(*order, item) for item, order in self._others.items()]
            heapq.heapify(self._heap)

    def remove(self, item: K) -> None:
        self._others.pop(item, None)
        self._wanted.pop(item, None)

    def expect(self, item: K) -> None:
        """Move an item to the end of the eviction window, as the item that is needed last."""
        if self._looks_ahead and item in self._others:
            del self._others[item]
            self._wanted[item] = None

    def set_window(self, items: Sequence[K]) -> list[K]:
        """Set the eviction window to `items`, in the order in which they will be needed.

        Return the items that left the window. They now have the lowest rank, 0.
        """
        now = dict.fromkeys(items)
        left = [item for item in self._wanted if item not in now]
        for item in left:
            del self._wanted[item]
            self._rank(item, 0)
        for item in now:
            self.expect(item)
            if item in self._wanted:
                self._wanted.move_to_end(item)
        return left

    def in_window(self, item: K) -> bool:
        return item in self._wanted

    def ranked(self) -> Iterator[K]:
        """Iterate over all items in eviction order. Do not change the order during the iteration."""
        heap = self._heap.copy()
        while heap:
            rank, number, item = heapq.heappop(heap)
            if self._others.get(item) == (rank, number):
                yield item
        yield from reversed(self._wanted)

    def first(self) -> K:
        return next(self.ranked())
