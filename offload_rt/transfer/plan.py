"""Computes row ids in the host pool from token indices."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..core import BLOCK_SIZE, VisibleTokens
from ..kernels.h2d_copy import to_device
from ..kv_cache.layout import ArenaLayout

BLOCK_BITS = BLOCK_SIZE.bit_length() - 1
assert BLOCK_SIZE == 1 << BLOCK_BITS


def attended_tokens(visible: VisibleTokens, selected: torch.Tensor) -> torch.Tensor:
    """Return the resident tokens of each KV head, followed by its `selected` tokens `[Hkv, n]`.

    The result is int64 `[Hkv, resident + n]`.
    """
    resident = _resident_tokens(visible.sinks, visible.recent)
    return torch.cat((to_device(resident, selected.device).expand(selected.shape[0], -1), selected), dim=1)


@lru_cache(maxsize=16)
def _resident_tokens(sinks: range, recent: range) -> torch.Tensor:
    return torch.tensor([*sinks, *recent], dtype=torch.int64)


def first_occurrences(ids: torch.Tensor) -> torch.Tensor:
    """For each id that repeats an earlier one, return the index of its first occurrence, and -1 for all others.

    `ids` and the result are int64 `[M]`. Negative ids are ignored. Shapes are static, and the host does not wait.
    """
    ordered, order = ids.sort(stable=True)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[1:] = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    heads = torch.arange(len(ids), device=ids.device).masked_fill(again, 0).cummax(0).values
    return torch.full_like(ids, -1).scatter_(0, order, order[heads].where(again, -1))


def row_ids(layout: ArenaLayout, base: torch.Tensor, storage_layer: int, tokens: torch.Tensor) -> torch.Tensor:
    """Return the row ids of `tokens` in the flat pool `[R, d]`, int64 `[planes, Hkv, n]`. The planes are K and V.

    Args:
        base: Row id at which each block begins, int64 `[blocks]`, on the device of `tokens`.
        storage_layer: Index of the storage layer within a block.
        tokens: Token indices, int64 `[Hkv, n]`.
    """
    # Add to each token index the offset of the token's block. This runs in every layer and step, so it must be fast.
    first, (kv_heads, n) = layout.row(storage_layer, 0, 0), tokens.shape
    heads = torch.arange(first, first + kv_heads * layout.head_rows, layout.head_rows, device=tokens.device)
    off = base - torch.arange(0, len(base) * BLOCK_SIZE, BLOCK_SIZE, device=base.device)
    keys = off.index_select(0, (tokens >> BLOCK_BITS).view(-1)).view(kv_heads, n)
    keys.add_(tokens).add_(heads.unsqueeze(1))
    return torch.stack((keys, keys + layout.value_offset)[: layout.planes])
