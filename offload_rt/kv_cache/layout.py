"""Layout of the KV cache in host memory: sizes and row ids. This module allocates no memory.

The pool is one tensor of slabs with the shape

    [storage layer, kv_head, 2 (K, V), slab_blocks * 64, d]

A *plane* is the K or the V of one head and storage layer in a slab: a contiguous matrix `[slab_blocks * 64, d]`. CPU
attention reads consecutive blocks of a plane in place, which is faster than reading strided rows. In return, fetching a
selected token takes two reads. With latent attention, the keys contain the values, so each head has only one plane.

Transfers address KV vectors by *row id*, the index of a row of `d` elements in the flat view `[R, d]` of the pool.

A full-attention layer takes one storage layer (see `layer_groups`). A sliding-window layer with a different `RowShape`
takes one or more. If its vectors have d elements, K and V of a head take one plane each. If its vectors have at most
d / 2 elements, K and V of a head share one plane: V is stored next to K in the same row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from ..core import BLOCK_SIZE, KVPart, ModelGeometry, RowShape
from ..errors import MemoryLimitError
from ..utils.units import format_size
from .layer_groups import LayerGroups

# Maximum number of token slots per slab. Each slab is pinned in one call. Runs of contiguous blocks do not cross slabs.
SLAB_TOKENS = 16_384

# Alignment of slabs in bytes, because pinned ranges must not share a page. 64 KiB is the largest base page (ARM
# servers).
PAGE = 1 << 16


@dataclass(frozen=True)
class ArenaLayout:
    """Shape of the arena. Block `c` is block `c % slab_blocks` of slab `c // slab_blocks`."""

    layers: int  # storage layers per block (`layer_groups`)
    kv_heads: int  # KV heads of a full-attention layer (Hkv)
    head_dim: int  # stored elements per vector of a full-attention layer (d)
    itemsize: int
    slab_blocks: int
    slabs: int
    window_rows: RowShape | None = None  # row shape of sliding-window layers; None if it is the same
    planes: int = 2  # per storage layer and head: 2 (K and V), or 1 if the keys contain the values

    def __post_init__(self) -> None:
        assert self.planes == 2 or (self.planes == 1 and self.window_rows is None)
        assert min(self.layers, self.kv_heads, self.head_dim, self.itemsize, self.slab_blocks, self.slabs) >= 1

    @classmethod
    def fit(
        cls, geometry: ModelGeometry, dtype: torch.dtype, limit_bytes: int, slab_tokens: int = SLAB_TOKENS
    ) -> ArenaLayout:
        """Return the layout with the most blocks within `limit_bytes`. Slabs are equal, with up to `slab_tokens` slots.

        Raises:
            MemoryLimitError: Not even one block fits.
        """
        assert slab_tokens >= BLOCK_SIZE
        layers = LayerGroups.from_geometry(geometry).layers
        block_bytes = layers * BLOCK_SIZE * geometry.full_rows.bytes(dtype)
        blocks = limit_bytes // block_bytes
        if blocks < 1:
            raise MemoryLimitError(
                f"a host pool of {format_size(limit_bytes)} ({limit_bytes} bytes) cannot hold one block: {BLOCK_SIZE} "
                f"tokens of this model's KV cache take {format_size(block_bytes)} ({block_bytes} bytes); set "
                f"host_memory to that or more"
            )
        # All slabs have the same size, so up to `slabs - 1` blocks that would fit within the limit are not used.
        slabs = math.ceil(blocks / (slab_tokens // BLOCK_SIZE))
        shape = geometry.kv_heads, geometry.head_dim, dtype.itemsize
        return cls(layers, *shape, blocks // slabs, slabs, geometry.window_rows, geometry.planes)

    @property
    def blocks(self) -> int:
        return self.slabs * self.slab_blocks

    @property
    def row_bytes(self) -> int:
        """Size in bytes of one K or V vector, for one token, layer and head."""
        return self.head_dim * self.itemsize

    @cached_property
    def entry_bytes(self) -> int:
        """Size in bytes of a KV entry, the K and V of one token, layer and head."""
        return self.planes * self.row_bytes

    @property
    def block_bytes(self) -> int:
        return self.layers * self.kv_heads * BLOCK_SIZE * self.entry_bytes

    @cached_property
    def plane_rows(self) -> int:
        return self.slab_blocks * BLOCK_SIZE

    @cached_property
    def value_offset(self) -> int:
        """Distance in rows from the K to the V of a token; 0 if the keys contain the values."""
        return (self.planes - 1) * self.plane_rows

    @cached_property
    def head_rows(self) -> int:
        return self.planes * self.plane_rows

    @property
    def layer_rows(self) -> int:
        return self.kv_heads * self.head_rows

    @property
    def slab_rows(self) -> int:
        """Number of rows of a slab, including padding to whole pages."""
        unit = math.lcm(PAGE, self.row_bytes) // self.row_bytes
        return math.ceil(self.layers * self.layer_rows / unit) * unit

    @property
    def rows(self) -> int:
        """Number of rows of the arena, including padding (R)."""
        return self.slabs * self.slab_rows

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    def row(self, storage_layer: int, head: int, plane: int, offset: int = 0) -> int:
        """Return a KV head's row id for token slot `offset`, relative to the slab. `plane` is 0 for K and 1 for V."""
        assert plane < self.planes
        return storage_layer * self.layer_rows + head * self.head_rows + plane * self.plane_rows + offset

    @cached_property
    def window_ratio(self) -> int:
        """Number of sliding-window-layer vectors that fit in one row."""
        return 1 if self.window_rows is None else self.head_dim // self.window_rows.head_dim

    def window_part(self, planes: torch.Tensor) -> KVPart:
        """Return views of K and V `[Hkv, n, width]` in `planes` `[p, n, d]`, the planes of a sliding-window layer.

        Use this only for layers whose row shape differs from that of full-attention layers.
        """
        assert self.window_rows is not None
        heads, width = self.window_rows.kv_heads, self.window_rows.head_dim
        if self.window_ratio > 1:
            return KVPart(planes[:heads, :, :width], planes[:heads, :, width : 2 * width])
        return KVPart(planes[: 2 * heads : 2], planes[1 : 2 * heads : 2])

    def vectors(self, storage_layer: int, *, window: bool) -> list[list[int]]:
        """Return the ids `[planes][Hkv]` of a layer's vectors in the first token slot of a slab, first K and then V.

        `storage_layer` is the first storage layer of the layer, and `window` is True for a sliding-window layer. If
        sliding-window layers have a different row shape, their ids count vectors of their own width instead of rows.
        """
        if not window or self.window_rows is None:
            heads = range(self.kv_heads)
            return [[self.row(storage_layer, head, plane) for head in heads] for plane in range(self.planes)]
        first, each, heads = storage_layer * self.layer_rows, self.plane_rows, range(self.window_rows.kv_heads)
        if self.window_ratio > 1:
            return [[self.window_ratio * (first + head * each) + kv for head in heads] for kv in (0, 1)]
        return [[first + (2 * head + kv) * each for head in heads] for kv in (0, 1)]


def fill_planes(planes: torch.Tensor, dim: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """Copy k and v to `planes`, where axis `dim` selects K or V. If there is only one plane, only k is copied."""
    for plane, rows in zip(planes.unbind(dim), (k, v)[: planes.shape[dim]], strict=True):
        plane.copy_(rows)
