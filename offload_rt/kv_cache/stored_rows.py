"""Reads and writes of KV in the arena, by block table, layer and token.

`pool.py` controls allocation and access.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..core import BLOCK_SIZE, BlockTable, KVPart
from .arena import Arena
from .disk.file_arena import FileArena
from .kv_format import KVFormat
from .layer_groups import LayerGroups


class SlotSpan(NamedTuple):
    """Contiguous token slots of one slab: `size` slots from slot `offset` on."""

    slab: int
    offset: int
    size: int


class StoredRows:
    """Reads and writes the KV of an arena by block table, layer and token, in the storage format `format`.

    The class neither allocates blocks nor counts references.
    """

    def __init__(self, arena: Arena | FileArena, groups: LayerGroups, format: KVFormat) -> None:
        self._arena, self.groups, self.format, self.layout = arena, groups, format, arena.layout

    @property
    def rows(self) -> torch.Tensor:
        """All stored vectors `[R, width]` by row id (`ArenaLayout`). Only for a pool in memory."""
        assert isinstance(self._arena, Arena)
        return self._arena.rows

    @property
    def file(self) -> FileArena | None:
        """The file arena of a pool on disk; None for a pool in memory."""
        return self._arena if isinstance(self._arena, FileArena) else None

    @property
    def lost(self) -> set[int]:
        return set() if self.file is None else self.file.lost

    def readable(self, blocks: BlockTable) -> bool:
        lost = self.lost
        return not lost or lost.isdisjoint([*blocks.ids, *(one for own in blocks.windows.values() for one in own)])

    def fill(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v `[Hkv, n, width]`, already encoded, as KV of the tokens [start, start + n) in one layer."""
        done = 0
        for span in self.spans(blocks, self.groups.group[layer], range(start, start + k.shape[1])):
            own = slice(done, done + span.size)
            self.fill_span(layer, span, k[:, own], v[:, own])
            done += span.size

    def fill_span(self, layer: int, span: SlotSpan, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write encoded k and v `[Hkv, size, width]` to the slots of `span` in one layer."""
        self._arena.fill(span.slab, self.groups.place[layer], span.offset, k, v)

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        [row] = self.stored(blocks, layer, range(source, source + 1))
        self.fill(blocks, layer, target, row.k, row.v)

    def blocks_of(self, blocks: BlockTable, group: int, places: range) -> list[int]:
        """Return the ids of a layer group's blocks at the indices `places` of the block table.

        Skip missing window blocks.
        """
        if group == 0:
            return blocks.ids[places.start : places.stop]
        return [blocks.windows[place][group - 1] for place in places if place in blocks.windows]

    def window_start(self, blocks: BlockTable, stop: int) -> int:
        """Return the first token t such that all tokens [t, stop) have slots in sliding-window layers."""
        place = -(-stop // BLOCK_SIZE)
        while place - 1 in blocks.windows:
            place -= 1
        return min(place * BLOCK_SIZE, stop)

    def kept(self, blocks: BlockTable, layer: int, tokens: range) -> range:
        """Return the part of `tokens` that has slots in `layer`.

        In a full-attention layer, these are all tokens. In a sliding-window layer, these are the last tokens.
        """
        if self.groups.group[layer] == 0:
            return tokens
        return range(max(tokens.start, self.window_start(blocks, tokens.stop)), tokens.stop)

    def spans(self, blocks: BlockTable, group: int, tokens: range) -> list[SlotSpan]:
        """Return the slots of `tokens` in a layer group, in token order, as the smallest number of contiguous spans."""
        assert tokens.step == 1 and tokens.start >= 0
        if not tokens:  # a sliding-window layer may have no slots for the requested tokens
            return []
        first = tokens.start // BLOCK_SIZE
        return self.spans_of(self.blocks_of(blocks, group, range(first, blocks_for(tokens.stop))), tokens)

    def spans_of(self, held: list[int], tokens: range) -> list[SlotSpan]:
        """Return the slots of `tokens` in the blocks `held`, which must be the blocks that contain `tokens`."""
        first = tokens.start // BLOCK_SIZE
        assert len(held) == -(-tokens.stop // BLOCK_SIZE) - first
        spans = []
        start = tokens.start
        while start < tokens.stop:
            index = start // BLOCK_SIZE - first
            slab, slot = divmod(held[index], self.layout.slab_blocks)
            run = _run_length(held[index : index + self.layout.slab_blocks - slot])
            stop = min(tokens.stop, (first + index + run) * BLOCK_SIZE)
            spans.append(SlotSpan(slab, slot * BLOCK_SIZE + start % BLOCK_SIZE, stop - start))
            start = stop
        return spans

    def view(self, layer: int, span: SlotSpan) -> KVPart:
        """Return the stored K and V `[Hkv, size, width]` of one layer and span: views in memory, copies from a disk."""
        return self._arena.view(span.slab, self.groups.place[layer], span.offset, span.size)

    def stored(self, blocks: BlockTable, layer: int, tokens: range) -> list[KVPart]:
        """Return the stored K and V `[Hkv, n, width]` of `tokens` in one layer, one part per contiguous run of slots.

        In memory, the vectors `[n, width]` of each head are contiguous. For several layers of a group, it is faster to
        call `spans` once and `view` for each layer.
        """
        return [self.view(layer, span) for span in self.spans(blocks, self.groups.group[layer], tokens)]

    def runs(self, blocks: BlockTable, layer: int, tokens: range) -> list[KVPart]:
        """Return K and V `[Hkv, n, d]` of `tokens` in one layer, one part per contiguous run of slots.

        The parts are views if vectors are stored in the model's dtype, else decoded copies.
        """
        parts = self.stored(blocks, layer, tokens)
        if self.format.exact:
            return parts
        return [KVPart(self.format.decode(part.k), self.format.decode(part.v)) for part in parts]

    def row(self, blocks: BlockTable, group: int, token: int) -> int:
        """Return the id of the row with a token's K for head 0 in the first layer of a layer group.

        Rows of other heads and layers, and rows of V, are at fixed distances from this row (`ArenaLayout`).
        """
        [block] = self.blocks_of(blocks, group, range(token // BLOCK_SIZE, token // BLOCK_SIZE + 1))
        slab, slot = divmod(block, self.layout.slab_blocks)
        return slab * self.layout.slab_rows + slot * BLOCK_SIZE + token % BLOCK_SIZE

    def row_base(self, blocks: BlockTable) -> torch.Tensor:
        """Return the row id at which each block of group 0 begins: K of head 0 in layer index 0, int64 `[blocks]`.

        In full-attention layer l, token t of head h is row
        `row_base[t // 64] + t % 64 + layout.row(groups.place[l], h, kv)`.
        """
        ids = torch.tensor(blocks.ids, dtype=torch.int64)
        slabs = ids // self.layout.slab_blocks
        return slabs * self.layout.slab_rows + (ids - slabs * self.layout.slab_blocks) * BLOCK_SIZE


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def _run_length(blocks: list[int]) -> int:
    """Return how many of the leading ids in `blocks` are consecutive numbers."""
    first = blocks[0]
    # Usually all ids are consecutive, and comparing lists runs in C.
    if blocks == list(range(first, first + len(blocks))):
        return len(blocks)
    return next(i for i, block in enumerate(blocks) if block != first + i)
