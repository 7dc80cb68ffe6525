"""Score compressed keys with one query per head in Triton.

For each block, the kernels also compute the maximum, which thresholds need, and the sum of exponentials, which the
softmax of grouped query heads needs. Per token and KV head, they read r elements (partial keys) or bits * d / 8 bytes
(packed keys), and write 4 * G bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .lists import Scores
from .pointer_table import ALIGNED, FIELDS, PointerTable
from .triton_append import triton_dtype
from .triton_attention import query_heads
from .triton_columns import load_columns, split_columns

_BLOCK = 256
"""Number of tokens per program for packed keys. Tensor cores need at least 16 rows."""

MAX_QUERIES = 16
"""Maximum number of query heads per program."""

_WIDE = 1024
"""Number of tokens per program for partial keys. Each thread handles 8 tokens: 16 bytes of a column in half precision.
"""

_FIELDS = tl.constexpr(FIELDS)


@triton.jit
def _rint(x: tl.tensor) -> tl.tensor:
    """Round x to the nearest integer, with ties to even, as torch does.

    |x| must be less than 2^22, so that x + 1.5 * 2^23 has no fraction bits.
    """
    return (x + 12582912.0) - 12582912.0


@triton.jit
def store_scores(
    acc: tl.tensor, token: tl.tensor, start: tl.tensor, stop: tl.tensor, p: tl.tensor, head: tl.tensor,
    block: tl.tensor, blocks: tl.tensor, tokens: tl.tensor,
    scores: tl.tensor, maxima: tl.tensor, sums: tl.tensor, G: tl.constexpr,
) -> None:  # fmt: skip
    """Store the scores acc `[h, n]` of the query heads `head` `[h]` and tokens `token` `[n]`, and block statistics.

    Scores outside [start, stop) are stored as -inf. The statistics are the maximum and the sum of exp(score - maximum)
    of each head, or -inf and 0 if the block has no token in this range.
    """
    acc = tl.where(((token >= start) & (token < stop))[None, :], acc, float("-inf"))
    row_start = (p * G + head) * tokens
    tl.store(scores + row_start[:, None] + token[None, :], acc, mask=(head < G)[:, None] & (token < tokens)[None, :])
    peak = tl.max(acc, 1)
    finite_peak = tl.where(peak == float("-inf"), 0.0, peak)
    index = (p * G + head) * blocks + block
    tl.store(maxima + index, peak, mask=head < G)
    tl.store(sums + index, tl.sum(tl.exp(acc - finite_peak[:, None]), 1), mask=head < G)


@triton.jit
def _list_address(
    table: tl.tensor, p: tl.tensor, heads: tl.tensor, KEYS: tl.constexpr, BYTES: tl.constexpr, ALIGN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the address of list p (a KV head of a sequence) and the distance between its rows, in elements.

    KEYS is the element type. The address is a multiple of BYTES bytes, and the distance is a multiple of ALIGN
    elements.
    """
    fields = table + p // heads * _FIELDS
    begin = tl.load(fields).to(tl.pointer_type(KEYS)) + p % heads * tl.load(fields + 1)
    return tl.multiple_of(begin, BYTES), tl.multiple_of(tl.load(fields + 2), ALIGN)


@triton.jit(do_not_specialize=["heads", "blocks"])
def _partial(
    q: tl.tensor, table: tl.tensor, starts: tl.tensor, stops: tl.tensor, scores: tl.tensor, maxima: tl.tensor,
    sums: tl.tensor, tokens: tl.tensor, heads: tl.tensor, blocks: tl.tensor,
    KEYS: tl.constexpr, BYTES: tl.constexpr, ALIGN: tl.constexpr,
    R: tl.constexpr, G: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Program (i, b) scores tokens [b * BLOCK, (b + 1) * BLOCK) of list p column by column.

    `triton_attention.query_heads` derives p and the query heads from i. A program without tokens in [start, stop) reads
    no keys. The last block reads beyond `stop`, up to a multiple of ALIGN tokens. Every list has allocated memory for
    them.
    """
    p, head = query_heads(G, QUERIES)
    block = tl.program_id(1)
    start, stop = tl.load(starts + p), tl.load(stops + p)
    token = block * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((QUERIES, BLOCK), tl.float32)
    if (block * BLOCK < stop) & (block * BLOCK + BLOCK > start):
        keys, column_step = _list_address(table, p, heads, KEYS, BYTES, ALIGN)
        mask = token < tl.multiple_of(tl.cdiv(stop, ALIGN) * ALIGN, ALIGN)
        for column in tl.range(0, R, loop_unroll_factor=4):
            weight = tl.load(q + (p * G + head) * R + column, mask=head < G, other=0.0)
            key = tl.load(keys + (column * column_step + token), mask=mask, other=0.0)
            acc += weight[:, None] * key.to(tl.float32)[None, :]
    store_scores(acc, token, start, stop, p, head, block, blocks, tokens, scores, maxima, sums, G)


@triton.jit
def _field_sums(weights: tl.tensor, raw: tl.tensor, FIELD: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Return the dot products of int8 queries with the codes in field FIELD of packed keys `raw` `[n, D]`, int32.

    8-bit codes are stored minus 128.
    """
    codes = raw
    if BITS < 8:
        bits = raw.to(tl.uint8, bitcast=True) ^ 128
        codes = ((bits >> (FIELD * BITS)) & ((1 << BITS) - 1)).to(tl.int8)
    return tl.dot(weights, tl.trans(codes), out_dtype=tl.int32)


@triton.jit
def _code_products(weights: tl.tensor, raw: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return the dot products of int8 queries with the keys packed in `raw` `[n, D]`, int32 `[h, n * 8 / BITS]`."""
    if BITS == 8:
        products = _field_sums(weights, raw, 0, BITS)
    elif BITS == 4:
        products = tl.interleave(_field_sums(weights, raw, 0, BITS), _field_sums(weights, raw, 1, BITS))
    else:
        even = tl.interleave(_field_sums(weights, raw, 0, BITS), _field_sums(weights, raw, 2, BITS))
        odd = tl.interleave(_field_sums(weights, raw, 1, BITS), _field_sums(weights, raw, 3, BITS))
        products = tl.interleave(even, odd)
    return products


@triton.jit
def _weighted(
    q: tl.tensor, factors: tl.tensor, start: tl.tensor, mask: tl.tensor,
    d: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load columns [FIRST, FIRST + WIDTH) of queries and multiply them by `factors` `[d]`. Return `[n, WIDTH]`."""
    column = FIRST + tl.arange(0, WIDTH)
    query = load_columns(q, start, mask, d, FIRST, WIDTH)
    return query * tl.load(factors + column, mask=column < d, other=0.0)[None, :]


@triton.jit
def rounded(weight: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Divide weight `[n, w]` by scale `[n]` and round to int8."""
    return _rint(tl.div_rn(weight, scale[:, None] + tl.zeros_like(weight))).to(tl.int8)


@triton.jit(do_not_specialize=["heads", "blocks"])
def _packed(
    q: tl.tensor, table: tl.tensor, mean: tl.tensor, step: tl.tensor, starts: tl.tensor, stops: tl.tensor,
    scores: tl.tensor, maxima: tl.tensor, sums: tl.tensor,
    tokens: tl.tensor, blocks: tl.tensor, heads: tl.tensor, ALIGN: tl.constexpr,
    d: tl.constexpr, W: tl.constexpr, D: tl.constexpr, REST: tl.constexpr,
    G: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (i, b) scores the packed keys of block b of list p (one KV head of one sequence).

    For p and the query heads, see `triton_attention.query_heads`. Only the first d of the W bytes of a row are used.
    For D and REST, see `split_columns`.
    """
    p, head = query_heads(G, QUERIES)
    block = tl.program_id(1)
    start, stop = tl.load(starts + p), tl.load(stops + p)
    F: tl.constexpr = 8 // BITS
    token = block * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((QUERIES, BLOCK), tl.float32)
    if (block * BLOCK < stop) & (block * BLOCK + BLOCK > start):
        keys, row_step = _list_address(table, p, heads, tl.int8, ALIGN, ALIGN)
        # Every program quantises the query again, because its G * d numbers are few compared to the keys. Columns from
        # d on may contain arbitrary bytes, because their weights are 0.
        begin, first = (p * G + head) * d, (p % heads) * d
        weight = _weighted(q, step + first, begin, head < G, d, 0, D)
        largest = tl.max(tl.abs(weight), 1)
        if REST:
            rest = _weighted(q, step + first, begin, head < G, d, D, REST)
            largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))
        scale = tl.div_rn(tl.maximum(largest, 1.1754943508222875e-38 * 127), 127.0)
        codes = rounded(weight, scale)
        total = tl.sum(codes.to(tl.int32), 1)
        centre = tl.sum(_weighted(q, mean + first, begin, head < G, d, 0, D), 1)
        row = block * (BLOCK // F) + tl.arange(0, BLOCK // F)
        row_start = row.to(tl.int64) * row_step
        products = _code_products(codes, load_columns(keys, row_start, row * F < stop, W, 0, D), BITS)
        if REST:
            codes = rounded(rest, scale)
            total += tl.sum(codes.to(tl.int32), 1)
            centre += tl.sum(_weighted(q, mean + first, begin, head < G, d, D, REST), 1)
            products += _code_products(codes, load_columns(keys, row_start, row * F < stop, W, D, REST), BITS)
        if BITS == 8:
            products += 128 * total[:, None]
        middle = ((1 << BITS) - 1) / 2
        acc = products.to(tl.float32) * scale[:, None] + (centre - scale * total.to(tl.float32) * middle)[:, None]
    store_scores(acc, token, start, stop, p, head, block, blocks, tokens, scores, maxima, sums, G)


def partial_scores(
    q: torch.Tensor, keys: PointerTable, starts: torch.Tensor, stops: torch.Tensor, tokens: int
) -> Scores:
    """Score the partial keys of a batch, in one launch. See `lists.partial_scores`.

    Scores are float32 for keys of any dtype.
    """
    lists, group, r = q.shape
    assert keys.lists == lists and keys.tensors[0].shape[1] == r and q.is_contiguous() and q.dtype == torch.float32
    assert starts.shape == stops.shape == (lists,)
    blocks, wide = triton.cdiv(tokens, _WIDE), ALIGNED if keys.aligned else 1
    out, maxima, sums = _outputs(q, tokens, blocks)
    queries = min(8, triton.next_power_of_2(group))
    _partial[(lists * triton.cdiv(group, queries), blocks)](
        q, keys.table, starts, stops, out, maxima, sums, tokens, keys.heads, blocks,
        KEYS=triton_dtype(keys.dtype), BYTES=wide, ALIGN=max(1, wide // keys.dtype.itemsize),
        R=r, G=group, QUERIES=queries, BLOCK=_WIDE,
    )  # fmt: skip
    return Scores(out, maxima, sums)


def quantised_scores(
    q: torch.Tensor,
    packed: PointerTable,
    mean: torch.Tensor,
    step: torch.Tensor,
    bits: int,
    starts: torch.Tensor,
    stops: torch.Tensor,
    tokens: int,
) -> Scores:
    """Score the packed keys of a batch, in one launch. See `lists.quantised_scores`.

    Queries, mean, step and scores are float32.
    """
    lists, group, d = q.shape
    width = packed.tensors[0].shape[2]
    assert packed.lists == lists and width >= d and packed.dtype == torch.int8
    assert q.is_contiguous() and mean.shape == step.shape == (packed.heads, d)
    assert q.dtype == mean.dtype == step.dtype == torch.float32
    assert mean.is_contiguous() and step.is_contiguous() and starts.shape == stops.shape == (lists,)
    blocks = triton.cdiv(tokens, _BLOCK)
    out, maxima, sums = _outputs(q, tokens, blocks)
    queries, columns = min(MAX_QUERIES, triton.next_power_of_2(group)), split_columns(width, 32, 32)
    _packed[(lists * triton.cdiv(group, queries), blocks)](
        q, packed.table, mean, step, starts, stops, out, maxima, sums, tokens, blocks, packed.heads,
        ALIGN=ALIGNED if packed.aligned else 1, d=d, W=width, **columns, G=group, QUERIES=queries, BLOCK=_BLOCK,
        BITS=bits, num_warps=8 if columns["D"] > 256 else 4,
    )  # fmt: skip
    return Scores(out, maxima, sums)


def _outputs(q: torch.Tensor, tokens: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lists, group, _ = q.shape
    out = torch.empty(lists, group, tokens, dtype=torch.float32, device=q.device)
    return out, out.new_empty(lists, group, blocks), out.new_empty(lists, group, blocks)
