"""Chunk ids: which are free, who counts on the others, and where the next ones go."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence


class ChunkTable:
    """Free runs and reference counts over chunk ids: integers only, no tensor, no bytes.

    Slabs are added one by one; slab `i` brings the ids [i * slab_chunks, (i + 1) * slab_chunks), and a run never
    crosses from one slab into the next, because their rows are not neighbours.

    Free runs are kept twice, by start (to join neighbours) and by size (to choose), both as sorted lists: an operation
    costs two bisections and two list insertions for each run it touches, a few microseconds with 100,000 chunks.

    Everything here is mutated by `add_slab`, the three ways to take chunks, `incref` and `decref`, on one thread.
    Whoever calls `decref` answers for it that nobody reads or writes the chunk any more: the next call may hand it out.
    """

    def __init__(self, slab_chunks: int, on_free: Callable[[Sequence[int]], None] = lambda chunks: None) -> None:
        """on_free: is told of chunks that nobody holds any more, before they are handed out again."""
        assert slab_chunks >= 1
        self.slab_chunks, self._on_free = slab_chunks, on_free
        self.free = 0
        self._refs: list[int] = []
        self._starts: list[int] = []
        self._size: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []

    @property
    def slabs(self) -> int:
        """Slabs added so far."""
        return len(self._refs) // self.slab_chunks

    @property
    def used(self) -> int:
        """Chunks that somebody holds."""
        return len(self._refs) - self.free

    @property
    def largest_run(self) -> int:
        """Size of the longest free run, in chunks."""
        return self._by_size[-1][0] if self._by_size else 0

    def refs(self, chunk: int) -> int:
        """How many holders `chunk` has; 0 is free."""
        return self._refs[chunk]

    def add_slab(self) -> int:
        """Adds a slab of free chunks; returns its number."""
        start = len(self._refs)
        self._refs.extend([0] * self.slab_chunks)
        self._insert(start, self.slab_chunks)
        self.free += self.slab_chunks
        return start // self.slab_chunks

    def best_fit(self, count: int) -> list[int]:
        """Takes `count` chunks in as few runs as there can be, each from the shortest free run it fits: for sequences
        whose length is known. One reference each."""
        assert 0 <= count <= self.free
        taken: list[int] = []
        while len(taken) < count:
            wanted = min(count - len(taken), self.largest_run)
            _, start = self._by_size[bisect_left(self._by_size, (wanted, -1))]
            taken += self._take(start, wanted)
        return taken

    def extend(self, last: int, count: int) -> list[int]:
        """Takes at most `count` free chunks directly behind chunk `last`, in its slab; maybe none."""
        start = last + 1
        if start % self.slab_chunks == 0:
            return []
        return self._take(start, min(count, self._size.get(start, 0)))

    def roomy(self, count: int) -> list[int]:
        """Takes `count` chunks where they can go on growing: in the middle of the longest free run, or at its start
        where no neighbour grows into it. Sequences that grow side by side, a chunk at a time, so get runs of
        a few sizes rather than every other chunk."""
        assert 0 <= count <= self.free
        taken: list[int] = []
        while len(taken) < count:
            wanted = min(count - len(taken), self.largest_run)
            size, start = self._by_size[bisect_left(self._by_size, (self.largest_run, -1))]
            gap = 0 if start % self.slab_chunks == 0 else min(size // 2, max(size - 2 * wanted, 0))
            taken += self._take(start + gap, wanted)
        return taken

    def incref(self, chunks: Iterable[int]) -> None:
        """One more holder for each of `chunks`, none of which may be free."""
        for chunk in chunks:
            assert self._refs[chunk] > 0, f"chunk {chunk} is free"
            self._refs[chunk] += 1

    def decref(self, chunks: Sequence[int]) -> list[int]:
        """One holder less for each of `chunks`; returns those that became free, ascending."""
        freed = []
        for chunk in chunks:
            assert self._refs[chunk] > 0, f"chunk {chunk} is released twice"
            self._refs[chunk] -= 1
            if self._refs[chunk] == 0:
                freed.append(chunk)
        freed.sort()
        if freed:
            self._on_free(freed)
        first = 0
        for i in range(1, len(freed) + 1):
            if i == len(freed) or freed[i] != freed[i - 1] + 1 or freed[i] % self.slab_chunks == 0:
                self._give(freed[first], i - first)
                first = i
        return freed

    def check_integrity(self) -> None:
        """Asserts that both orders of the free runs agree with the reference counts, and that no two runs touch."""
        assert self._starts == sorted(self._size)
        assert self._by_size == sorted((size, start) for start, size in self._size.items())
        free = {chunk for start, size in self._size.items() for chunk in range(start, start + size)}
        assert len(free) == sum(self._size.values()) == self.free
        assert all((refs == 0) == (chunk in free) and refs >= 0 for chunk, refs in enumerate(self._refs))
        for start, size in self._size.items():
            assert start // self.slab_chunks == (start + size - 1) // self.slab_chunks, "a run crosses slabs"
            assert (start + size) % self.slab_chunks == 0 or start + size not in self._size, "two runs touch"

    def _take(self, start: int, count: int) -> list[int]:
        """Takes `count` chunks from `start` on, all within one free run."""
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

    def _give(self, start: int, count: int) -> None:
        """Makes the run free and joins it with its free neighbours of the same slab."""
        self.free += count
        behind = start + count
        if behind in self._size and behind % self.slab_chunks:
            count += self._remove(behind)
        at = bisect_left(self._starts, start) - 1
        if at >= 0 and start % self.slab_chunks:
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
