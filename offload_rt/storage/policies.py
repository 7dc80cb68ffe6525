"""Eviction order of stored KV: LRU, FIFO and CachedAttention's look-ahead (§3.3).

Items are any hashable objects: files (`index.py`) or sessions (`sessions/host_tier.py`).
"""

from __future__ import annotations

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


class EvictionOrder(Generic[K]):
    """Eviction order of the items of one tier.

    The least recently used item is evicted first; with "fifo", the oldest one. With "lookahead", items in the eviction
    window are evicted after all others, starting with the item that is needed last (CachedAttention §3.3.2). If no
    requests wait, the order is LRU, because the store knows only requests in the queue.

    Args:
        policy: One of `LIVE_POLICIES`. Raises ConfigError for any other policy.
    """

    def __init__(self, policy: str) -> None:
        check_choice("store policy", policy, LIVE_POLICIES)
        self._renew, self._looks_ahead = policy != "fifo", policy == "lookahead"
        self._others: OrderedDict[K, None] = OrderedDict()
        self._wanted: OrderedDict[K, None] = OrderedDict()

    def enter(self, item: K) -> None:
        """Add an item or record its use. Items in the window stay there."""
        if item not in self._wanted and (self._renew or item not in self._others):
            self._others[item] = None
            self._others.move_to_end(item)

    def leave(self, item: K) -> None:
        self._others.pop(item, None)
        self._wanted.pop(item, None)

    def expect(self, item: K) -> None:
        """Move an item to the end of the window. Unknown items are ignored."""
        if self._looks_ahead and item in self._others:
            del self._others[item]
            self._wanted[item] = None

    def window(self, items: Sequence[K]) -> list[K]:
        """Set the window to `items`, soonest needed first, and return the items that left it."""
        now = dict.fromkeys(items)
        left = [item for item in self._wanted if item not in now]
        for item in left:
            del self._wanted[item]
            self._others[item] = None
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
        yield from self._others
        yield from reversed(self._wanted)

    def victim(self) -> K:
        """Return the next item to evict. The order must not be empty."""
        return next(self.ranked())
