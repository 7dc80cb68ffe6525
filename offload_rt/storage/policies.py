"""Eviction order of stored KV: LRU, FIFO, and CachedAttention's look-ahead (§3.3) with recomputation cost.

The evicted items are files (`index.py`) or sessions (`sessions/host_tier.py`).
"""

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
    """Return the prefetch window L_pw = C_mem / S_kv (CachedAttention §3.3.1).

    The KV of the first L_pw requests in the queue can be prefetched. C_mem is the host memory available for
    prefetching, and S_kv the mean size of a session's KV.
    """
    return int(free_bytes / mean_bytes) if mean_bytes > 0 else 0


def eviction_window(host_bytes: int, disk_bytes: int, mean_bytes: float) -> int:
    """Return the eviction window L_ew = (C_mem + C_disk) / S_kv (CachedAttention §3.3.2).

    The KV of the first L_ew requests in the queue is evicted last. C_mem is the host memory for KV, C_disk the size
    limit of the disk store, and S_kv the mean size of a session's KV.
    """
    return int((host_bytes + disk_bytes) / mean_bytes) if mean_bytes > 0 else 0


def recomputation_cost(tokens: int, start: int) -> int:
    """Return the number of tokens to compute again if the block at token `start` of a text is lost.

    It is higher for blocks of long texts, and for earlier blocks, because all later blocks are useless without them.
    """
    return 2 * tokens - start


class EvictionOrder(Generic[K]):
    """The order in which files or sessions are evicted.

    The item with the lowest rank is evicted first: the least recently used one, or with "fifo" the oldest one. With
    "lookahead", items that queued requests need (the *eviction window*) are evicted after all others, beginning with
    the item that is needed last (CachedAttention §3.3.2).
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
        """Add an item, or record that it was used. An item in the eviction window stays there.

        Items with equal ranks are ordered by their last use.
        """
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
        """Move a known item to the end of the eviction window, so that it is evicted last.

        Only "lookahead" has a window.
        """
        if self._looks_ahead and item in self._others:
            del self._others[item]
            self._wanted[item] = None

    def set_window(self, items: Sequence[K]) -> list[K]:
        """Set the eviction window to `items`, sorted by the time when they will be needed.

        Return the items that left the window. Their rank is now 0, the lowest.
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
        """Return whether the item is in the eviction window. Only "lookahead" has a window."""
        return item in self._wanted

    def ranked(self) -> Iterator[K]:
        """Iterate over all items in eviction order, which must not change during the iteration."""
        heap = self._heap.copy()
        while heap:
            rank, number, item = heapq.heappop(heap)
            if self._others.get(item) == (rank, number):
                yield item
        yield from reversed(self._wanted)

    def first(self) -> K:
        """Return the item to evict next."""
        return next(self.ranked())
