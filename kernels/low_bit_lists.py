"""Low-bit rows of a batch's sequences, in torch: the definitions that the Triton kernels are tested against.

Lists are those of `lists.py`; each sequence's rows lie in its pages (`pages.py`). What keys, queries and values are
multiplied with (basis, mean, mixing) is the same for every sequence.
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
    """The rows k, v `[P, d]` of each list's newest token take slot `slots[p]` (int64): keys multiplied with basis
    `[Hkv, d, d]` and without mean `[Hkv, d]`, values multiplied with mixing `[d, d]`. Negative slots are those of a
    sequence that is none."""
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
    """Scores of queries q `[P, G, d]`, scaled and in the keys' basis, at tokens [start, stop) of each list, -inf
    outside; mean `[Hkv, d]` was taken from the keys. Of `tokens` tokens, at least as many as any list has."""
    found = q.new_full((*q.shape[:2], tokens), 0.0)
    heads = table.heads
    for own, query, there in zip(table.pages, q.split(heads), found.split(heads), strict=True):
        known = min(tokens, len(own.tensors) * PAGE_TOKENS)
        there[:, :, :known] = low_bit_scores(query, mean, own, layout, range(known))
    return within(found, starts, stops)


def join_tail(
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
    """One softmax over exact rows and low-bit rows: out `[P, G, d]` and lse `[P, G]`, from those of the exact ones and
    the low-bit rows of the tokens [start, stop) of each list that are not the first `counts[p]` (int32) of chosen int64
    `[P, n]`, which rise. q, mean and tokens as in `scores`; values were multiplied with mixing."""
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
    """Whether each of `tokens` tokens is among the first `counts[p]` of chosen: bool `[P, tokens]`."""
    meant = torch.arange(chosen.shape[1], device=chosen.device) < counts.unsqueeze(1)
    listed = torch.zeros(len(chosen), tokens + 1, dtype=torch.bool, device=chosen.device)
    return listed.scatter_(1, torch.where(meant, chosen, tokens), True)[:, :-1]
