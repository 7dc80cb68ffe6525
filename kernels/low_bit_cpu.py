"""Scores with low-bit keys and attention over low-bit rows on a processor: one pass in C where there is a compiler
(`low_bit.c`), else in torch by integer products over the bytes. Float32; what they compute is defined in `low_bit.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from . import low_bit, native
from .low_bit import KEY_BITS, Layout, LowBitQuery, decode_steps, unpack_rows
from .pages import BLOCK, PAGE_BLOCKS, Pages
from .reference import capped
from .selection import floor_share, quantise_query


def suits(q: torch.Tensor) -> bool:
    """Whether queries q are computed here."""
    return q.device.type == "cpu" and q.dtype == torch.float32


def ask(q: torch.Tensor, mean: torch.Tensor, pages: Pages, layout: Layout, tokens: range) -> LowBitQuery:
    """`LowBitQuery` of queries that `suits`."""
    library = native.low_bit(layout.head_dim, layout.value_bits, q.shape[1])
    if library is None or not tokens:
        return ProductQuery(q, mean, pages, layout, tokens)
    return NativeQuery(q.contiguous(), mean.contiguous(), pages, layout, tokens, library)


@dataclass(frozen=True, eq=False)
class NativeQuery(LowBitQuery):
    """In C: scores are computed once, in one pass over the keys, and weigh the values later. Weights of values are
    rounded to bfloat16 where the processor multiplies it, else they are float32."""

    library: native.LowBitLibrary

    @cached_property
    def _found(self) -> native.ScoredTokens:
        return self.library.score(self.q, self.mean, self.pages, self.tokens)

    @property
    def scores(self) -> torch.Tensor:
        """`[Hkv, G, n]`."""
        return self._found.scores

    def select(self, alpha: float, max_fraction: float) -> torch.Tensor:
        """By threshold and best score, rising: int64 `[Hkv, n]`."""
        return self.library.select(self._found, alpha, max(1, floor_share(max_fraction, len(self.tokens))))

    def top(self, n: int) -> torch.Tensor:
        """Of a threshold that every token reaches, rising: int64 `[Hkv, n]`."""
        if n == 0:
            return torch.empty(self.q.shape[0], 0, dtype=torch.int64)
        return self.library.select(self._found, math.inf, min(n, len(self.tokens)))

    def tail(self, skip: torch.Tensor, softcap: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Out `[Hkv, G, d]`, lse `[Hkv, G]`."""
        return self.library.mix(self._found, skip, softcap)


@dataclass(frozen=True, eq=False)
class ProductQuery(LowBitQuery):
    """In torch, by integer products of the query's int8 weights with the codes, scaled afterwards. Weights of values
    are rounded to bfloat16."""

    @cached_property
    def _blocks(self) -> range:
        return range(self.tokens.start // BLOCK, -(-self.tokens.stop // BLOCK))

    @cached_property
    def _found(self) -> torch.Tensor:
        """Of all tokens of the blocks: `[Hkv, G, blocks * 64]`."""
        weights, scale = quantise_query(self.q)
        shift = torch.bmm(self.q, self.mean.unsqueeze(2))
        return _scores(weights, scale, self.pages, self.layout, self._blocks).add_(shift)

    @property
    def scores(self) -> torch.Tensor:
        """`[Hkv, G, n]`."""
        first = self._blocks.start * BLOCK
        return self._found[:, :, self.tokens.start - first : self.tokens.stop - first]

    def tail(self, skip: torch.Tensor, softcap: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Out `[Hkv, G, d]`, lse `[Hkv, G]`."""
        hidden = _hidden_tokens(self.tokens, self._blocks, skip)
        scores = capped(self._found, softcap).masked_fill(hidden.unsqueeze(1), -math.inf)
        lse = torch.logsumexp(scores, -1)
        scores.sub_(lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp_()
        return _mix(scores, self.pages, self.layout, self._blocks), lse


def store_rows(pages: Pages, layout: Layout, rows: torch.Tensor, start: int, *, values: bool) -> None:
    """`low_bit.store_rows`: with the library, rounded and packed in one pass."""
    library = native.low_bit(layout.head_dim, layout.value_bits, 1)
    if library is None:
        low_bit.store_rows(pages, layout, rows, start, values=values)
    else:
        library.store(pages, rows, start, values=values)


def _hidden_tokens(tokens: range, blocks: range, skip: torch.Tensor) -> torch.Tensor:
    """Of all tokens of `blocks`, bool `[Hkv, blocks * 64]`, whether each does not count: it is not among `tokens`, or
    in skip int64 `[Hkv, n]`, negative entries apart."""
    offset, count = blocks.start * BLOCK, len(blocks) * BLOCK
    hidden = torch.ones(skip.shape[0], count + 1, dtype=torch.bool)
    hidden[:, tokens.start - offset : tokens.stop - offset] = False
    return hidden.scatter_(1, torch.where(skip < 0, count, skip - offset), True)[:, :-1]


def _tokens_of(blocks: range) -> range:
    return range(blocks.start * BLOCK, blocks.stop * BLOCK)


def _scores(
    weights: torch.Tensor,
    scale: torch.Tensor,
    pages: Pages,
    layout: Layout,
    blocks: range,
) -> torch.Tensor:
    """`[Hkv, G, blocks * 64]` from the query's int8 weights `[Hkv, G, d]`, their scale `[Hkv, G, 1]`: one
    integer product for each half of the channels, head by head in the cache."""
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
    return out


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
