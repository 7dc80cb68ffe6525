"""Low-bit rows of a batch's sequences, in torch on every device.

Lists are those of `lists.py`; each sequence's storage is uint8 `[Hkv, blocks, block_bytes]` (`low_bit.Layout`).
"""

from __future__ import annotations

import torch

from .lists import Scores, within
from .low_bit import BLOCK, KEY_BITS, Layout, low_bit_scores, quantise_rows
from .pointer_table import PointerTable
from .selection import skew


def append_keys(
    k: torch.Tensor,
    basis: torch.Tensor,
    mean: torch.Tensor,
    layout: Layout,
    storages: PointerTable,
    slots: torch.Tensor,
) -> None:
    """The key k `[P, d]` of each list's newest token, multiplied with basis `[Hkv, d, d]` and without mean `[Hkv, d]`,
    takes slot `slots[p]` (int64)."""
    heads, every = storages.heads, torch.arange(storages.heads, device=k.device)
    turned = skew(k.view(-1, heads, k.shape[1]).transpose(0, 1), basis) - mean.unsqueeze(1)
    for own, rows, slot in zip(storages.tensors, turned.unbind(1), slots.split(heads), strict=True):
        for part, data in zip(layout.keys(own), quantise_rows(rows, KEY_BITS), strict=True):
            part[every, slot // BLOCK, slot % BLOCK] = data


def scores(
    q: torch.Tensor,
    mean: torch.Tensor,
    layout: Layout,
    storages: PointerTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    tokens: int,
) -> Scores:
    """Scores of queries q `[P, G, d]`, scaled and in the keys' basis, at tokens [start, stop) of each list, -inf
    outside; mean `[Hkv, d]` was taken from the keys. Of `tokens` tokens, at least as many as any list has."""
    found = q.new_full((*q.shape[:2], tokens), 0.0)
    heads = storages.heads
    for own, query, there in zip(storages.tensors, q.split(heads), found.split(heads), strict=True):
        known = min(tokens, own.shape[1] * BLOCK)
        there[:, :, :known] = low_bit_scores(query, _shift(query, mean), own, layout, range(known))
    return within(found, starts, stops)


def _shift(q: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    return torch.bmm(q, mean.unsqueeze(2)).squeeze(2)
