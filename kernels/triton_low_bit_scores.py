"""Score the low-bit keys of a batch in Triton. Before scaling, the scores are exact integers.

Memory traffic per token and KV head: d / 2 + 1 bytes are read and 4 * G bytes are written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

from .lists import Scores
from .low_bit import KEY_BITS, Layout
from .pages import BLOCK, PageTable
from .triton_attention import query_heads
from .triton_columns import load_columns
from .triton_low_bit_rows import block_of, decoded_steps, padded_sizes, page_arguments
from .triton_scores import MAX_QUERIES, _outputs, rounded, store_scores

_SCORED = 4 * BLOCK
"""Number of tokens per program, all in one page."""

_BLOCK, _MIDDLE = tl.constexpr(BLOCK), tl.constexpr(((1 << KEY_BITS) - 1) / 2)


@triton.constexpr_function
def _nibbles(field: int) -> str:
    """Return assembly code that extracts the lower (field 0) or the upper four bits (field 1) of each of four bytes."""
    return f"{{ .reg .b32 codes; shr.b32 codes, $1, {4 * field}; and.b32 $0, codes, 0x0F0F0F0F; }}"


@triton.jit
def _halves(
    q: tl.tensor, mean: tl.tensor, start: tl.tensor, mask: tl.tensor,
    KEYS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Load the query channels whose key codes are in the packed bytes [FIRST, FIRST + WIDTH).

    `mean` is the address of the keys' mean.

    Returns:
        The channels from the lower and from the upper half of the query, `[n, WIDTH]` each, their largest magnitude
        `[n]`, and their dot product with the mean `[n]`.
    """
    low, high = (
        load_columns(q, start, mask, KEYS, FIRST, WIDTH),
        load_columns(q + KEYS, start, mask, KEYS, FIRST, WIDTH),
    )
    byte = FIRST + tl.arange(0, WIDTH)
    shift = tl.sum(low * tl.load(mean + byte, mask=byte < KEYS, other=0.0)[None, :], 1)
    shift += tl.sum(high * tl.load(mean + KEYS + byte, mask=byte < KEYS, other=0.0)[None, :], 1)
    return low, high, tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1)), shift


@triton.jit
def _sum(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    return tl.sum(low.to(tl.int32), 1) + tl.sum(high.to(tl.int32), 1)


@triton.jit
def query_weights(
    q: tl.tensor, mean: tl.tensor, p: tl.tensor, head: tl.tensor, heads: tl.tensor,
    d: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, K_REST: tl.constexpr, G: tl.constexpr,
) -> tuple[tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor], tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Quantise the queries `head` `[n]` of list p (one KV head of one sequence) as `selection.quantise_query` does.

    Returns:
        The int8 queries as four tensors, then three numbers per query `[n]`. The tensors contain the channels from the
        lower and the upper half of the query: `[n, K]` each for the first K bytes of a key, and `[n, K_REST]` each for
        its other bytes (to be ignored if K_REST is 0). The numbers are the sum of the int8 values times the middle
        code, the scale, and the dot product with the keys' mean.
    """
    start, centre = (p * G + head) * d, mean + p % heads * d
    low, high, largest, shift = _halves(q, centre, start, head < G, KEYS, 0, K)
    low_rest, high_rest = low, high
    if K_REST:
        low_rest, high_rest, largest_rest, shift_rest = _halves(q, centre, start, head < G, KEYS, K, K_REST)
        largest, shift = tl.maximum(largest, largest_rest), shift + shift_rest
    scale = tl.div_rn(tl.maximum(largest, 1.1754943508222875e-38 * 127), 127.0)
    low, high = rounded(low, scale), rounded(high, scale)
    total = _sum(low, high)
    if K_REST:
        low_rest, high_rest = rounded(low_rest, scale), rounded(high_rest, scale)
        total += _sum(low_rest, high_rest)
    return (low, high, low_rest, high_rest), total.to(tl.float32) * _MIDDLE, scale, shift


@triton.jit
def _key_codes(packed: tl.tensor, FIELD: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """Return the lower (FIELD 0) or the upper four bits (FIELD 1) of each byte as int8."""
    if INTERPRETED:
        return ((packed >> (4 * FIELD)) & 15).to(tl.int8)
    return tl.inline_asm_elementwise(_nibbles(FIELD), "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def _code_sums(low: tl.tensor, high: tl.tensor, keys: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    sums = tl.dot(low, _key_codes(keys, 0, INTERPRETED), out_dtype=tl.int32)
    return sums + tl.dot(high, _key_codes(keys, 1, INTERPRETED), out_dtype=tl.int32)


@triton.jit
def key_products(
    weights: tl.tuple, token: tl.tensor, mask: tl.tensor,
    KEYS: tl.constexpr, K: tl.constexpr, K_REST: tl.constexpr, INTERPRETED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the dot products of int8 queries (`query_weights`) with the codes of keys: float32 integers `[G, n]`.

    `token` `[n]` contains the addresses of the packed keys. Keys outside `mask` `[n]` are not read.
    """
    byte = tl.arange(0, K)
    keys = tl.load(token[None, :] + byte[:, None] * _BLOCK, mask=(byte < KEYS)[:, None] & mask[None, :], other=0)
    sums = _code_sums(weights[0], weights[1], keys, INTERPRETED)
    if K_REST:
        byte = K + tl.arange(0, K_REST)
        keys = tl.load(token[None, :] + byte[:, None] * _BLOCK, mask=(byte < KEYS)[:, None] & mask[None, :], other=0)
        sums += _code_sums(weights[2], weights[3], keys, INTERPRETED)
    return sums.to(tl.float32)


@triton.jit(do_not_specialize=["pages", "offset", "tokens", "blocks"])
def _score(
    q: tl.tensor, mean: tl.tensor, table: tl.tensor, pages: tl.tensor, offset: tl.tensor, starts: tl.tensor,
    stops: tl.tensor, scores: tl.tensor, maxima: tl.tensor, sums: tl.tensor, heads: tl.tensor, tokens: tl.tensor,
    blocks: tl.tensor,
    d: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, K_REST: tl.constexpr, VALUES: tl.constexpr, G: tl.constexpr,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """Program (j, i) scores tokens [i * TOKENS, (i + 1) * TOKENS) of list p with QUERIES of its query heads.

    For p and the query heads, see `triton_attention.query_heads`. A program without tokens in [start, stop) reads no
    keys.
    """
    # With four times as many tokens per program, queries would be quantised less often, but this was slower on an H200.
    p, head = query_heads(G, QUERIES)
    piece = tl.program_id(1)
    start, stop = tl.load(starts + p), tl.load(stops + p)
    token = piece * TOKENS + tl.arange(0, TOKENS)
    acc = tl.zeros((QUERIES, TOKENS), tl.float32)
    if (piece * TOKENS < stop) & (piece * TOKENS + TOKENS > start):
        weights, centre, scale, shift = query_weights(q, mean, p, head, heads, d, KEYS, K, K_REST, G)
        mask = token < (stop + _BLOCK - 1) // _BLOCK * _BLOCK
        first = block_of(table, pages, offset, p, heads, piece * (TOKENS // _BLOCK), _BLOCK * (KEYS + VALUES + 2))
        index = tl.arange(0, TOKENS)
        address = first + index // _BLOCK * (_BLOCK * (KEYS + VALUES + 2)) + index % _BLOCK
        step = decoded_steps(tl.load(address + _BLOCK * (KEYS + VALUES), mask=mask, other=0))
        products = key_products(weights, address, mask, KEYS, K, K_REST, INTERPRETED) - centre[:, None]
        acc = products * step[None, :] * scale[:, None] + shift[:, None]
    store_scores(acc, token, start, stop, p, head, piece, blocks, tokens, scores, maxima, sums, G)


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
    queries = min(MAX_QUERIES, triton.next_power_of_2(group))
    _score[(lists * triton.cdiv(group, queries), blocks)](
        q, mean, *page_arguments(table), starts, stops, out, maxima, sums, table.heads, tokens, blocks,
        d=d, KEYS=sizes["KEYS"], K=sizes["K"], K_REST=sizes["K_REST"], VALUES=sizes["VALUES"],
        G=group, QUERIES=queries, TOKENS=_SCORED, INTERPRETED=knobs.runtime.interpret,
        num_warps=8 if sizes["K"] > 128 else 4,
    )  # fmt: skip
    return Scores(out, maxima, sums)
