"""The chunks that hold rows of sliding layers: which are kept, beside the prefix tree's chunks, for the next sequence
with the same beginning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..core import CHUNK
from .chunks import ChunkTable
from .layer_groups import LayerGroups


class WindowChunks:
    """Window chunks of published chunks, by the published chunk's id: the rows that sliding layers have of the same 64
    tokens. Ids only.

    A sequence holds them for as long as its windows show them; here they outlive that, with one reference on each, so
    that another sequence can begin behind any prefix whose last window is complete. Those that nobody else holds are
    idle: given up oldest first when room is needed, or when the chunk that they belong to leaves the tree.

    Mutated by `keep`, `take`, `release`, `forget` and `evict`, on one thread, like the table whose references it holds.
    """

    def __init__(self, table: ChunkTable, groups: LayerGroups) -> None:
        self._table, self._groups = table, groups
        self._kept: dict[int, tuple[int, ...]] = {}
        self._of: dict[int, int] = {}
        self._idle: dict[int, None] = {}

    @property
    def idle(self) -> int:
        """Chunks that nobody else holds."""
        return len(self._idle) * self._groups.sliding

    def keep(self, chunk: int, window: tuple[int, ...]) -> None:
        """Keeps the window chunks of a published chunk, which their sequence holds; the first ones given stay."""
        if chunk not in self._kept:
            self._table.incref(window)
            self._kept[chunk] = window
            self._of[window[0]] = chunk

    def usable(self, chunks: Sequence[int], floor: int) -> int:
        """How many of `chunks`, a path of the tree from its top, a sequence can begin behind: the most of which all
        that the windows of the next token show is kept. Tokens before `floor` are never shown."""
        if not self._groups.sliding:
            return len(chunks)
        first = len(chunks)  # the first place of the gapless run that ends at the place looked at
        starts = []
        for i, chunk in enumerate(chunks):
            first = (first if i and chunks[i - 1] in self._kept else i) if chunk in self._kept else i + 1
            starts.append(first)
        seen = self._groups.first_seen
        fits = (n for n in range(len(chunks), 0, -1) if starts[n - 1] <= seen(n * CHUNK, floor) // CHUNK)
        return next(fits, 0)

    def take(self, chunks: Sequence[int], floor: int) -> dict[int, tuple[int, ...]]:
        """The window chunks that a sequence needs to go on behind `chunks`, by place, with a reference on each."""
        if not self._groups.sliding or not chunks:
            return {}
        first = self._groups.first_seen(len(chunks) * CHUNK, floor) // CHUNK
        found = {i: self._kept[chunks[i]] for i in range(first, len(chunks))}
        for i, window in found.items():
            self._table.incref(window)
            self._idle.pop(chunks[i], None)
        return found

    def release(self, window: tuple[int, ...]) -> None:
        """A sequence's references on the window chunks of one place end."""
        self._table.decref(window)
        chunk = self._of.get(window[0])
        if chunk is not None and self._table.refs(window[0]) == 1:
            self._idle[chunk] = None

    def forget(self, chunks: Iterable[int]) -> None:
        """These chunks left the tree: what was kept of their windows is given up."""
        for chunk in chunks:
            if (window := self._kept.pop(chunk, None)) is not None:
                del self._of[window[0]]
                self._idle.pop(chunk, None)
                self._table.decref(window)

    def forget_lost(self, lost: set[int]) -> None:
        """Gives up what is kept of windows with one of these chunks, whose rows were never written."""
        self.forget([chunk for chunk, window in self._kept.items() if not lost.isdisjoint(window)])

    def evict(self, count: int) -> None:
        """Gives up idle ones, the oldest first, until `count` chunks are free again or none is left."""
        while count > 0 and self._idle:
            self.forget([next(iter(self._idle))])
            count -= self._groups.sliding

    def check_integrity(self, known: Callable[[int], bool]) -> None:
        """Asserts that what is kept belongs to chunks that the tree knows, and that idle is what nobody else holds."""
        assert self._of == {window[0]: chunk for chunk, window in self._kept.items()}
        for chunk, window in self._kept.items():
            refs = {self._table.refs(one) for one in window}
            assert known(chunk) and len(window) == self._groups.sliding and len(refs) == 1
            assert (chunk in self._idle) == (refs == {1})
        assert self._idle.keys() <= self._kept.keys()
