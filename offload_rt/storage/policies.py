"""Eviction orders for stored KV: LRU, FIFO, and CachedAttention's look-ahead (§3.3) with recomputation cost."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from ..utils.config_fields import check_choice
from .options import LIVE_POLICIES

K = TypeVar("K", bound=Hashable)


def prefetch_window(free_bytes: int, mean_bytes: float) -> int:
    """Return for how many queued requests to prefetch KV: L_pw = C_mem / S_kv (CachedAttention §3.3.1).

    C_mem is the host memory for prefetching, and S_kv is the mean size of a session's KV.
    """
    return int(free_bytes / mean_bytes) if mean_bytes > 0 else 0


def eviction_window(host_bytes: int, disk_bytes: int, mean_bytes: float) -> int:
    """Return for how many queued requests KV is evicted last: L_ew = (C_mem + C_disk) / S_kv (CachedAttention §3.3.2).

    C_mem is the host memory for KV, C_disk is the size limit of the store, and S_kv is the mean size of a session's KV.
    """
    return int((host_bytes + disk_bytes) / mean_bytes) if mean_bytes > 0 else 0


def recomputation_cost(tokens: int, start: int) -> int:
    """Return the cost, in tokens, of losing the block that starts at token `start` of a text with `tokens` tokens.

    The cost is higher for longer texts. It is also higher for earlier blocks, because later blocks are useless without
    them.
    """
    return 2 * tokens - start


class EvictionOrder(Generic[K]):
    """The order in which files (`index.py`) or sessions (`sessions/host_tier.py`) are evicted.

    The item with the lowest rank is evicted first. Among items with equal ranks, the least recently used item is
    evicted first or, with "fifo", the oldest.

    With "lookahead", there is also an *eviction window* of items that queued requests need. These are evicted after all
    other items, starting with the item that is needed last (CachedAttention §3.3.2).
    """

    def __init__(self, policy: str) -> None:
        check_choice("store policy", policy, LIVE_POLICIES)
        self._renew, self._looks_ahead = policy != "fifo", policy == "lookahead"
        self._uses = itertools.count()
        self._others: dict[K, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, K]] = []
        """Heap of (rank, sequence number of the last use, item). Entries that differ from `_others` are outdated."""
        self._needs: dict[K, int] = {}
        """Position of each item in the eviction window, including items that have not been added yet."""
        self._window: dict[K, None] = {}
        """Items in the eviction window that have already been added."""

    def add(self, item: K, rank: int = 0) -> None:
        """Add an item, or record a use of it. Items in the eviction window keep their position."""
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

        Return the items that have left the window. They now have rank 0, the lowest rank.
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
        """Iterate over all items in eviction order. Do not change the order during the iteration."""
        heap = self._heap.copy()
        while heap:
            rank, number, item = heapq.heappop(heap)
            if self._others.get(item) == (rank, number):
                yield item
        yield from sorted(self._window, key=self._needs.__getitem__, reverse=True)

    def first(self) -> K:
        return next(self.ranked())
