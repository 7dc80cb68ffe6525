"""Operations on the low-bit KV of a batch, in torch: the reference implementations of the Triton kernels.

A list is one KV head of one sequence (see `lists.py`). The low-bit KV of a sequence is stored in its pages
(`pages.py`).
"""

from __future__ import annotations

import torch

from .lists import Scores, mask_scores
from .low_bit import Layout, approximate_attention, low_bit_scores, store_rows
from .pages import PAGE_TOKENS, PageTable
from .reference import merge_lse
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
    """Quantise the newest k and v `[P, d]` of each list, and store them in slot `slots[p]` (int64).

    Keys are multiplied by `basis` `[Hkv, d, d]`, and `mean` `[Hkv, d]` is subtracted. Values are multiplied by `mixing`
    `[d, d]`. These matrices are the same for all sequences. Lists with a negative slot are skipped.
    """
    heads, d = table.heads, k.shape[1]
    keys = skew(k.view(-1, heads, d).transpose(0, 1), basis) - mean.unsqueeze(1)
    values = (v.to(mixing.dtype) @ mixing).view(-1, heads, d).transpose(0, 1)
    for pages, key, value, slot in zip(
        table.pages, keys.split(1, 1), values.split(1, 1), slots[::heads].tolist(), strict=True
    ):
        if slot >= 0:
            store_rows(pages, layout, key, slot, values=False)
            store_rows(pages, layout, value, slot, values=True)


def scores(
    q: torch.Tensor,
    mean: torch.Tensor,
    layout: Layout,
    table: PageTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    tokens: int,
) -> Scores:
    """Score the low-bit keys [start, stop) of each list with q `[P, G, d]`. Other tokens get the score -inf.

    For q and `mean`, see `low_bit.low_bit_scores`. `tokens` is the length of the result and must be at least the length
    of the longest list.
    """
    result = q.new_full((*q.shape[:2], tokens), 0.0)
    heads = table.heads
    for pages, query, target in zip(table.pages, q.split(heads), result.split(heads), strict=True):
        stored = min(tokens, len(pages.tensors) * PAGE_TOKENS)
        target[:, :, :stored] = low_bit_scores(query, mean, pages, layout, range(stored))
    return mask_scores(result, starts, stops)


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
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge exact attention with low-bit attention to all other tokens. Return out `[P, G, d]` and lse `[P, G]`.

    Args:
        q, mean, layout, table, tokens: See `scores`.
        mixing: Matrix `[d, d]` by which values were multiplied before quantisation.
        starts, stops: Range of tokens [start, stop) of each list, including the tokens in `chosen`.
        chosen: Tokens that exact attention covers, ascending, int64 `[P, n]`.
        counts: Number of valid tokens in each list of `chosen`, int32 `[P]`.
        out, lse: Result of the exact attention. Both stay unchanged.
    """
    index = torch.arange(chosen.shape[1], device=q.device)
    excluded = chosen.masked_fill(index >= counts.unsqueeze(1), -1)
    merged = []
    for b, pages in enumerate(table.pages):
        lists = slice(b * table.heads, (b + 1) * table.heads)
        candidates = range(int(starts[lists.start]), int(stops[lists.start]))
        rest, rest_lse = approximate_attention(q[lists], mean, pages, layout, candidates, excluded[lists], softcap)
        merged.append(merge_lse((out[lists], rest @ mixing.T), (lse[lists], rest_lse)))
    outs, lses = zip(*merged, strict=True)
    return torch.cat(outs), torch.cat(lses)
