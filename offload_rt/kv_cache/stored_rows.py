"""Where the rows of block tables lie in the arena, and how they are read and written there. Who may do so, and when, is
the pool's to say (`pool.py`)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..core import CHUNK, BlockTable, KVPart
from .arena import Arena
from .disk.file_arena import FileArena
from .kv_format import KVFormat
from .layer_groups import LayerGroups
from .layout import ArenaLayout


class Span(NamedTuple):
    """Neighbouring token slots of one slab: `size` of them from slot `offset` on."""

    slab: int
    offset: int
    size: int


class Rows(Protocol):
    """Where rows lie: in memory (`Arena`) or in a file (`FileArena`)."""

    layout: ArenaLayout
    active: int

    def activate(self) -> None:
        """Makes the next slab ready. Raises MemoryLimitError."""
        ...

    def view(self, slab: int, place: int, offset: int, size: int) -> KVPart:
        """K and V `[Hkv, size, width]` of neighbouring slots of a slab in one layer, to be read."""
        ...

    def fill(self, slab: int, place: int, offset: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Rows k, v `[Hkv, n, width]` take neighbouring slots of a slab in one layer."""
        ...

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies the first `tokens` slots of chunk `source` to chunk `target`, all layers."""
        ...


class StoredRows:
    """The rows of an arena by block table, layer and token, as `format` stores them. It holds no chunk and knows no
    holder; mutated by `write`, `fill` and `move`."""

    def __init__(self, arena: Rows, groups: LayerGroups, format: KVFormat) -> None:
        self._arena, self.groups, self.format, self.layout = arena, groups, format, arena.layout

    @property
    def rows(self) -> torch.Tensor:
        """`[R, width]`, the memory by row id (`ArenaLayout`) of a pool that is in memory, as `format` stores it."""
        assert isinstance(self._arena, Arena)
        return self._arena.rows

    @property
    def file(self) -> FileArena | None:
        """Where the rows of a pool on disk are."""
        return self._arena if isinstance(self._arena, FileArena) else None

    @property
    def lost(self) -> set[int]:
        """Chunks with rows that a disk did not take, as far as is known yet."""
        return set() if self.file is None else self.file.lost

    def readable(self, blocks: BlockTable) -> bool:
        """Whether all rows of a block table can be read, as far as is known yet."""
        lost = self.lost
        return not lost or lost.isdisjoint([*blocks.chunks, *(one for own in blocks.windows.values() for one in own)])

    def write(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """K and V of tokens [start, start + n) of one layer, k, v `[Hkv, n, d]` on any device; blocks until copied."""
        self.fill(blocks, layer, start, self.format.encode(k), self.format.encode(v))

    def fill(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """`write` of rows k, v `[Hkv, n, width]` that are as they are stored."""
        done = 0
        for span in self.spans(blocks, self.groups.group[layer], range(start, start + k.shape[1])):
            own = slice(done, done + span.size)
            self.fill_span(layer, span, k[:, own], v[:, own])
            done += span.size

    def fill_span(self, layer: int, span: Span, k: torch.Tensor, v: torch.Tensor) -> None:
        """Rows k, v `[Hkv, size, width]`, as they are stored, take the slots of a span in one layer."""
        self._arena.fill(span.slab, self.groups.place[layer], span.offset, k, v)

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """The rows of slot `source` also take slot `target`, as they are stored."""
        [row] = self.stored(blocks, layer, range(source, source + 1))
        self.fill(blocks, layer, target, row.k, row.v)

    def chunks_of(self, blocks: BlockTable, group: int, places: range) -> list[int]:
        """Ids of the chunks that hold the rows of a group's layers in `places` (64 tokens each), where there are
        any."""
        if group == 0:
            return blocks.chunks[places.start : places.stop]
        return [blocks.windows[place][group - 1] for place in places if place in blocks.windows]

    def window_start(self, blocks: BlockTable, stop: int) -> int:
        """The first token from which on to `stop` sliding layers have slots without a gap."""
        place = -(-stop // CHUNK)
        while place - 1 in blocks.windows:
            place -= 1
        return min(place * CHUNK, stop)

    def kept(self, blocks: BlockTable, layer: int, tokens: range) -> range:
        """The tokens at the end of `tokens` that a layer has slots for: all, or of a sliding layer those that the
        windows of later tokens will show."""
        if self.groups.group[layer] == 0:
            return tokens
        return range(max(tokens.start, self.window_start(blocks, tokens.stop)), tokens.stop)

    def spans(self, blocks: BlockTable, group: int, tokens: range) -> list[Span]:
        """Return where the token slots `tokens` lie in a group's layers, in token order, in as few spans as possible.
        An empty range has no span: it may lie in a block for which a sliding layer has no slots."""
        assert tokens.step == 1 and tokens.start >= 0
        if not tokens:
            return []
        first = tokens.start // CHUNK
        held = self.chunks_of(blocks, group, range(first, chunks_for(tokens.stop)))
        assert len(held) == chunks_for(tokens.stop) - first
        spans = []
        start = tokens.start
        while start < tokens.stop:
            index = start // CHUNK - first
            slab, slot = divmod(held[index], self.layout.slab_chunks)
            run = _run_length(held[index : index + self.layout.slab_chunks - slot])
            stop = min(tokens.stop, (first + index + run) * CHUNK)
            spans.append(Span(slab, slot * CHUNK + start % CHUNK, stop - start))
            start = stop
        return spans

    def view(self, layer: int, span: Span) -> KVPart:
        """K and V `[Hkv, size, width]` of one layer and span: views of a pool in memory, else copies."""
        return self._arena.view(span.slab, self.groups.place[layer], span.offset, span.size)

    def stored(self, blocks: BlockTable, layer: int, tokens: range) -> list[KVPart]:
        """K and V of the token slots `tokens` of one layer, as `view` gives them, `[Hkv, n, width]` in token order, one
        for each contiguous run: in memory each head's `[n, width]` is contiguous. For many layers of a group:
        `spans` once, then `view`."""
        return [self.view(layer, span) for span in self.spans(blocks, self.groups.group[layer], tokens)]

    def runs(self, blocks: BlockTable, layer: int, tokens: range) -> list[KVPart]:
        """`stored` as numbers `[Hkv, n, d]`: the views themselves where the format is exact, else decoded copies."""
        parts = self.stored(blocks, layer, tokens)
        if self.format.exact:
            return parts
        return [KVPart(self.format.decode(part.k), self.format.decode(part.v)) for part in parts]

    def row_base(self, blocks: BlockTable) -> torch.Tensor:
        """int64 `[chunks]`: the row id of the first token of each chunk of group 0 at place 0, head 0, K. Token t of a
        layer that sees everything, head h, is row `row_base[t // 64] + t % 64 + layout.row(groups.place[l], h, kv)`."""
        chunks = torch.tensor(blocks.chunks, dtype=torch.int64)
        slabs = chunks // self.layout.slab_chunks
        return slabs * self.layout.slab_rows + (chunks - slabs * self.layout.slab_chunks) * CHUNK


def chunks_for(tokens: int) -> int:
    """Chunks that hold `tokens` tokens."""
    return -(-tokens // CHUNK)


def _run_length(chunks: list[int]) -> int:
    """How many of `chunks`, from the first on, have successive ids. The whole list is compared first, which is much
    the commonest case and runs at the speed of C."""
    first = chunks[0]
    if chunks == list(range(first, first + len(chunks))):
        return len(chunks)
    return next(i for i, chunk in enumerate(chunks) if chunk != first + i)
