"""Scores with low-bit keys and attention over low-bit rows on a processor: one pass in C where there is a compiler
(`low_bit.c`), else in torch by integer products over the bytes. Float32; what they compute is defined in `low_bit.py`.
"""

from __future__ import annotations

import math

import torch

from . import low_bit, native, selection
from .low_bit import KEY_BITS, Layout, decode_steps, hidden_tokens, unpack_rows
from .pages import BLOCK, PAGE_BLOCKS, Pages
from .reference import capped
from .selection import quantise_query, token_count, top_tokens


def suits(q: torch.Tensor) -> bool:
    """Whether queries q are computed here."""
    return q.device.type == "cpu" and q.dtype == torch.float32


def low_bit_scores(q: torch.Tensor, mean: torch.Tensor, pages: Pages, layout: Layout, tokens: range) -> torch.Tensor:
    """`low_bit.low_bit_scores`: integer products of the query's int8 weights with the codes, scaled afterwards."""
    blocks = _blocks_of(tokens)
    first = blocks.start * BLOCK
    weights, scale = quantise_query(q)
    library = native.low_bit(layout.head_dim, layout.value_bits, q.shape[1])
    if library is not None:
        return library.scores(weights, scale.squeeze(-1), _shift(q, mean), pages, tokens).scores[:, : q.shape[1]]
    scores = _scores(weights, scale, _shift(q, mean), pages, layout, blocks)
    return scores[:, :, tokens.start - first : tokens.stop - first]


def select_tokens(
    q: torch.Tensor,
    mean: torch.Tensor,
    pages: Pages,
    layout: Layout,
    tokens: range,
    alpha: float,
    max_fraction: float,
) -> torch.Tensor:
    """`low_bit.select_tokens`: with the library, thresholds and ranks come from the pass that scores."""
    library = native.low_bit(layout.head_dim, layout.value_bits, q.shape[1])
    if library is None:
        return selection.select_tokens(low_bit_scores(q, mean, pages, layout, tokens), alpha, max_fraction)
    weights, scale = quantise_query(q)
    found = library.scores(weights, scale.squeeze(-1), _shift(q, mean), pages, tokens)
    values, passing, within = library.rank(found, alpha)
    n = token_count(within, q.shape[0] * q.shape[1], len(tokens), max_fraction)
    passed = passing.nonzero().squeeze(1)
    return passed[top_tokens(values[:, passed], n)]


def top_scored(
    q: torch.Tensor, mean: torch.Tensor, pages: Pages, layout: Layout, tokens: range, n: int
) -> torch.Tensor:
    """`low_bit.top_scored`: with the library, every token counts as within its threshold."""
    library = native.low_bit(layout.head_dim, layout.value_bits, q.shape[1])
    if library is None:
        return low_bit.top_scored(q, mean, pages, layout, tokens, n)
    weights, scale = quantise_query(q)
    found = library.scores(weights, scale.squeeze(-1), _shift(q, mean), pages, tokens)
    return top_tokens(library.rank(found, math.inf)[0], n)


def store_rows(pages: Pages, layout: Layout, rows: torch.Tensor, start: int, *, values: bool) -> None:
    """`low_bit.store_rows`: with the library, rounded and packed in one pass."""
    library = native.low_bit(layout.head_dim, layout.value_bits, 1)
    if library is None:
        low_bit.store_rows(pages, layout, rows, start, values=values)
    else:
        library.store(pages, rows, start, values=values)


def tail_attention(
    q: torch.Tensor,
    mean: torch.Tensor,
    pages: Pages,
    layout: Layout,
    tokens: range,
    skip: torch.Tensor,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`low_bit.tail_attention`, with weights of values rounded to bfloat16 (in C where the processor multiplies it,
    else they are float32)."""
    blocks = _blocks_of(tokens)
    _, hidden = hidden_tokens(tokens, skip)
    weights, scale = quantise_query(q)
    library = native.low_bit(layout.head_dim, layout.value_bits, q.shape[1])
    if library is not None:
        return library.attend(weights, scale.squeeze(-1), _shift(q, mean), pages, hidden, blocks, softcap)
    scores = capped(_scores(weights, scale, _shift(q, mean), pages, layout, blocks), softcap)
    scores.masked_fill_(hidden.view(torch.bool).unsqueeze(1), -math.inf)
    lse = torch.logsumexp(scores, -1)
    scores.sub_(lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp_()
    return _mix(scores, pages, layout, blocks), lse


def _shift(q: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """What queries `[Hkv, G, d]` score with the mean `[Hkv, d]` that was taken from every key: `[Hkv, G]`."""
    return torch.bmm(q, mean.unsqueeze(2)).squeeze(2)


def _blocks_of(tokens: range) -> range:
    return range(tokens.start // BLOCK, -(-tokens.stop // BLOCK))


def _tokens_of(blocks: range) -> range:
    return range(blocks.start * BLOCK, blocks.stop * BLOCK)


def _scores(
    weights: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    pages: Pages,
    layout: Layout,
    blocks: range,
) -> torch.Tensor:
    """`[Hkv, G, blocks * 64]` from the query's int8 weights `[Hkv, G, d]`, their scale `[Hkv, G, 1]` and shift
    `[Hkv, G]`: one integer product for each half of the channels, head by head in the cache."""
    heads, group, _ = weights.shape
    width, count = layout.key_bytes, len(blocks)
    codes = torch.empty(width, PAGE_BLOCKS, BLOCK, dtype=torch.uint8)
    out = torch.empty(heads, group, count * BLOCK)
    middle = weights.sum(-1, keepdim=True, dtype=torch.int32) * (((1 << KEY_BITS) - 1) / 2)
    for page, slots, at in pages.parts(_tokens_of(blocks)):
        there = slice(slots.start // BLOCK, slots.stop // BLOCK)
        packed, steps = (part[:, there] for part in layout.keys(page))
        room = codes[:, : packed.shape[1]]
        for head in range(heads):
            rows = packed[head].permute(2, 0, 1)
            low = torch._int_mm(weights[head, :, :width], _masked(rows, room))
            high = torch._int_mm(weights[head, :, width:], _shifted(rows, room))
            out[head, :, at] = (low.add_(high) - middle[head]) * scale[head]
        out[:, :, at] *= decode_steps(steps).flatten(1).unsqueeze(1)
    return out.add_(shift.unsqueeze(-1))


def _masked(rows: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return torch.bitwise_and(rows, (1 << KEY_BITS) - 1, out=codes).view(torch.int8).flatten(1)


def _shifted(rows: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return torch.bitwise_right_shift(rows, KEY_BITS, out=codes).view(torch.int8).flatten(1)


def _mix(weights: torch.Tensor, pages: Pages, layout: Layout, blocks: range) -> torch.Tensor:
    """The values of `blocks` weighted by `[Hkv, G, blocks * 64]`: `[Hkv, G, d]`. Levels in steps are exact in bfloat16,
    around 0, so that sums are no larger than what they are of; the weights, steps in them, are rounded to it."""
    middle, out = ((1 << layout.value_bits) - 1) / 2, torch.zeros(*weights.shape[:2], layout.head_dim)
    for page, slots, at in pages.parts(_tokens_of(blocks)):
        packed, steps = (part.flatten(1, 2)[:, slots] for part in layout.values(page))
        rounded = (weights[:, :, at] * decode_steps(steps).unsqueeze(1)).bfloat16()
        for own, codes, sums in zip(rounded, packed, out, strict=True):
            sums += own @ unpack_rows(codes, layout.value_bits).bfloat16().sub_(middle)
    return out
