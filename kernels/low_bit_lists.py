"""Operations on the low-bit KV of a batch, in torch: the reference definitions of the Triton kernels.

Lists are those of `lists.py`. The low-bit KV of a sequence lies in its pages (`pages.py`). The basis of queries and
keys, the mean of keys and the mixing of values are the same for all sequences.
"""

from __future__ import annotations

import math

import torch

from .lists import Scores, finite, merge_parts, within
from .low_bit import KEY_BITS, Layout, dequantise_rows, low_bit_scores, quantise_rows
from .pages import BLOCK, PAGE_TOKENS, PageTable
from .selection import skew


def append_rows(
    k: torch.Tensor,
    v: torch.Tensor,
    basis: torch.Tensor,
    mean: torch.Tensor,
    mixing: torch.Tensor,
    layout: Layout,
    table: PageTable,
    slots: torch.Tensor,
) -> None:
    """Quantise k, v `[P, d]` of the newest token of each list into slot `slots[p]` (int64).

    Keys are multiplied with basis `[Hkv, d, d]`, and mean `[Hkv, d]` is subtracted. Values are multiplied with mixing
    `[d, d]`. Sequences with negative slots are skipped.
    """
    heads, every = table.heads, torch.arange(table.heads, device=k.device)
    keys = skew(k.view(-1, heads, k.shape[1]).transpose(0, 1), basis) - mean.unsqueeze(1)
    values = (v.to(mixing.dtype) @ mixing).view(-1, heads, v.shape[1])
    for own, key, value, slot in zip(table.pages, keys.unbind(1), values.unbind(0), slots.split(heads), strict=True):
        data = (*quantise_rows(key, KEY_BITS), *quantise_rows(value, layout.value_bits))
        block, row = slot % PAGE_TOKENS // BLOCK, slot % BLOCK
        for index, page in enumerate(own.tensors):
            here, blocks = slot // PAGE_TOKENS == index, page[own.layer]
            for part, new in zip((*layout.keys(blocks), *layout.values(blocks)), data, strict=True):
                shown = here.view(-1, *[1] * (new.dim() - 1))
                part[every, block, row] = torch.where(shown, new, part[every, block, row])


def scores(
    q: torch.Tensor,
    mean: torch.Tensor,
    layout: Layout,
    table: PageTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    tokens: int,
) -> Scores:
    """Score queries q `[P, G, d]` at tokens [start, stop) of each list, -inf outside.

    q is scaled and in the basis of the keys. mean `[Hkv, d]` was subtracted from the keys. `tokens` is the length of
    the result, at least that of the longest list.
    """
    found = q.new_full((*q.shape[:2], tokens), 0.0)
    heads = table.heads
    for own, query, there in zip(table.pages, q.split(heads), found.split(heads), strict=True):
        known = min(tokens, len(own.tensors) * PAGE_TOKENS)
        there[:, :, :known] = low_bit_scores(query, mean, own, layout, range(known))
    return within(found, starts, stops)


def merge_approximate(
    q: torch.Tensor,
    mean: torch.Tensor,
    mixing: torch.Tensor,
    layout: Layout,
    table: PageTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    chosen: torch.Tensor,
    counts: torch.Tensor,
    tokens: int,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge exact and low-bit attention into one softmax. Return out `[P, G, d]` and lse `[P, G]`.

    The arguments `out` and `lse` are those of the exact KV. The low-bit part covers the tokens [start, stop) of each
    list except the first `counts[p]` (int32) of chosen int64 `[P, n]`, in rising order. q, mean and tokens are those of
    `scores`. The values were multiplied with mixing.
    """
    found = scores(q, mean, layout, table, starts, stops, tokens).scores
    found = found.masked_fill(_listed(chosen, counts, tokens).unsqueeze(1), -math.inf)
    tail_lse = torch.logsumexp(found, -1)
    weights = (found - finite(tail_lse).unsqueeze(-1)).exp()
    tail = torch.zeros_like(out)
    heads, bits = table.heads, layout.value_bits
    for own, weight, there in zip(table.pages, weights.split(heads), tail.split(heads), strict=True):
        for blocks, slots, at in own.parts(range(min(tokens, len(own.tensors) * PAGE_TOKENS))):
            packed, steps = (part.flatten(1, 2)[:, slots] for part in layout.values(blocks))
            there += torch.bmm(weight[:, :, at], dequantise_rows(packed, steps, bits, out.dtype))
        there[:] = there @ mixing.T
    outs, lses = torch.stack((out, tail)).flatten(1, 2), torch.stack((lse, tail_lse)).flatten(1)
    whole, total = merge_parts(outs, lses)
    return whole.view_as(out), total.view_as(lse)


def _listed(chosen: torch.Tensor, counts: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return which of `tokens` tokens are among the first `counts[p]` of chosen: bool `[P, tokens]`."""
    meant = torch.arange(chosen.shape[1], device=chosen.device) < counts.unsqueeze(1)
    listed = torch.zeros(len(chosen), tokens + 1, dtype=torch.bool, device=chosen.device)
    return listed.scatter_(1, torch.where(meant, chosen, tokens), True)[:, :-1]
