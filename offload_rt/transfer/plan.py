"""Computation of row indices in the host pool from token indices."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..core import BLOCK_SIZE, VisibleTokens
from ..kernels.h2d_copy import to_device
from ..kv_cache.layout import ArenaLayout

BLOCK_BITS = BLOCK_SIZE.bit_length() - 1
assert BLOCK_SIZE == 1 << BLOCK_BITS


def attended_tokens(visible: VisibleTokens, selected: torch.Tensor) -> torch.Tensor:
    """Return the tokens that each KV head attends to, int64 `[Hkv, resident + n]`.

    The resident tokens of `visible` come first, then the selected tokens `[Hkv, n]`.
    """
    resident = _resident_tokens(visible.sinks, visible.recent)
    return torch.cat((to_device(resident, selected.device).expand(selected.shape[0], -1), selected), dim=1)


@lru_cache(maxsize=16)
def _resident_tokens(sinks: range, recent: range) -> torch.Tensor:
    """Return the indices of the resident tokens, int64 `[resident]`. Cached for all layers of a step."""
    return torch.tensor([*sinks, *recent], dtype=torch.int64)


def first_occurrences(ids: torch.Tensor) -> torch.Tensor:
    """Find duplicate row indices, with static shapes and without synchronising with the host.

    Args:
        ids: Row indices, int64 `[M]`. Negative indices are ignored.

    Returns:
        For each duplicate, the position in `ids` of its first occurrence. -1 for first occurrences and ignored indices.
        int64 `[M]`.
    """
    ordered, order = ids.sort(stable=True)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[1:] = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    heads = torch.arange(len(ids), device=ids.device).masked_fill(again, 0).cummax(0).values
    return torch.full_like(ids, -1).scatter_(0, order, order[heads].where(again, -1))


def row_ids(layout: ArenaLayout, base: torch.Tensor, storage_layer: int, tokens: torch.Tensor) -> torch.Tensor:
    """Return the row indices of the K and V of `tokens` in the flat pool `[R, d]`.

    Args:
        layout: The layout of the pool.
        base: Row index at which each block begins (K of head 0 in the block's first layer), int64 `[blocks]`, on the
            device of `tokens`.
        storage_layer: Index of the storage layer within a block.
        tokens: Token indices, int64 `[Hkv, n]`.

    Returns:
        Row indices of K and V, int64 `[planes, Hkv, n]`.
    """
    # Add the offset of its block to each token index. This runs in every layer and step, so it must be fast.
    first, (kv_heads, n) = layout.row(storage_layer, 0, 0), tokens.shape
    heads = torch.arange(first, first + kv_heads * layout.head_rows, layout.head_rows, device=tokens.device)
    off = base - torch.arange(0, len(base) * BLOCK_SIZE, BLOCK_SIZE, device=base.device)
    keys = off.index_select(0, (tokens >> BLOCK_BITS).view(-1)).view(kv_heads, n)
    keys.add_(tokens).add_(heads.unsqueeze(1))
    return torch.stack((keys, keys + layout.value_offset)[: layout.planes])
