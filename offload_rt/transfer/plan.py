"""From token indices to rows of the host pool: pure arithmetic on ids."""

from __future__ import annotations

from collections.abc import Sequence

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


def union_rows(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
    """Rows that several sequences ask for, each once.

    rows: row ids int64 `[Hkv, n]` of each sequence. Returns the union int64 `[U]`; for each sequence the places
    `[Hkv, n]` of its rows in the union; and how many rows each is the first to ask for (they sum to U).
    """
    flat = torch.cat([ids.flatten() for ids in rows])
    union, places = torch.unique(flat, return_inverse=True)
    sizes = [ids.numel() for ids in rows]
    owners = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(sizes))
    first = torch.full((len(union),), len(rows)).scatter_reduce_(0, places, owners, "amin")
    counts = torch.bincount(first, minlength=len(rows)).tolist()
    return union, [p.view(ids.shape) for p, ids in zip(places.split(sizes), rows, strict=True)], counts


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
