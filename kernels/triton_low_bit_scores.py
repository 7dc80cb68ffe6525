"""Score low-bit keys of a batch in Triton.

Memory traffic per token and KV head: d / 2 + 1 bytes are read and 4 * G bytes are written. Scores are integers before
scaling. Reference: `low_bit_lists.scores`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

from .lists import Scores
from .low_bit import KEY_BITS, Layout
from .pages import BLOCK, PageTable
from .triton_low_bit_rows import block_of, decoded_steps, padded_sizes, page_arguments
from .triton_scores import _outputs, _rint, store_scores

_SCORED = 4 * BLOCK
"""Number of tokens per program, all in one page."""

_BLOCK, _MIDDLE = tl.constexpr(BLOCK), tl.constexpr(((1 << KEY_BITS) - 1) / 2)


@triton.constexpr_function
def _nibbles(field: int) -> str:
    """Return assembly code for the lower (field 0) or the upper four bits of four bytes."""
    return f"{{ .reg .b32 codes; shr.b32 codes, $1, {4 * field}; and.b32 $0, codes, 0x0F0F0F0F; }}"


@triton.jit
def query_weights(
    q: tl.tensor, mean: tl.tensor, p: tl.tensor, heads: tl.tensor,
    d: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Quantise the queries of list p (one KV head of one sequence) as `selection.quantise_query` does.

    Returns:
        int8 queries `[GROUP, K]`: the lower and the upper half of the channels. Then three numbers per query `[GROUP]`:
        the sum of its int8 values times the middle code, its scale, and its product with the keys' mean.
    """
    head, byte = tl.arange(0, GROUP), tl.arange(0, K)
    mask = (head < G)[:, None] & (byte < KEYS)[None, :]
    address = q + (p * G + head)[:, None] * d + byte[None, :]
    low, high = tl.load(address, mask=mask, other=0.0), tl.load(address + KEYS, mask=mask, other=0.0)
    centre = mean + p % heads * d + byte
    shift = tl.sum(low * tl.load(centre, mask=byte < KEYS, other=0.0)[None, :], 1)
    shift += tl.sum(high * tl.load(centre + KEYS, mask=byte < KEYS, other=0.0)[None, :], 1)
    largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    scale = tl.div_rn(tl.maximum(largest, 1.1754943508222875e-38 * 127), 127.0)
    scales = scale[:, None] + tl.zeros_like(low)
    low, high = _rint(tl.div_rn(low, scales)).to(tl.int8), _rint(tl.div_rn(high, scales)).to(tl.int8)
    total = tl.sum(low.to(tl.int32), 1) + tl.sum(high.to(tl.int32), 1)
    return low, high, total.to(tl.float32) * _MIDDLE, scale, shift


@triton.jit
def _key_codes(packed: tl.tensor, FIELD: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """Return the lower (FIELD 0) or the upper four bits of each byte as int8."""
    if INTERPRETED:
        return ((packed >> (4 * FIELD)) & 15).to(tl.int8)
    return tl.inline_asm_elementwise(_nibbles(FIELD), "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def key_products(low: tl.tensor, high: tl.tensor, keys: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """Return the dot products of int8 queries with the codes of packed keys `[K, n]`: float32 integers `[GROUP, n]`.

    `low` and `high` `[GROUP, K]` are the channels whose key codes are in the low and the high four bits of each byte.
    """
    sums = tl.dot(low, _key_codes(keys, 0, INTERPRETED), out_dtype=tl.int32)
    sums += tl.dot(high, _key_codes(keys, 1, INTERPRETED), out_dtype=tl.int32)
    return sums.to(tl.float32)


@triton.jit(do_not_specialize=["pages", "offset", "tokens", "blocks"])
def _score(
    q: tl.tensor, mean: tl.tensor, table: tl.tensor, pages: tl.tensor, offset: tl.tensor, starts: tl.tensor,
    stops: tl.tensor, scores: tl.tensor, maxima: tl.tensor, sums: tl.tensor, heads: tl.tensor, tokens: tl.tensor,
    blocks: tl.tensor,
    d: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, VALUES: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    TOKENS: tl.constexpr, INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """Score tokens [i * TOKENS, (i + 1) * TOKENS) of list p (one KV head of one sequence), in program (p, i).

    A program without tokens in [start, stop) reads no keys.
    """
    # Four times as many tokens per program, which quantises the queries less often, were slower on an H200.
    p, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, stop = tl.load(starts + p), tl.load(stops + p)
    token, byte = piece * TOKENS + tl.arange(0, TOKENS), tl.arange(0, K)
    acc = tl.zeros((GROUP, TOKENS), tl.float32)
    if (piece * TOKENS < stop) & (piece * TOKENS + TOKENS > start):
        low, high, centre, scale, shift = query_weights(q, mean, p, heads, d, KEYS, K, G, GROUP)
        mask = token < (stop + _BLOCK - 1) // _BLOCK * _BLOCK
        first = block_of(table, pages, offset, p, heads, piece * (TOKENS // _BLOCK), _BLOCK * (KEYS + VALUES + 2))
        index = tl.arange(0, TOKENS)
        address = first + index // _BLOCK * (_BLOCK * (KEYS + VALUES + 2)) + index % _BLOCK
        keys = tl.load(address[None, :] + byte[:, None] * _BLOCK, mask=(byte < KEYS)[:, None] & mask[None, :], other=0)
        step = decoded_steps(tl.load(address + _BLOCK * (KEYS + VALUES), mask=mask, other=0))
        products = key_products(low, high, keys, INTERPRETED) - centre[:, None]
        acc = products * step[None, :] * scale[:, None] + shift[:, None]
    store_scores(acc, token, start, stop, p, piece, blocks, tokens, scores, maxima, sums, G, GROUP)


def scores(
    q: torch.Tensor,
    mean: torch.Tensor,
    layout: Layout,
    table: PageTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    tokens: int,
) -> Scores:
    """Score the low-bit keys of a batch, in one launch. See `low_bit_lists.scores`.

    Queries must be float32. Scores are float32.
    """
    lists, group, d = q.shape
    assert table.lists == lists and q.is_contiguous() and mean.shape == (table.heads, d)
    assert q.dtype == mean.dtype == torch.float32 and mean.is_contiguous() and starts.shape == stops.shape == (lists,)
    blocks, sizes = triton.cdiv(tokens, _SCORED), padded_sizes(layout)
    out, maxima, sums = _outputs(q, tokens, blocks)
    _score[(lists, blocks)](
        q, mean, *page_arguments(table), starts, stops, out, maxima, sums, table.heads, tokens, blocks,
        d=d, KEYS=sizes["KEYS"], K=sizes["K"], VALUES=sizes["VALUES"],
        G=group, GROUP=triton.next_power_of_2(group), TOKENS=_SCORED,
        INTERPRETED=knobs.runtime.interpret,
    )  # fmt: skip
    return Scores(out, maxima, sums)
