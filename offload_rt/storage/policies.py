"""Eviction order of stored KV: LRU, FIFO, and CachedAttention's look-ahead (§3.3) with recomputation cost.

Items are any hashable objects: files (`index.py`) or sessions (`sessions/host_tier.py`).
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from ..config import LIVE_POLICIES
from ..utils.config_fields import check_choice

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


def recomputation_cost(tokens: int, start: int) -> int:
    """Return the cost of losing a block, in tokens to compute again.

    Losing any block of a long sequence costs more than losing one of a short sequence, such as a request for a title.
    Within a sequence, an earlier block counts more, because the later ones are useless without it.

    Args:
        tokens: Number of tokens in the sequence.
        start: First token of the block.
    """
    return 2 * tokens - start


class EvictionOrder(Generic[K]):
    """Eviction order of the items of one tier.

    The item of the lowest rank is evicted first. By default that is the least recently used item; with "fifo", the
    oldest item. With "lookahead", items in the eviction window are evicted after all others, starting with the item
    that is needed last (CachedAttention §3.3.2). Only requests in the queue are known in advance.

    Args:
        policy: One of `LIVE_POLICIES`. Raises ConfigError for any other policy.
    """

    def __init__(self, policy: str) -> None:
        check_choice("store policy", policy, LIVE_POLICIES)
        self._renew, self._looks_ahead = policy != "fifo", policy == "lookahead"
        self._uses = itertools.count()
        self._others: dict[K, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, K]] = []
        """Entries (rank, number of the use, item). Entries that differ from `_others` are outdated."""
        self._wanted: OrderedDict[K, None] = OrderedDict()

    def enter(self, item: K, rank: int = 0) -> None:
        """Add an item or record its use. Items in the window stay there. Equal ranks are ordered by the last use."""
        if item not in self._wanted and (self._renew or item not in self._others):
            self._rank(item, rank)

    def _rank(self, item: K, rank: int) -> None:
        number = next(self._uses)
        self._others[item] = rank, number
        heapq.heappush(self._heap, (rank, number, item))
        if len(self._heap) > 2 * len(self._others) + 64:
            self._heap = [(*place, item) for item, place in self._others.items()]
            heapq.heapify(self._heap)

    def leave(self, item: K) -> None:
        self._others.pop(item, None)
        self._wanted.pop(item, None)

    def expect(self, item: K) -> None:
        """Move an item to the end of the window. Unknown items are ignored."""
        if self._looks_ahead and item in self._others:
            del self._others[item]
            self._wanted[item] = None

    def window(self, items: Sequence[K]) -> list[K]:
        """Set the window to `items`, soonest needed first. Return the items that left it, now with rank 0."""
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

    def wants(self, item: K) -> bool:
        """Return whether the item is in the window."""
        return item in self._wanted

    def ranked(self) -> Iterator[K]:
        """Iterate over all items in eviction order. The order must not change during the iteration."""
        heap = self._heap.copy()
        while heap:
            rank, number, item = heapq.heappop(heap)
            if self._others.get(item) == (rank, number):
                yield item
        yield from reversed(self._wanted)

    def victim(self) -> K:
        """Return the next item to evict. The order must not be empty."""
        return next(self.ranked())
