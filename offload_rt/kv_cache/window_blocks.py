"""Cache of window blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..core import BLOCK_SIZE
from .block_allocator import BlockAllocator
from .layer_groups import LayerGroups


class WindowBlocks:
    """Maps each published block to its window blocks, the KV of the block's 64 tokens in sliding-window layers.

    A sequence frees a window block when no later token attends to it. This cache keeps a reference, so that another
    sequence can continue after the published block. Window blocks that no sequence uses are idle. They are evicted when
    memory is needed, oldest first, or when their published block leaves the tree. Not thread-safe.
    """

    def __init__(self, table: BlockAllocator, groups: LayerGroups) -> None:
        self._table, self._groups = table, groups
        self._kept: dict[int, tuple[int, ...]] = {}
        self._of: dict[int, int] = {}
        self._idle: dict[int, None] = {}

    @property
    def idle(self) -> int:
        return len(self._idle) * self._groups.sliding

    def keep(self, block: int, window: tuple[int, ...]) -> None:
        """Cache the window blocks of a published block, unless window blocks of this block are already cached."""
        if block not in self._kept:
            self._table.incref(window)
            self._kept[block] = window
            self._of[window[0]] = block

    def usable(self, blocks: Sequence[int], floor: int) -> int:
        """Return how many leading blocks of a path from the root of the tree a new sequence can reuse.

        All window blocks that the next token attends to must be cached, except for tokens before `floor`.
        """
        if not self._groups.sliding:
            return len(blocks)
        first = len(blocks)  # start of the run of cached blocks that ends at the current block
        starts = []
        for i, block in enumerate(blocks):
            first = (first if i and blocks[i - 1] in self._kept else i) if block in self._kept else i + 1
            starts.append(first)
        seen = self._groups.first_seen
        fits = (n for n in range(len(blocks), 0, -1) if starts[n - 1] <= seen(n * BLOCK_SIZE, floor) // BLOCK_SIZE)
        return next(fits, 0)

    def take(self, blocks: Sequence[int], floor: int) -> dict[int, tuple[int, ...]]:
        """Return the window blocks that a sequence needs to continue after `blocks`, by block index.

        A reference to each of them is added. The sequence does not attend to tokens before `floor`.
        """
        if not self._groups.sliding or not blocks:
            return {}
        first = self._groups.first_seen(len(blocks) * BLOCK_SIZE, floor) // BLOCK_SIZE
        found = {i: self._kept[blocks[i]] for i in range(first, len(blocks))}
        for i, window in found.items():
            self._table.incref(window)
            self._idle.pop(blocks[i], None)
        return found

    def has_one_user(self, window: tuple[int, ...]) -> bool:
        return self._table.refs(window[0]) == 1 + (window[0] in self._of)

    def release(self, window: tuple[int, ...]) -> None:
        """Drop a sequence's references to `window`, its window blocks at one block index."""
        self._table.decref(window)
        block = self._of.get(window[0])
        if block is not None and self._table.refs(window[0]) == 1:
            self._idle[block] = None

    def forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if (window := self._kept.pop(block, None)) is not None:
                del self._of[window[0]]
                self._idle.pop(block, None)
                self._table.decref(window)

    def forget_lost(self, lost: set[int]) -> None:
        self.forget([block for block, window in self._kept.items() if not lost.isdisjoint(window)])

    def evict(self, count: int) -> None:
        """Evict idle window blocks, oldest first, until `count` blocks have been freed or none is left."""
        while count > 0 and self._idle:
            self.forget([next(iter(self._idle))])
            count -= self._groups.sliding

    def check_integrity(self, known: Callable[[int], bool]) -> None:
        assert self._of == {window[0]: block for block, window in self._kept.items()}
        for block, window in self._kept.items():
            refs = {self._table.refs(one) for one in window}
            assert known(block) and len(window) == self._groups.sliding and len(refs) == 1
            assert (block in self._idle) == (refs == {1})
        assert self._idle.keys() <= self._kept.keys()
