"""From token indices to rows of the host pool: pure arithmetic on ids."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..core import CHUNK, Visible
from ..kernels.h2d_copy import to_device
from ..kv_cache.layout import ArenaLayout

CHUNK_BITS = CHUNK.bit_length() - 1
assert CHUNK == 1 << CHUNK_BITS


def attended_tokens(visible: Visible, selected: torch.Tensor) -> torch.Tensor:
    """Resident and selected token indices together: int64 `[Hkv, resident + n]` from selected `[Hkv, n]`."""
    resident = _resident_tokens(visible.sinks, visible.recent)
    return torch.cat((to_device(resident, selected.device).expand(selected.shape[0], -1), selected), dim=1)


@lru_cache(maxsize=16)
def _resident_tokens(sinks: range, recent: range) -> torch.Tensor:
    """int64 `[resident]`: the same for every layer of a step."""
    return torch.tensor([*sinks, *recent], dtype=torch.int64)


def first_askers(ids: torch.Tensor) -> torch.Tensor:
    """Who asks for a row that somebody before asked for already: int64 `[M]` from row ids int64 `[M]` (negative: no
    row), the place of the first that has the same id; negative where that is the place itself, or no row is meant.
    Static shapes, nothing asked of the host."""
    ordered, order = ids.sort(stable=True)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[1:] = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    heads = torch.arange(len(ids), device=ids.device).masked_fill(again, 0).cummax(0).values
    return torch.full_like(ids, -1).scatter_(0, order, order[heads].where(again, -1))


def key_rows(layout: ArenaLayout, base: torch.Tensor, place: int, tokens: torch.Tensor) -> torch.Tensor:
    """Rows of the flat arena `[R, d]` that hold K of `tokens`; V of each lies `layout.plane_rows` behind.

    place: the layer's, among the layers of a chunk.
    base: int64 `[chunks]`, the arena row of each chunk's first token (place 0, head 0, K), on the device of `tokens`.
    tokens: int64 `[Hkv, n]` token indices. Returns int64 `[Hkv, n]`.

    A token's row is the token and what its chunk is off by: this runs for every layer and step.
    """
    first, (kv_heads, n) = layout.row(place, 0, 0), tokens.shape
    heads = torch.arange(first, first + kv_heads * layout.head_rows, layout.head_rows, device=tokens.device)
    off = base - torch.arange(0, len(base) * CHUNK, CHUNK, device=base.device)
    rows = off.index_select(0, (tokens >> CHUNK_BITS).view(-1)).view(kv_heads, n)
    return rows.add_(tokens).add_(heads.unsqueeze(1))


def row_ids(layout: ArenaLayout, base: torch.Tensor, place: int, tokens: torch.Tensor) -> torch.Tensor:
    """`key_rows` and the rows of V: int64 `[2, Hkv, n]`."""
    keys = key_rows(layout, base, place, tokens)
    return torch.stack((keys, keys + layout.plane_rows))
