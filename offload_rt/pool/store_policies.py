"""Which block leaves next: LRU, FIFO, CachedAttention's look-ahead (§3.3.2), and Belady's oracle."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Literal, Protocol, get_args

from ..config import check_choice

StorePolicy = Literal["lookahead", "lru", "fifo", "belady"]
POLICIES: tuple[str, ...] = get_args(StorePolicy)
NEVER = 1 << 60
"""The next use of what is not used again."""


class Order(Protocol):
    """Which block of one tier leaves next."""

    def enter(self, block: int, next_use: int) -> None:
        """A block came, or was used; `next_use` is the request that will use it next (only Belady may look)."""
        ...

    def leave(self, block: int) -> None:
        """The block is gone."""
        ...

    def expect(self, block: int, request: int) -> None:
        """Waiting request number `request` came into the eviction window and will use the block."""
        ...

    def victim(self) -> int:
        """The block that is to leave."""
        ...


class ByAge:
    """LRU; with `renew=False` FIFO: being used does not make a block younger."""

    def __init__(self, *, renew: bool) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._renew = renew

    def enter(self, block: int, next_use: int) -> None:
        """See `Order`."""
        if self._renew or block not in self._blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)

    def leave(self, block: int) -> None:
        """See `Order`."""
        del self._blocks[block]

    def expect(self, block: int, request: int) -> None:
        """It does not look ahead."""

    def victim(self) -> int:
        """The oldest."""
        return next(iter(self._blocks))


class LookAhead:
    """CachedAttention §3.3.2: blocks of requests in the eviction window are spared; of the others the least recently
    used leaves first, then what is wanted last in the window."""

    def __init__(self) -> None:
        self._others: OrderedDict[int, None] = OrderedDict()
        self._wanted: OrderedDict[int, None] = OrderedDict()

    def enter(self, block: int, next_use: int) -> None:
        """See `Order`; the window is told by `expect`."""
        if block not in self._wanted:
            self._others[block] = None
            self._others.move_to_end(block)

    def leave(self, block: int) -> None:
        """See `Order`."""
        self._others.pop(block, None)
        self._wanted.pop(block, None)

    def expect(self, block: int, request: int) -> None:
        """Spared from now on."""
        if self._others.pop(block, NEVER) is None:
            self._wanted[block] = None

    def done(self, block: int) -> None:
        """No waiting request of the window wants the block any more."""
        if self._wanted.pop(block, NEVER) is None:
            self._others[block] = None

    def victim(self) -> int:
        """See the class."""
        return next(iter(self._others)) if self._others else next(reversed(self._wanted))


class Belady:
    """The oracle: the block whose next use is farthest away leaves."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def enter(self, block: int, next_use: int) -> None:
        """See `Order`."""
        self._next[block] = next_use
        heapq.heappush(self._heap, (-next_use, block))

    def leave(self, block: int) -> None:
        """See `Order`."""
        del self._next[block]

    def expect(self, block: int, request: int) -> None:
        """It knows."""

    def victim(self) -> int:
        """See the class; entries that are out of date are dropped."""
        while True:
            use, block = self._heap[0]
            if self._next.get(block) == -use:
                return block
            heapq.heappop(self._heap)


def make_order(policy: str) -> Order:
    """An empty order of the policy `policy`. Raises ConfigError for an unknown one."""
    check_choice("policy", policy, POLICIES)
    if policy == "belady":
        return Belady()
    return LookAhead() if policy == "lookahead" else ByAge(renew=policy == "lru")
