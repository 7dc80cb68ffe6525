"""Access to KV in the arena by block table, layer and token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..core import BLOCK_SIZE, BlockTable, KVPart
from .arena import Arena
from .disk.file_arena import FileArena
from .kv_format import KVFormat
from .layer_groups import LayerGroups


class SlotSpan(NamedTuple):
    """The token slots [offset, offset + size) of a slab."""

    slab: int
    offset: int
    size: int


class StoredRows:
    """Base class of `HostPool` that reads and writes KV by block table, layer and token.

    `format` is the storage format of full-attention layers.
    """

    def __init__(self, arena: Arena | FileArena, groups: LayerGroups, formats: tuple[KVFormat, KVFormat]) -> None:
        self._arena, self.groups, self.layout = arena, groups, arena.layout
        self.format, self._window_format = formats

    @property
    def rows(self) -> torch.Tensor:
        """All stored vectors `[R, width]` of a pool in memory, indexed by row id (see `layout.py`)."""
        assert isinstance(self._arena, Arena)
        return self._arena.rows

    def format_of(self, layer: int) -> KVFormat:
        return self._window_format if self.groups.group[layer] else self.format

    def token_bytes(self, layer: int) -> int:
        """Return the size in bytes that the K and V of one token take in a layer, in the storage format."""
        own = self.layout.window_rows if self.groups.group[layer] else None
        return self.layout.kv_heads * self.layout.entry_bytes if own is None else own.bytes(self.format.storage)

    def vectors(self, layer: int) -> torch.Tensor:
        """Return `rows` as a view `[vectors, width]`, with the vector width of `layer`."""
        return self.rows.view(-1, self.format_of(layer).width)

    @property
    def file(self) -> FileArena | None:
        """File of a pool on disk; None for a pool in memory."""
        return self._arena if isinstance(self._arena, FileArena) else None

    @property
    def lost(self) -> set[int]:
        return set() if self.file is None else self.file.lost

    def readable(self, blocks: BlockTable) -> bool:
        lost = self.lost
        return not lost or lost.isdisjoint([*blocks.ids, *(one for own in blocks.windows.values() for one in own)])

    def fill(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write encoded k and v `[Hkv, n, width]` as the KV of tokens [start, start + n).

        If the keys contain the values, v is ignored.
        """
        done = 0
        for span in self.spans(blocks, self.groups.group[layer], range(start, start + k.shape[1])):
            own = slice(done, done + span.size)
            self.fill_span(layer, span, k[:, own], v[:, own])
            done += span.size

    def fill_span(self, layer: int, span: SlotSpan, k: torch.Tensor, v: torch.Tensor) -> None:
        if not self._has_own_row_shape(layer):
            self.fill_storage_layer(self.groups.storage_layer[layer], span, k, v)
            return
        if self.file is None:
            part = self.view(layer, span)
            part.k.copy_(k)
            part.v.copy_(v)
            return
        for storage_layer, part in self._divided(layer, k, v):
            self.fill_storage_layer(storage_layer, span, part.k, part.v)

    def fill_storage_layer(self, storage_layer: int, span: SlotSpan, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write K and V `[Hkv, size, width]` of one storage layer to the token slots of `span`."""
        self._arena.fill(span.slab, storage_layer, span.offset, k, v)

    def view_storage_layers(self, layer: int, span: SlotSpan) -> Iterator[tuple[int, KVPart]]:
        """Yield the index and the K and V `[Hkv, size, width]` of each storage layer that belongs to `layer`.

        K and V have the row shape of full-attention layers. Unused rows are zero.
        """
        part = self.view(layer, span)
        if self._has_own_row_shape(layer):
            return self._divided(layer, part.k, part.v)
        return iter([(self.groups.storage_layer[layer], part)])

    def _divided(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[int, KVPart]]:
        storage_layers, layout = self.groups.storage_layers(layer), self.layout
        shape = (len(storage_layers), layout.kv_heads, 2, k.shape[1], layout.head_dim)
        planes = torch.zeros(shape, dtype=self.format.storage)
        part = self.layout.window_part(planes.flatten(0, 2))
        part.k.copy_(k)
        part.v.copy_(v)
        for storage_layer, own in zip(storage_layers, planes, strict=True):
            yield storage_layer, KVPart(own[:, 0], own[:, 1])

    def _has_own_row_shape(self, layer: int) -> bool:
        return self.layout.window_rows is not None and self.groups.group[layer] > 0

    def blocks_of(self, blocks: BlockTable, group: int, indices: range) -> list[int]:
        """Return the block ids of a layer group at `indices` in the block table. Missing window blocks are omitted."""
        if group == 0:
            return blocks.ids[indices.start : indices.stop]
        return [blocks.windows[index][group - 1] for index in indices if index in blocks.windows]

    def window_start(self, blocks: BlockTable, stop: int) -> int:
        """Return the smallest t such that all tokens [t, stop) have slots in sliding-window layers."""
        index = -(-stop // BLOCK_SIZE)
        while index - 1 in blocks.windows:
            index -= 1
        return min(index * BLOCK_SIZE, stop)

    def stored_range(self, blocks: BlockTable, layer: int, tokens: range) -> range:
        """Return the range of `tokens` whose KV is stored. In sliding-window layers, these are only the last tokens."""
        if self.groups.group[layer] == 0:
            return tokens
        return range(max(tokens.start, self.window_start(blocks, tokens.stop)), tokens.stop)

    def spans(self, blocks: BlockTable, group: int, tokens: range) -> list[SlotSpan]:
        """Return the slots of `tokens` in a layer group, in token order and in as few contiguous spans as possible."""
        assert tokens.step == 1 and tokens.start >= 0
        if not tokens:  # A sliding-window layer may have no slots for the requested tokens.
            return []
        first = tokens.start // BLOCK_SIZE
        block_ids = self.blocks_of(blocks, group, range(first, blocks_for(tokens.stop)))
        assert len(block_ids) == blocks_for(tokens.stop) - first
        spans = []
        start = tokens.start
        while start < tokens.stop:
            index = start // BLOCK_SIZE - first
            slab, slot = divmod(block_ids[index], self.layout.slab_blocks)
            run = _run_length(block_ids[index : index + self.layout.slab_blocks - slot])
            stop = min(tokens.stop, (first + index + run) * BLOCK_SIZE)
            spans.append(SlotSpan(slab, slot * BLOCK_SIZE + start % BLOCK_SIZE, stop - start))
            start = stop
        return spans

    def view(self, layer: int, span: SlotSpan) -> KVPart:
        """Return the stored K and V `[Hkv, size, width]`: views if the pool is in memory, copies if it is on disk."""
        if not self._has_own_row_shape(layer):
            return self._arena.view(span.slab, self.groups.storage_layer[layer], span.offset, span.size)
        planes = self._arena.planes_of(span.slab, self.groups.storage_layers(layer), span.offset, span.size)
        return self.layout.window_part(planes)

    def stored(self, blocks: BlockTable, layer: int, tokens: range) -> list[KVPart]:
        """Return the stored K and V `[Hkv, n, width]` of `tokens`, one part per contiguous span of slots.

        To read several layers of a group, it is faster to call `spans` once and then `view` for each layer.
        """
        return [self.view(layer, span) for span in self.spans(blocks, self.groups.group[layer], tokens)]

    def shares_rows(self, layer: int) -> bool:
        """Return whether K and V of a token share one row of the arena (see `ArenaLayout.window_part`)."""
        return self._has_own_row_shape(layer) and self.layout.window_ratio > 1

    def planes(self, blocks: BlockTable, layer: int, tokens: range) -> list[tuple[torch.Tensor, ...]]:
        """Return the stored KV of `tokens`, one tuple of tensors per span. Each head is contiguous in memory.

        The tuple is (K, V), or (K,) if the keys contain the values. If K and V share rows, the tuple has one tensor
        `[Hkv, n, d]` with these rows.
        """
        if not self.shares_rows(layer):
            return [(part.k, part.v)[: self.layout.planes] for part in self.stored(blocks, layer, tokens)]
        assert self.layout.window_rows is not None
        storage_layers, heads = self.groups.storage_layers(layer), self.layout.window_rows.kv_heads
        spans = self.spans(blocks, self.groups.group[layer], tokens)
        return [(self._arena.planes_of(span.slab, storage_layers, span.offset, span.size)[:heads],) for span in spans]

    def in_planes(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return encoded k and v `[Hkv, n, width]` in the format of `planes`."""
        if not self.shares_rows(layer):
            return (k, v)[: self.layout.planes]
        return (F.pad(torch.cat((k, v), dim=-1), (0, self.layout.head_dim - 2 * k.shape[-1])),)

    def runs(self, blocks: BlockTable, layer: int, tokens: range) -> list[KVPart]:
        """Return decoded K and V `[Hkv, n, d]` of `tokens`, one part per contiguous span of slots.

        The parts are views if the vectors are stored in the model's dtype.
        """
        parts = self.stored(blocks, layer, tokens)
        if self.format.exact:
            return parts
        return [part.map(self.format_of(layer).decode) for part in parts]

    def row(self, blocks: BlockTable, group: int, token: int) -> int:
        """Return the row id of the key of `token`, for head 0 in the first layer of a layer group.

        The rows for other heads, other layers and V are at fixed distances from it (see `ArenaLayout.vectors`). If
        sliding-window layers have a different row shape, the ids in their groups count vectors of their own width.
        """
        [block] = self.blocks_of(blocks, group, range(token // BLOCK_SIZE, token // BLOCK_SIZE + 1))
        slab, slot = divmod(block, self.layout.slab_blocks)
        row = slab * self.layout.slab_rows + slot * BLOCK_SIZE + token % BLOCK_SIZE
        return row * self.layout.window_ratio if group else row

    def row_base(self, blocks: BlockTable) -> torch.Tensor:
        """Return the row id at which each block of group 0 begins, int64 `[blocks]`.

        This is the first row with K of head 0 in storage layer 0. In full-attention layer l, the row id of token t and
        head h is `row_base[t // 64] + t % 64 + layout.row(groups.storage_layer[l], h, plane)`.
        """
        ids = torch.tensor(blocks.ids, dtype=torch.int64)
        slabs = ids // self.layout.slab_blocks
        return slabs * self.layout.slab_rows + (ids - slabs * self.layout.slab_blocks) * BLOCK_SIZE


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def _run_length(blocks: list[int]) -> int:
    """Return how many of the leading ids are consecutive."""
    first = blocks[0]
    # Fast path: usually, all ids are consecutive, and list comparison runs in C.
    if blocks == list(range(first, first + len(blocks))):
        return len(blocks)
    return next(i for i, block in enumerate(blocks) if block != first + i)
