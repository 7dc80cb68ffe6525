"""Cache of window blocks (KV of sliding-window layers) that belong to published blocks of the prefix tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..core import CHUNK
from .chunks import ChunkTable
from .layer_groups import LayerGroups


class WindowChunks:
    """Maps each published block to the window blocks with the sliding-window layers' KV of the same 64 tokens.

    A sequence frees its window blocks when they leave its windows. This cache holds a reference on each, so that
    another sequence can continue after any prefix whose last window is complete. Window blocks that no sequence holds
    are idle. They are evicted oldest first if memory is needed, or when their published block leaves the tree.

    Not thread-safe.
    """

    def __init__(self, table: ChunkTable, groups: LayerGroups) -> None:
        self._table, self._groups = table, groups
        self._kept: dict[int, tuple[int, ...]] = {}
        self._of: dict[int, int] = {}
        self._idle: dict[int, None] = {}

    @property
    def idle(self) -> int:
        return len(self._idle) * self._groups.sliding

    def keep(self, chunk: int, window: tuple[int, ...]) -> None:
        """Cache the window blocks of a published block. Does nothing if the block already has some."""
        if chunk not in self._kept:
            self._table.incref(window)
            self._kept[chunk] = window
            self._of[window[0]] = chunk

    def usable(self, chunks: Sequence[int], floor: int) -> int:
        """Return the length of the longest prefix of `chunks` after which a sequence can continue.

        All window blocks that the next token sees must be cached. `chunks` is a path from the root of the tree. Tokens
        before `floor` are never visible.
        """
        if not self._groups.sliding:
            return len(chunks)
        first = len(chunks)  # start of the gapless run that ends at the current block
        starts = []
        for i, chunk in enumerate(chunks):
            first = (first if i and chunks[i - 1] in self._kept else i) if chunk in self._kept else i + 1
            starts.append(first)
        seen = self._groups.first_seen
        fits = (n for n in range(len(chunks), 0, -1) if starts[n - 1] <= seen(n * CHUNK, floor) // CHUNK)
        return next(fits, 0)

    def take(self, chunks: Sequence[int], floor: int) -> dict[int, tuple[int, ...]]:
        """Return the window blocks needed to continue after `chunks`, by index, with a reference on each."""
        if not self._groups.sliding or not chunks:
            return {}
        first = self._groups.first_seen(len(chunks) * CHUNK, floor) // CHUNK
        found = {i: self._kept[chunks[i]] for i in range(first, len(chunks))}
        for i, window in found.items():
            self._table.incref(window)
            self._idle.pop(chunks[i], None)
        return found

    def release(self, window: tuple[int, ...]) -> None:
        """Drop the references of a sequence on the window blocks of one place."""
        self._table.decref(window)
        chunk = self._of.get(window[0])
        if chunk is not None and self._table.refs(window[0]) == 1:
            self._idle[chunk] = None

    def forget(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            if (window := self._kept.pop(chunk, None)) is not None:
                del self._of[window[0]]
                self._idle.pop(chunk, None)
                self._table.decref(window)

    def forget_lost(self, lost: set[int]) -> None:
        self.forget([chunk for chunk, window in self._kept.items() if not lost.isdisjoint(window)])

    def evict(self, count: int) -> None:
        """Evict idle window blocks, oldest first, until `count` blocks are free or none is left."""
        while count > 0 and self._idle:
            self.forget([next(iter(self._idle))])
            count -= self._groups.sliding

    def check_integrity(self, known: Callable[[int], bool]) -> None:
        """Assert that all entries belong to published blocks and that idle ones have no other holder."""
        assert self._of == {window[0]: chunk for chunk, window in self._kept.items()}
        for chunk, window in self._kept.items():
            refs = {self._table.refs(one) for one in window}
            assert known(chunk) and len(window) == self._groups.sliding and len(refs) == 1
            assert (chunk in self._idle) == (refs == {1})
        assert self._idle.keys() <= self._kept.keys()
