"""Selection without asking the device how many tokens passed: indices and counts under a cap that the host knows."""

from __future__ import annotations

import torch

from ..core import Selection
from ..kernels import dispatch
from ..kernels.lists import Scores, selection_limit


def bounds(lists: int, tokens: range, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """First and behind the last of `tokens` for each of `lists` lists, int32 `[P]`, made on the device."""
    first, stop = (torch.full((lists,), end, dtype=torch.int32, device=device) for end in (tokens.start, tokens.stop))
    return first, stop


def select_counted(found: Scores, candidates: range, alpha: float, max_fraction: float) -> Selection:
    """`kernels.selection.select_tokens` (DESIGN section 6.3) from scores `[Hkv, G, N]` of all slots, of which only the
    `candidates` have any: the same tokens, rising, with their counts left on the device."""
    kv_heads, device = len(found.scores), found.scores.device
    cap = selection_limit(len(candidates), max_fraction)
    limits = torch.full((1,), cap, dtype=torch.int32, device=device)
    ends = bounds(kv_heads, candidates, device)
    return Selection(*dispatch.select_tokens(found, *ends, kv_heads, alpha, limits, cap))
