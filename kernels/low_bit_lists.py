"""Low-bit rows of a batch's sequences, in torch: the definitions that the Triton kernels are tested against.

Lists are those of `lists.py`; each sequence's storage is uint8 `[Hkv, blocks, block_bytes]` (`low_bit.Layout`). What
keys, queries and values are multiplied with (basis, mean, mixing) is the same for every sequence.
"""

from __future__ import annotations

import math

import torch

from .lists import Scores, finite, merge_parts, within
from .low_bit import BLOCK, KEY_BITS, Layout, dequantise_rows, low_bit_scores, quantise_rows
from .pointer_table import PointerTable
from .selection import skew


def append_rows(
    k: torch.Tensor,
    v: torch.Tensor,
    basis: torch.Tensor,
    mean: torch.Tensor,
    mixing: torch.Tensor,
    layout: Layout,
    storages: PointerTable,
    slots: torch.Tensor,
) -> None:
    """The rows k, v `[P, d]` of each list's newest token take slot `slots[p]` (int64): keys multiplied with basis
    `[Hkv, d, d]` and without mean `[Hkv, d]`, values multiplied with mixing `[d, d]`."""
    heads, every = storages.heads, torch.arange(storages.heads, device=k.device)
    keys = skew(k.view(-1, heads, k.shape[1]).transpose(0, 1), basis) - mean.unsqueeze(1)
    values = (v.to(mixing.dtype) @ mixing).view(-1, heads, v.shape[1])
    for own, key, value, slot in zip(
        storages.tensors, keys.unbind(1), values.unbind(0), slots.split(heads), strict=True
    ):
        halves = ((layout.keys(own), key, KEY_BITS), (layout.values(own), value, layout.value_bits))
        for parts, rows, bits in halves:
            for part, data in zip(parts, quantise_rows(rows, bits), strict=True):
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
        there[:, :, :known] = low_bit_scores(query, mean, own, layout, range(known))
    return within(found, starts, stops)


def join_tail(
    q: torch.Tensor,
    mean: torch.Tensor,
    mixing: torch.Tensor,
    layout: Layout,
    storages: PointerTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    chosen: torch.Tensor,
    counts: torch.Tensor,
    tokens: int,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax over exact rows and low-bit rows: out `[P, G, d]` and lse `[P, G]`, from those of the exact ones and
    the low-bit rows of the tokens [start, stop) of each list that are not the first `counts[p]` (int32) of chosen int64
    `[P, n]`, which rise. q, mean and tokens as in `scores`; values were multiplied with mixing."""
    found = scores(q, mean, layout, storages, starts, stops, tokens).scores
    found = found.masked_fill(_listed(chosen, counts, tokens).unsqueeze(1), -math.inf)
    tail_lse = torch.logsumexp(found, -1)
    weights = (found - finite(tail_lse).unsqueeze(-1)).exp()
    tail = torch.zeros_like(out)
    heads, bits = storages.heads, layout.value_bits
    for own, weight, there in zip(storages.tensors, weights.split(heads), tail.split(heads), strict=True):
        packed, steps = (part.flatten(1, 2) for part in layout.values(own))
        values = dequantise_rows(packed, steps, bits, out.dtype)
        known = min(tokens, values.shape[1])
        there[:] = torch.bmm(weight[:, :, :known], values[:, :known]) @ mixing.T
    outs, lses = torch.stack((out, tail)).flatten(1, 2), torch.stack((lse, tail_lse)).flatten(1)
    whole, total = merge_parts(outs, lses)
    return whole.view_as(out), total.view_as(lse)


def _listed(chosen: torch.Tensor, counts: torch.Tensor, tokens: int) -> torch.Tensor:
    """Whether each of `tokens` tokens is among the first `counts[p]` of chosen: bool `[P, tokens]`."""
    meant = torch.arange(chosen.shape[1], device=chosen.device) < counts.unsqueeze(1)
    listed = torch.zeros(len(chosen), tokens + 1, dtype=torch.bool, device=chosen.device)
    return listed.scatter_(1, torch.where(meant, chosen, tokens), True)[:, :-1]
