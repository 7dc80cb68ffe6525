"""Allocator of block ids for the KV cache."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence


class BlockAllocator:
    """Allocates block ids and counts the references to each block. It does not allocate memory.

    Slab `i` has the ids [i * slab_blocks, (i + 1) * slab_blocks). A *run* is a sequence of consecutive ids in one slab,
    so its blocks are contiguous in memory.

    Not thread-safe. Before `decref` is called for a block, all transfers of the block must have ended, because the
    block may then be allocated again.

    Args:
        on_free: Called with the blocks that have lost their last reference, before they can be allocated again.
    """

    def __init__(self, slab_blocks: int, on_free: Callable[[Sequence[int]], None] = lambda blocks: None) -> None:
        assert slab_blocks >= 1
        self.slab_blocks, self._on_free = slab_blocks, on_free
        self.free = 0
        self._refs: list[int] = []
        # Free runs, sorted both by start (to merge adjacent runs) and by size (to find the best fit). With 100,000
        # blocks, an operation takes a few microseconds per run.
        self._starts: list[int] = []
        self._size: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []

    @property
    def slabs(self) -> int:
        return len(self._refs) // self.slab_blocks

    @property
    def used(self) -> int:
        return len(self._refs) - self.free

    @property
    def largest_run(self) -> int:
        return self._by_size[-1][0] if self._by_size else 0

    def refs(self, block: int) -> int:
        return self._refs[block]

    def exclusive(self, blocks: Iterable[int]) -> bool:
        return all(self._refs[block] == 1 for block in blocks)

    def add_slab(self) -> int:
        start = len(self._refs)
        self._refs.extend([0] * self.slab_blocks)
        self._insert(start, self.slab_blocks)
        self.free += self.slab_blocks
        return start // self.slab_blocks

    def best_fit(self, count: int) -> list[int]:
        """Allocate `count` blocks in as few runs as possible, each from the smallest free run that fits."""
        assert 0 <= count <= self.free
        taken: list[int] = []
        while len(taken) < count:
            wanted = min(count - len(taken), self.largest_run)
            _, start = self._by_size[bisect_left(self._by_size, (wanted, -1))]
            taken += self._take_run(start, wanted)
        return taken

    def extend(self, last: int, count: int) -> list[int]:
        """Allocate and return up to `count` free ids that directly follow block `last` in the same slab."""
        start = last + 1
        if start % self.slab_blocks == 0:
            return []
        return self._take_run(start, min(count, self._size.get(start, 0)))

    def worst_fit(self, count: int) -> list[int]:
        """Allocate `count` blocks from the middle of the longest free runs.

        This leaves free ids after the allocated blocks, so that several sequences can grow contiguously at the same
        time.
        """
        assert 0 <= count <= self.free
        taken: list[int] = []
        while len(taken) < count:
            wanted = min(count - len(taken), self.largest_run)
            size, start = self._by_size[bisect_left(self._by_size, (self.largest_run, -1))]
            # Begin at the start of the run if it is a slab boundary, or if the run is too short to be split.
            gap = 0 if start % self.slab_blocks == 0 else min(size // 2, max(size - 2 * wanted, 0))
            taken += self._take_run(start + gap, wanted)
        return taken

    def incref(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is free"
            self._refs[block] += 1

    def decref(self, blocks: Sequence[int]) -> list[int]:
        """Drop one reference to each block. Return the blocks that became free, in ascending order."""
        freed = []
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is released twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                freed.append(block)
        freed.sort()
        if freed:
            self._on_free(freed)
        first = 0
        for i in range(1, len(freed) + 1):
            if i == len(freed) or freed[i] != freed[i - 1] + 1 or freed[i] % self.slab_blocks == 0:
                self._free_run(freed[first], i - first)
                first = i
        return freed

    def check_integrity(self) -> None:
        assert self._starts == sorted(self._size)
        assert self._by_size == sorted((size, start) for start, size in self._size.items())
        free = {block for start, size in self._size.items() for block in range(start, start + size)}
        assert len(free) == sum(self._size.values()) == self.free
        assert all((refs == 0) == (block in free) and refs >= 0 for block, refs in enumerate(self._refs))
        for start, size in self._size.items():
            assert start // self.slab_blocks == (start + size - 1) // self.slab_blocks, "a run spans two slabs"
            assert (start + size) % self.slab_blocks == 0 or start + size not in self._size, "two runs touch"

    def _take_run(self, start: int, count: int) -> list[int]:
        if count == 0:
            return []
        first = self._starts[bisect_right(self._starts, start) - 1]
        size = self._remove(first)
        assert start + count <= first + size
        if start > first:
            self._insert(first, start - first)
        if start + count < first + size:
            self._insert(start + count, first + size - start - count)
        self._refs[start : start + count] = [1] * count
        self.free -= count
        return list(range(start, start + count))

    def _free_run(self, start: int, count: int) -> None:
        self.free += count
        end = start + count
        if end in self._size and end % self.slab_blocks:
            count += self._remove(end)
        at = bisect_left(self._starts, start) - 1
        if at >= 0 and start % self.slab_blocks:
            before = self._starts[at]
            if before + self._size[before] == start:
                count += self._remove(before)
                start = before
        self._insert(start, count)

    def _insert(self, start: int, size: int) -> None:
        insort(self._starts, start)
        insort(self._by_size, (size, start))
        self._size[start] = size

    def _remove(self, start: int) -> int:
        size = self._size.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size
