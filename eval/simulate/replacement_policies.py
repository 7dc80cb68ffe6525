"""Rules for a working set, replayed: which rows of each layer and KV head stay on the device once they were fetched."""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...engine.recording import Recording
from ...kv_cache.eviction import COUNTER_LIMIT
from ...transfer.working_set import DECAY, Table

CACHES = ("decay", "lru", "lfu", "counter")
"""What leaves a full working set first: what scores least by the runtime's own rule (`transfer/working_set.py`), the
row used longest ago, the one used least often in all, or by a counter that saturates and is halved with all others of
its layer and KV head. The last two know how often rows were used that have left, which the runtime's rule does not."""

Shape = tuple[int, int, int]
"""Layers that select, KV heads, tokens."""


class Cache(Protocol):
    """A working set of `capacity` rows per layer that selects and KV head, named `policy`."""

    policy: str
    capacity: int

    def use(self, layer: int, rows: NDArray[np.int32], step: int) -> int:
        """Rows `[Hkv, n]` (token positions, no repeats) of a layer are needed in step `step`; how many were there."""
        ...

    def check_integrity(self) -> None:
        """Asserts that no layer and head holds more than its capacity."""
        ...


REMEMBERED = "decay, remembering rows that left"
"""The runtime's score, kept for every token of the context (4 bytes of each and KV head); a missing row only comes in
where it ranks higher than one that is there: what the runtime's rule loses by forgetting, and by letting all in."""


class RankedCache:
    """Rules "lru", "lfu", "counter" and REMEMBERED. Of a step that needs more rows than fit, those that rank highest
    stay."""

    def __init__(self, policy: str, capacity: int, shape: Shape) -> None:
        self.policy, self.capacity = policy, capacity
        self._held = np.zeros(shape, bool)
        self._used = np.full(shape, -1, np.int64)
        self._count = np.zeros(shape, np.float64)

    def use(self, layer: int, rows: NDArray[np.int32], step: int) -> int:
        """All rows come in; what ranks lowest leaves. Returns how many were there."""
        heads = np.arange(len(rows))[:, None]
        held, used, count = self._held[layer], self._used[layer], self._count[layer]
        hits = int(held[heads, rows].sum())
        held[heads, rows] = True
        used[heads, rows] = step
        if self.policy == REMEMBERED:
            count *= DECAY
        count[heads, rows] += 1
        if self.policy == "counter":
            full = count.max(axis=1) >= COUNTER_LIMIT
            count[full] //= 2
        key = used if self.policy == "lru" else count * 2.0**32 + used
        for head in np.flatnonzero(held.sum(axis=1) > self.capacity):
            inside = np.flatnonzero(held[head])
            leaving = np.argsort(key[head, inside], kind="stable")[: len(inside) - self.capacity]
            held[head, inside[leaving]] = False
        return hits

    def check_integrity(self) -> None:
        """Asserts that no layer and head holds more than its capacity."""
        assert int(self._held.sum(axis=-1).max(initial=0)) <= self.capacity


class DecayedCache:
    """The runtime's own table."""

    def __init__(self, capacity: int, shape: Shape, decay: float = DECAY) -> None:
        self.policy = "decay" if decay == DECAY else f"decay {decay:g}"
        self.capacity = capacity
        self._tables = [Table(shape[1], capacity, torch.device("cpu"), decay) for _ in range(shape[0])]

    def use(self, layer: int, rows: NDArray[np.int32], step: int) -> int:
        """Looks the rows up as the runtime does, which lets the missing in. Returns how many were there."""
        return int(self._tables[layer].look_up(torch.from_numpy(rows).long()).hits) if rows.size else 0

    def check_integrity(self) -> None:
        """Asserts that every layer's table is sound."""
        for table in self._tables:
            table.check_integrity()


class OptimalCache:
    """Keeps what the recording needs again soonest (Belady 1966): no rule that does not know the future hits more."""

    policy = "optimal, knowing the future"

    def __init__(self, capacity: int, recording: Recording) -> None:
        self.capacity = capacity
        self._held: dict[tuple[int, int], set[int]] = {}
        self._needed: dict[tuple[int, int, int], list[int]] = {}
        for position, step in recording.steps():
            for layer, rows in enumerate(step):
                for head, row in enumerate(rows.tolist()):
                    for token in row:
                        self._needed.setdefault((layer, head, token), []).append(position)

    def use(self, layer: int, rows: NDArray[np.int32], step: int) -> int:
        """Keeps the rows whose next use comes soonest. Returns how many were there."""
        hits = 0
        for head, row in enumerate(rows.tolist()):
            held = self._held.get((layer, head), set())
            hits += len(held.intersection(row))

            def again(token: int, head: int = head) -> float:
                times = self._needed[layer, head, token]
                at = bisect_right(times, step)
                return times[at] if at < len(times) else float("inf")

            self._held[layer, head] = set(sorted(held.union(row), key=again)[: self.capacity])
        return hits

    def check_integrity(self) -> None:
        """Asserts that no layer and head holds more than its capacity."""
        assert all(len(held) <= self.capacity for held in self._held.values())


def make_cache(policy: str, capacity: int, shape: Shape) -> Cache:
    """A cache by its name in CACHES."""
    return DecayedCache(capacity, shape) if policy == "decay" else RankedCache(policy, capacity, shape)
