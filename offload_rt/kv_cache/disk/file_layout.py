"""Where a token's K and V lie in a pool on disk: pure arithmetic of bytes.

A file of equal slabs, each

    [layer, kv_head, slab_chunks, 64 tokens, 2 (K, V), d]

K and V of a token lie side by side, since whoever wants one wants the other and a disk reads whole blocks; tokens of
one layer and KV head lie in a long run, since a head selects many tokens of one layer at once, and neighbours often
(measured: `eval/results/disk`). Chunks begin on blocks of the disk. A chunk that has a home (`pool.homes`) lies in a
file of a store instead, layer by layer, `[layer, kv_head, 64 tokens, 2 (K, V), d]`, each layer in whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...core import CHUNK
from ..layout import ArenaLayout
from .direct_file import BLOCK
from .requests import Offsets


@dataclass(frozen=True)
class FileLayout:
    """Bytes of the file for an arena of the shape `arena`."""

    arena: ArenaLayout

    @cached_property
    def pair_bytes(self) -> int:
        """Of K and V of one token, layer and head."""
        return 2 * self.arena.row_bytes

    @cached_property
    def piece(self) -> int:
        """Of one layer and head of a chunk, whole blocks."""
        return whole_blocks(CHUNK * self.pair_bytes)

    @cached_property
    def layer(self) -> int:
        """Of one layer of a chunk in a file of its own (`pool.homes`), whole blocks."""
        return chunk_layer_bytes(CHUNK, self.arena)

    @cached_property
    def plane(self) -> int:
        """Of one layer and head of a slab."""
        return self.arena.slab_chunks * self.piece

    @cached_property
    def slab(self) -> int:
        """Of a slab."""
        return self.arena.layers * self.arena.kv_heads * self.plane

    @property
    def bytes(self) -> int:
        """Of the whole file."""
        return self.arena.slabs * self.slab

    @property
    def pairs(self) -> int:
        """Rows, K and V together, that there may be."""
        return self.arena.chunks * self.chunk_pairs

    @cached_property
    def chunk_pairs(self) -> int:
        """Rows, K and V together, of a chunk."""
        return self.arena.layers * self.arena.kv_heads * CHUNK

    def offset(self, slab: int, place: int, head: int, slot: int) -> int:
        """Where chunk slot `slot` of a slab begins, of the layer at `place` and a head."""
        return slab * self.slab + (place * self.arena.kv_heads + head) * self.plane + slot * self.piece

    def piece_offsets(self, chunk: int) -> Offsets:
        """Where the pieces of a chunk are, layer by layer and head by head."""
        slab, slot = divmod(chunk, self.arena.slab_chunks)
        planes = np.arange(self.arena.layers * self.arena.kv_heads, dtype=np.int64)
        found: Offsets = slab * self.slab + planes * self.plane + slot * self.piece
        return found

    def ids(self, place: int, chunks: Offsets, slots: Offsets, heads: Offsets) -> Offsets:
        """A number for each row of the layer at `place`, from its chunk, its slot there and its head, int64 that
        broadcast: those of a layer of a chunk follow each other."""
        first: Offsets = (chunks * self.arena.layers + place) * (self.arena.kv_heads * CHUNK) + slots
        return first + heads * CHUNK

    def layers(self, ids: Offsets) -> Iterator[tuple[int, Offsets]]:
        """The places of the layers of rows, and which of `ids` are of each."""
        places = ids // (self.arena.kv_heads * CHUNK) % self.arena.layers
        for place in np.unique(places).tolist():
            yield place, np.flatnonzero(places == place)

    def ids_of(self, chunk: int, place: int) -> range:
        """The numbers of all rows of one layer of a chunk."""
        count = self.arena.kv_heads * CHUNK
        first = (chunk * self.arena.layers + place) * count
        return range(first, first + count)

    def ids_of_token(self, chunk: int, place: int, slot: int) -> range:
        """The numbers of the rows, one of each head, of one token of a layer of a chunk."""
        return self.ids_of(chunk, place)[slot::CHUNK]

    def offsets(self, ids: Offsets) -> Offsets:
        """Where rows begin in the file."""
        chunks, rest = np.divmod(ids, self.chunk_pairs)
        slabs, chunk_slots = np.divmod(chunks, self.arena.slab_chunks)
        planes, slots = np.divmod(rest, CHUNK)
        found: Offsets = slabs * self.slab + planes * self.plane + chunk_slots * self.piece + slots * self.pair_bytes
        return found


def whole_blocks(size: int) -> int:
    """`size` bytes rounded up to blocks of the disk."""
    return -(-size // BLOCK) * BLOCK


def chunk_layer_bytes(tokens: int, arena: ArenaLayout) -> int:
    """Of a layer `[Hkv, n, 2 (K, V), width]` of a chunk of n tokens in a file of its own: whole blocks where it is a
    full one, so that its rows can be read there past the page cache."""
    own = arena.kv_heads * tokens * 2 * arena.row_bytes
    return whole_blocks(own) if tokens == CHUNK else own


def fitting(layout_bytes: int, row_bytes: int) -> int:
    """Of `layout_bytes` bytes of a file, those that rows can take: the rest rounds chunks up to blocks."""
    own = CHUNK * 2 * row_bytes
    return layout_bytes * own // whole_blocks(own)
