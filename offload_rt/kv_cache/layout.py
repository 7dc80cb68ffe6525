"""Where a token's K and V lie in the host pool: pure arithmetic of rows and bytes.

The pool is one tensor of equal slabs, each

    [layer, kv_head, 2 (K, V), slab_chunks * 64, d]

so that over a run of neighbouring chunk slots of one slab, K of one (layer, head) is a single contiguous matrix
`[tokens, d]`, and so is V: attention on a CPU reads it in place. With K and V of a token side by side, the
products of attention would walk over strided rows, which is slower. The price: a selected token is two reads
of `d` numbers instead of one of `2d`, and one layer of one chunk is `2 * Hkv` contiguous pieces of `64 * d` numbers
instead of one.

Everything that moves rows addresses them by *row id*: the index of `d` numbers in the flat view `[R, d]` of the pool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..core import CHUNK, ModelGeometry
from ..errors import MemoryLimitError
from ..utils.units import format_size
from .layer_groups import LayerGroups

SLAB_TOKENS = 16_384
"""Most token slots of a slab: what is pinned in one call, and the longest possible contiguous run."""

PAGE = 1 << 16
"""Slabs start on page boundaries, since two pinned ranges must not share a page; the largest base page in use is 64 KiB
(some ARM servers)."""


@dataclass(frozen=True)
class ArenaLayout:
    """Shape of the arena. Chunk `c` is slot `c % slab_chunks` of slab `c // slab_chunks`.

    layers: of a chunk (`layer_groups`; L of a model none of whose layers slide); kv_heads, head_dim: of the model (Hkv,
    d); itemsize: bytes of one number;
    slab_chunks: chunk slots of a slab; slabs: how many slabs.
    """

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int
    slab_chunks: int
    slabs: int

    def __post_init__(self) -> None:
        assert min(self.layers, self.kv_heads, self.head_dim, self.itemsize, self.slab_chunks, self.slabs) >= 1

    @classmethod
    def fit(
        cls, geometry: ModelGeometry, dtype: torch.dtype, limit_bytes: int, slab_tokens: int = SLAB_TOKENS
    ) -> ArenaLayout:
        """The layout with the most chunks within `limit_bytes`, in equal slabs of at most `slab_tokens` slots: fewer
        chunks than there are slabs stay unused. MemoryLimitError where not even one chunk fits."""
        assert slab_tokens >= CHUNK
        layers = LayerGroups.of(geometry).layers
        chunk_bytes = geometry.kv_bytes(CHUNK, dtype) // geometry.layers * layers
        chunks = limit_bytes // chunk_bytes
        if chunks < 1:
            raise MemoryLimitError(
                f"a host pool of {format_size(limit_bytes)} ({limit_bytes} bytes) cannot hold one chunk: {CHUNK} "
                f"tokens of this model's KV cache take {format_size(chunk_bytes)} ({chunk_bytes} bytes); set "
                f"host_memory to that or more"
            )
        slabs = math.ceil(chunks / (slab_tokens // CHUNK))
        return cls(layers, geometry.kv_heads, geometry.head_dim, dtype.itemsize, chunks // slabs, slabs)

    @property
    def chunks(self) -> int:
        """Chunks of the whole arena."""
        return self.slabs * self.slab_chunks

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: K or V of one token, layer and head."""
        return self.head_dim * self.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of K and V of one chunk in all its layers."""
        return 2 * self.layers * self.kv_heads * CHUNK * self.row_bytes

    @property
    def plane_rows(self) -> int:
        """Rows of one plane (K or V of one layer and head in one slab): also the distance from a K row to its V row."""
        return self.slab_chunks * CHUNK

    @property
    def head_rows(self) -> int:
        """Rows between the same token of neighbouring heads."""
        return 2 * self.plane_rows

    @property
    def layer_rows(self) -> int:
        """Rows between the same token of neighbouring layers."""
        return self.kv_heads * self.head_rows

    @property
    def slab_rows(self) -> int:
        """Rows between the same slot of neighbouring slabs: L layers, padded to whole pages."""
        unit = math.lcm(PAGE, self.row_bytes) // self.row_bytes
        return math.ceil(self.layers * self.layer_rows / unit) * unit

    @property
    def rows(self) -> int:
        """R, rows of the whole arena, padding included."""
        return self.slabs * self.slab_rows

    @property
    def bytes(self) -> int:
        """Address space of the arena, padding included (less than a page and a row for each slab)."""
        return self.rows * self.row_bytes

    def row(self, place: int, head: int, kv: int, offset: int = 0) -> int:
        """Row of token slot `offset` of a slab, from the slab's first row; place: the layer's among a chunk's layers;
        kv is 0 for K and 1 for V."""
        return place * self.layer_rows + head * self.head_rows + kv * self.plane_rows + offset
