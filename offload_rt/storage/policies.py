"""Eviction order of stored KV: LRU, FIFO, and CachedAttention's look-ahead (§3.3) with recomputation cost."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from ..utils.config_fields import check_choice
from .options import LIVE_POLICIES

K = TypeVar("K", bound=Hashable)


def prefetch_window(free_bytes: int, mean_bytes: float) -> int:
    """Return L_pw = C_mem / S_kv (CachedAttention §3.3.1): how many queued requests to prefetch KV for.

    C_mem is the host memory for prefetching, and S_kv the mean size of a session's KV.
    """
    return int(free_bytes / mean_bytes) if mean_bytes > 0 else 0


def eviction_window(host_bytes: int, disk_bytes: int, mean_bytes: float) -> int:
    """Return L_ew = (C_mem + C_disk) / S_kv (CachedAttention §3.3.2): how many queued requests' KV is evicted last.

    C_mem is the host memory for KV, C_disk the size limit of the store, and S_kv the mean size of a session's KV.
    """
    return int((host_bytes + disk_bytes) / mean_bytes) if mean_bytes > 0 else 0


def recomputation_cost(tokens: int, start: int) -> int:
    """Return the cost, in tokens, of computing KV again if the block at token `start` of a text is lost.

    It is higher in long texts, and for earlier blocks, because later blocks are useless without them.
    """
    return 2 * tokens - start


class EvictionOrder(Generic[K]):
    """The order in which files (`index.py`) or sessions (`sessions/host_tier.py`) are evicted.

    The item with the lowest rank is evicted first, and among equal ranks the least recently used item (with "fifo" the
    oldest).

    "lookahead" has an *eviction window*: the items that queued requests need. They are evicted after all other items,
    in reverse order of need (CachedAttention §3.3.2).
    """

    def __init__(self, policy: str) -> None:
        check_choice("store policy", policy, LIVE_POLICIES)
        self._renew, self._looks_ahead = policy != "fifo", policy == "lookahead"
        self._uses = itertools.count()
        self._others: dict[K, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, K]] = []
        """Heap of (rank, sequence number of the use, item). Entries that differ from `_others` are outdated."""
        self._needs: dict[K, int] = {}
        """Position of each item in the eviction window. Items that have not been added are included."""
        self._window: dict[K, None] = {}
        """Items of the eviction window that have been added."""

    def add(self, item: K, rank: int = 0) -> None:
        """Add an item, or record its use. The position of items in the eviction window does not change."""
        if item in self._needs:
            self._window[item] = None
        elif self._renew or item not in self._others:
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
        self._window.pop(item, None)

    def set_window(self, items: Sequence[K]) -> list[K]:
        """Set the eviction window to `items`, in the order in which they will be needed.

        Return the items that left the window, which now have the lowest rank, 0.
        """
        if not self._looks_ahead:
            return []
        self._needs = {item: position for position, item in enumerate(dict.fromkeys(items))}
        left = [item for item in self._window if item not in self._needs]
        for item in left:
            del self._window[item]
            self._rank(item, 0)
        for item in self._needs:
            if self._others.pop(item, None) is not None:
                self._window[item] = None
        return left

    def in_window(self, item: K) -> bool:
        return item in self._window

    def ranked(self) -> Iterator[K]:
        """Iterate over all items in eviction order, which must not change during the iteration."""
        heap = self._heap.copy()
        while heap:
            rank, number, item = heapq.heappop(heap)
            if self._others.get(item) == (rank, number):
                yield item
        yield from sorted(self._window, key=self._needs.__getitem__, reverse=True)

    def first(self) -> K:
        return next(self.ranked())
