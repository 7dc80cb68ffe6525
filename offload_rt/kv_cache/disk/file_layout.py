"""Memory layout of a KV cache on disk: arithmetic on bytes.

The file consists of equal slabs, each

    [layer, kv_head, slab_chunks, 64 tokens, 2 (K, V), d]

K and V of a token are adjacent, because they are always read together and a disk reads whole disk blocks. Tokens of
one layer and KV head are contiguous, because a head selects many tokens of a layer at once, often adjacent ones
(measured: `eval/results/disk`). KV blocks are aligned to disk blocks. A block with a home (`homes.py`) is in a file of
a store instead, as `[layer, kv_head, 64 tokens, 2 (K, V), d]`, with each layer padded to whole disk blocks.
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
    """Byte offsets and sizes in the file for an arena of shape `arena`."""

    arena: ArenaLayout

    @cached_property
    def pair_bytes(self) -> int:
        """Bytes of a KV entry: K and V of one token, layer and head."""
        return 2 * self.arena.row_bytes

    @cached_property
    def piece(self) -> int:
        """Bytes of one layer and head of a block, rounded up to whole disk blocks."""
        return whole_blocks(CHUNK * self.pair_bytes)

    @cached_property
    def layer(self) -> int:
        """Bytes of one layer of a block in its home (`homes.py`), rounded up to whole disk blocks."""
        return chunk_layer_bytes(CHUNK, self.arena)

    @cached_property
    def plane(self) -> int:
        """Bytes of one layer and head of a slab."""
        return self.arena.slab_chunks * self.piece

    @cached_property
    def slab(self) -> int:
        """Bytes of a slab."""
        return self.arena.layers * self.arena.kv_heads * self.plane

    @property
    def bytes(self) -> int:
        """Bytes of the whole file."""
        return self.arena.slabs * self.slab

    @property
    def pairs(self) -> int:
        """Maximum number of KV entries."""
        return self.arena.chunks * self.chunk_pairs

    @cached_property
    def chunk_pairs(self) -> int:
        """KV entries per block."""
        return self.arena.layers * self.arena.kv_heads * CHUNK

    def offset(self, slab: int, place: int, head: int, slot: int) -> int:
        """Return the byte where block slot `slot` of a slab begins, for the layer at `place` and a head."""
        return slab * self.slab + (place * self.arena.kv_heads + head) * self.plane + slot * self.piece

    def piece_offsets(self, chunk: int) -> Offsets:
        """Return the offsets of the pieces of a block, by layer and head."""
        slab, slot = divmod(chunk, self.arena.slab_chunks)
        planes = np.arange(self.arena.layers * self.arena.kv_heads, dtype=np.int64)
        found: Offsets = slab * self.slab + planes * self.plane + slot * self.piece
        return found

    def ids(self, place: int, chunks: Offsets, slots: Offsets, heads: Offsets) -> Offsets:
        """Return the ids of KV entries of the layer at `place`.

        `chunks`, `slots` (token within the block) and `heads` are int64 and are broadcast. The ids of a layer of a
        block are consecutive.
        """
        first: Offsets = (chunks * self.arena.layers + place) * (self.arena.kv_heads * CHUNK) + slots
        return first + heads * CHUNK

    def layers(self, ids: Offsets) -> Iterator[tuple[int, Offsets]]:
        """Group ids by layer. Yield the place of each layer and the indices into `ids`."""
        places = ids // (self.arena.kv_heads * CHUNK) % self.arena.layers
        for place in np.unique(places).tolist():
            yield place, np.flatnonzero(places == place)

    def ids_of(self, chunk: int, place: int) -> range:
        """Return the ids of all KV entries of one layer of a block."""
        count = self.arena.kv_heads * CHUNK
        first = (chunk * self.arena.layers + place) * count
        return range(first, first + count)

    def ids_of_token(self, chunk: int, place: int, slot: int) -> range:
        """Return the ids of one token in a layer of a block, one per head."""
        return self.ids_of(chunk, place)[slot::CHUNK]

    def offsets(self, ids: Offsets) -> Offsets:
        """Return the byte where each KV entry begins in the file."""
        chunks, rest = np.divmod(ids, self.chunk_pairs)
        slabs, chunk_slots = np.divmod(chunks, self.arena.slab_chunks)
        planes, slots = np.divmod(rest, CHUNK)
        found: Offsets = slabs * self.slab + planes * self.plane + chunk_slots * self.piece + slots * self.pair_bytes
        return found


def whole_blocks(size: int) -> int:
    """Round `size` bytes up to whole disk blocks."""
    return -(-size // BLOCK) * BLOCK


def chunk_layer_bytes(tokens: int, arena: ArenaLayout) -> int:
    """Return the bytes of a layer `[Hkv, n, 2 (K, V), width]` of a block of n tokens in its own file.

    Full blocks are padded to whole disk blocks, so that their KV can be read with direct I/O.
    """
    own = arena.kv_heads * tokens * 2 * arena.row_bytes
    return whole_blocks(own) if tokens == CHUNK else own


def fitting(layout_bytes: int, row_bytes: int) -> int:
    """Return the bytes of KV that fit into a file of `layout_bytes` bytes, without the padding to disk blocks."""
    own = CHUNK * 2 * row_bytes
    return layout_bytes * own // whole_blocks(own)
