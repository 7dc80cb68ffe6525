"""From token indices to rows of the host pool: pure arithmetic on ids."""

from __future__ import annotations

import torch

from ..core import CHUNK, Visible
from ..pool.layout import ArenaLayout


def attended_tokens(visible: Visible, selected: torch.Tensor) -> torch.Tensor:
    """Resident and selected token indices together: int64 `[Hkv, resident + n]` from selected `[Hkv, n]`."""
    heads = selected.shape[0]
    resident = torch.tensor([*visible.sinks, *visible.recent], dtype=torch.int64, device=selected.device)
    return torch.cat((resident.expand(heads, -1), selected), dim=1)


def row_ids(layout: ArenaLayout, base: torch.Tensor, layer: int, tokens: torch.Tensor) -> torch.Tensor:
    """Rows of the flat arena `[R, d]` that hold K and V of `tokens`.

    base: int64 `[chunks]`, the arena row of each chunk's first token (layer 0, head 0, K), on the device of `tokens`.
    tokens: int64 `[Hkv, n]` token indices. Returns int64 `[2, Hkv, n]`: rows of K, rows of V.
    """
    heads = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    keys = base[tokens // CHUNK] + tokens % CHUNK + heads * layout.head_rows + layout.row(layer, 0, 0)
    return torch.stack((keys, keys + layout.plane_rows))
