"""Low-bit scores and low-bit attention on a CPU, in float32.

`low_bit.c` computes both in one pass. If it cannot be compiled, torch multiplies the packed bytes as integers.
`low_bit.py` defines the results.
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
from .selection import quantise_query


def suits(q: torch.Tensor) -> bool:
    """Return whether this module supports the device and dtype of queries q."""
    return q.device.type == "cpu" and q.dtype == torch.float32


def ask(q: torch.Tensor, mean: torch.Tensor, pages: Pages, layout: Layout, tokens: range) -> LowBitQuery:
    """Return the `LowBitQuery` for queries q: it scores low-bit keys and attends to low-bit KV.

    `suits(q)` must be true.
    """
    library = native.low_bit(layout.head_dim, layout.value_bits, q.shape[1])
    if library is None or not tokens:
        return ProductQuery(q, mean, pages, layout, tokens)
    return NativeQuery(q.contiguous(), mean.contiguous(), pages, layout, tokens, library)


@dataclass(frozen=True, eq=False)
class NativeQuery(LowBitQuery):
    """Low-bit query in C. One pass over the keys computes scores; a later pass sums the weighted values.

    Products of codes are exact integers, so all levels with fused multiply-add return equal results. Softmax weights
    are rounded to 16 bits: the error is at most 2^-16 of the largest weight among 64 tokens.
    """

    library: native.LowBitLibrary

    @cached_property
    def _found(self) -> native.ScoredTokens:
        return self.library.score(self.q, self.mean, self.pages, self.tokens)

    @property
    def scores(self) -> torch.Tensor:
        """Scores `[Hkv, G, n]`."""
        return self._found.scores

    def select(self, alpha: float, limit: int) -> torch.Tensor:
        """Select tokens by threshold and best score.

        Return int64 `[Hkv, n]`, ascending, relative to the first of `tokens`.
        """
        found = self._found
        chosen = native.select(found.scores, found.peak, found.lse, alpha, limit)
        return super().select(alpha, limit) if chosen is None else chosen

    def merge(
        self,
        exact: tuple[torch.Tensor, torch.Tensor],
        skip: torch.Tensor,
        unmixing: torch.Tensor,
        softcap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge exact attention with approximate attention to tokens that are not in `skip` (`LowBitQuery.merge`)."""
        return self.library.merge(self._found, skip, softcap, unmixing, exact)


@dataclass(frozen=True, eq=False)
class ProductQuery(LowBitQuery):
    """Low-bit query in torch: products of the int8 query with the integer codes, scaled afterwards."""

    @cached_property
    def _blocks(self) -> range:
        return range(self.tokens.start // BLOCK, -(-self.tokens.stop // BLOCK))

    @cached_property
    def _found(self) -> torch.Tensor:
        """Scores of all tokens in the blocks that contain `tokens`, `[Hkv, G, blocks * 64]`."""
        weights, scale = quantise_query(self.q)
        shift = torch.bmm(self.q, self.mean.unsqueeze(2))
        return _scores(weights, scale, self.pages, self.layout, self._blocks).add_(shift)

    @property
    def scores(self) -> torch.Tensor:
        """Scores `[Hkv, G, n]`."""
        first = self._blocks.start * BLOCK
        return self._found[:, :, self.tokens.start - first : self.tokens.stop - first]

    def approximate(self, skip: torch.Tensor, softcap: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to all `tokens` except the tokens in `skip`. Return out `[Hkv, G, d]` and lse `[Hkv, G]`."""
        hidden = _hidden_tokens(self.tokens, self._blocks, skip)
        scores = capped(self._found, softcap).masked_fill(hidden.unsqueeze(1), -math.inf)
        lse = torch.logsumexp(scores, -1)
        scores.sub_(lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp_()
        return _mix(scores, self.pages, self.layout, self._blocks), lse


def store_rows(pages: Pages, layout: Layout, rows: torch.Tensor, start: int, *, values: bool) -> None:
    """Quantise and pack vectors as `low_bit.store_rows` does, in one pass of C code if it can be compiled."""
    library = native.low_bit(layout.head_dim, layout.value_bits, 1)
    if library is None:
        low_bit.store_rows(pages, layout, rows, start, values=values)
    else:
        library.store(pages, rows, start, values=values)


def _hidden_tokens(tokens: range, blocks: range, skip: torch.Tensor) -> torch.Tensor:
    """Return which tokens of `blocks` are excluded from attention, bool `[Hkv, blocks * 64]`.

    These are the tokens outside `tokens`, and the tokens in `skip`, int64 `[Hkv, n]`. Negative entries of `skip` are
    ignored.
    """
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
    """Return scores `[Hkv, G, blocks * 64]` of queries with int8 codes `weights` `[Hkv, G, d]` and scale `[Hkv, G, 1]`.

    Each byte of a key has the codes of one channel of the lower and one of the upper half, so each half is one integer
    product. Heads are processed one by one so that the codes stay in the cache.
    """
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
    """Sum the values of `blocks` with softmax weights `[Hkv, G, blocks * 64]`. Return `[Hkv, G, d]`."""
    # Codes minus the middle code are exact in bfloat16, and centred, so sums stay small. Only the weights, multiplied
    # by the steps, are rounded.
    middle, out = ((1 << layout.value_bits) - 1) / 2, torch.zeros(*weights.shape[:2], layout.head_dim)
    for page, slots, at in pages.parts(_tokens_of(blocks)):
        packed, steps = (part.flatten(1, 2)[:, slots] for part in layout.values(page))
        rounded = (weights[:, :, at] * decode_steps(steps).unsqueeze(1)).bfloat16()
        for own, codes, sums in zip(rounded, packed, out, strict=True):
            sums += own @ unpack_rows(codes, layout.value_bits).bfloat16().sub_(middle)
    return out
