"""Low-bit rows of a batch's sequences, in torch: the definitions that the Triton kernels are tested against.

Lists are those of `lists.py`; each sequence's storage is uint8 `[Hkv, blocks, block_bytes]` (`low_bit.Layout`).
"""

from __future__ import annotations

import torch

from .lists import Scores, within
from .low_bit import BLOCK, KEY_BITS, Layout, low_bit_scores, quantise_rows, tail_attention
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


def append_values(
    v: torch.Tensor, mixing: torch.Tensor, layout: Layout, storages: PointerTable, slots: torch.Tensor
) -> None:
    """The value v `[P, d]` of each list's newest token, multiplied with mixing `[d, d]`, takes slot `slots[p]`."""
    heads, every = storages.heads, torch.arange(storages.heads, device=v.device)
    turned = v.to(mixing.dtype) @ mixing
    for own, rows, slot in zip(storages.tensors, turned.split(heads), slots.split(heads), strict=True):
        for part, data in zip(layout.values(own), quantise_rows(rows, layout.value_bits), strict=True):
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
    """As `lists.partial_scores`, of queries q `[P, G, d]` in the keys' basis and scaled; mean `[Hkv, d]`."""
    found = q.new_full((*q.shape[:2], tokens), 0.0)
    heads = storages.heads
    for own, query, there in zip(storages.tensors, q.split(heads), found.split(heads), strict=True):
        known = min(tokens, own.shape[1] * BLOCK)
        there[:, :, :known] = low_bit_scores(query, _shift(query, mean), own, layout, range(known))
    return within(found, starts, stops)


def attend_tail(
    q: torch.Tensor,
    mean: torch.Tensor,
    layout: Layout,
    storages: PointerTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    chosen: torch.Tensor,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`low_bit.tail_attention` of each sequence of a batch: queries q `[P, G, d]` over the tokens [start, stop) of each
    list, the same of all lists of a sequence, but the first `counts[p]` of chosen int64 `[P, n]`. Returns out
    `[P, G, d]`, mixed as the values are, and lse `[P, G]`."""
    place = torch.arange(chosen.shape[1], device=chosen.device)
    skip, heads = chosen.masked_fill(place >= counts.unsqueeze(1), -1), storages.heads
    parts = []
    for b, (own, query) in enumerate(zip(storages.tensors, q.split(heads), strict=True)):
        first = b * heads
        tokens = range(int(starts[first]), int(stops[first]))
        shift = _shift(query, mean)
        parts.append(tail_attention(query, shift, own, layout, tokens, skip[first : first + heads]))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _shift(q: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    return torch.bmm(q, mean.unsqueeze(2)).squeeze(2)
