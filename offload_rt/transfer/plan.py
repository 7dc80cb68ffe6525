"""From token indices to rows of the host pool: pure arithmetic on ids."""

from __future__ import annotations

import torch

from ..core import CHUNK, Visible
from ..pool.layout import ArenaLayout

CHUNK_BITS = CHUNK.bit_length() - 1
assert CHUNK == 1 << CHUNK_BITS


def attended_tokens(visible: Visible, selected: torch.Tensor) -> torch.Tensor:
    """Resident and selected token indices together: int64 `[Hkv, resident + n]` from selected `[Hkv, n]`."""
    heads = selected.shape[0]
    resident = torch.tensor([*visible.sinks, *visible.recent], dtype=torch.int64, device=selected.device)
    return torch.cat((resident.expand(heads, -1), selected), dim=1)


def first_askers(ids: torch.Tensor) -> torch.Tensor:
    """Who asks for a row that somebody before asked for already: int64 `[M]` from row ids int64 `[M]` (negative: no
    row), the place of the first that has the same id; negative where that is the place itself, or no row is meant.
    Static shapes, nothing asked of the host."""
    ordered, order = ids.sort(stable=True)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[1:] = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    heads = torch.arange(len(ids), device=ids.device).masked_fill(again, 0).cummax(0).values
    return torch.full_like(ids, -1).scatter_(0, order, order[heads].where(again, -1))


def row_ids(layout: ArenaLayout, base: torch.Tensor, layer: int, tokens: torch.Tensor) -> torch.Tensor:
    """Rows of the flat arena `[R, d]` that hold K and V of `tokens`.

    base: int64 `[chunks]`, the arena row of each chunk's first token (layer 0, head 0, K), on the device of `tokens`.
    tokens: int64 `[Hkv, n]` token indices. Returns int64 `[2, Hkv, n]`: rows of K, rows of V.

    Shifts and masks instead of divisions, and one addition for both planes: this runs for every layer and step.
    """
    kv_heads, first, plane = tokens.shape[0], layout.row(layer, 0, 0), layout.plane_rows
    planes = torch.arange(first, first + 2 * kv_heads * plane, plane, device=tokens.device).view(kv_heads, 2, 1)
    slots = torch.take(base, tokens >> CHUNK_BITS).add_(tokens & (CHUNK - 1))
    return slots + planes.transpose(0, 1).contiguous()
