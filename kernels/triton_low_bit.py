"""Attend to the low-bit KV of a batch in Triton, and merge the result with exact attention.

Memory traffic per token and KV head: d * (4 + bits) / 8 + 2 bytes for the packed key, the packed value and their
quantisation steps, and one byte that marks excluded tokens. The KV is read once for all G query heads of the group.

The softmax weights are multiplied by the quantisation steps of the values and then by the codes. In between, they are
rounded to bfloat16, except under Triton's interpreter. The scores of the selection are not reused, because the
selection may use a predicted query.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

from .low_bit import Layout
from .pages import BLOCK, PAGE_BLOCKS, PageTable
from .triton_attention import LISTED, merge_parts, peak_and_sum, query_heads
from .triton_low_bit_rows import block_of, decoded_steps, padded_sizes, page_arguments
from .triton_low_bit_scores import key_products, query_weights
from .triton_scores import MAX_QUERIES

_LISTED_TOKENS = 1024
"""Number of listed tokens per program of `_exclude`."""

_PARTS = 64
"""Number of parts that the merge reads at a time."""

_READ_OFTEN = 256
"""Largest head dimension for which each program of `_merge` reads all parts. For larger ones, another launch merges the
parts first.
"""

_WARPS = 2
"""Number of warps per program of `_attend`. Of 1 to 8 warps, 2 were fastest on an H200."""

_BLOCK = tl.constexpr(BLOCK)


@triton.constexpr_function
def _centred(bits: int, field: int) -> str:
    """Return assembly code that unpacks one code from each of four bytes and subtracts the middle code, in bfloat16.

    The code begins at bit `bits * field` of a byte. Converting the bytes one by one would take more instructions than
    the products.
    """
    shift, codes = 2 - bits * field, f"0x{4 * (2**bits - 1) * 0x01010101:08X}"
    shifted = f"shl.b32 codes, $2, {shift};" if shift >= 0 else f"shr.b32 codes, $2, {-shift};"
    # 0x4200 is 32.0 in bfloat16, and its last mantissa bit is 0.25, so a code shifted by two bits gives 32 + code.
    middle = 0x4200 + 2 * (2**bits - 1) + 0x8000  # bits of -(32 + (2^bits - 1) / 2)
    return f"""{{ .reg .b32 codes, one, middle;
        mov.b32 one, 0x3F803F80; mov.b32 middle, 0x{middle * 0x10001:08X};
        {shifted} and.b32 codes, codes, {codes};
        prmt.b32 $0, codes, 0x42424242, 0x5140; prmt.b32 $1, codes, 0x42424242, 0x7362;
        fma.rn.bf16x2 $0, $0, one, middle; fma.rn.bf16x2 $1, $1, one, middle; }}"""


@triton.jit(do_not_specialize=["n", "tokens"])
def _exclude(
    chosen: tl.tensor, counts: tl.tensor, starts: tl.tensor, stops: tl.tensor, excluded: tl.tensor, n: tl.tensor,
    tokens: tl.tensor, LISTED_TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (p, i) marks the chosen tokens [i * LISTED_TOKENS, (i + 1) * LISTED_TOKENS) of list p as excluded.

    Only the first `counts[p]` entries of chosen `[P, n]` are valid. The first program of a list also marks the tokens
    outside [start, stop) in the list's first and last block.
    """
    p, index = tl.program_id(0).to(tl.int64), tl.program_id(1) * LISTED_TOKENS + tl.arange(0, LISTED_TOKENS)
    token = tl.load(chosen + p * n + index, mask=index < tl.load(counts + p), other=-1)
    excluded_list = excluded + p * tokens
    tl.store(excluded_list + token, tl.full((LISTED_TOKENS,), 1, tl.uint8), mask=(token >= 0) & (token < tokens))
    if tl.program_id(1) == 0:
        start, stop, row = tl.load(starts + p), tl.load(stops + p), tl.arange(0, _BLOCK)
        marks = tl.full((_BLOCK,), 1, tl.uint8)
        tl.store(excluded_list + start - row - 1, marks, mask=row < start % _BLOCK)
        tl.store(excluded_list + stop + row, marks, mask=row < (stop + _BLOCK - 1) // _BLOCK * _BLOCK - stop)


@triton.jit
def _value_levels(
    raw: tl.tensor, FIELD: tl.constexpr, BITS: tl.constexpr, WIDEN: tl.constexpr, INTERPRETED: tl.constexpr
) -> tl.tensor:
    """Unpack the codes at bit FIELD * BITS and subtract the middle code. The result is exact in bfloat16."""
    if INTERPRETED:
        codes = ((raw >> (FIELD * BITS)) & ((1 << BITS) - 1)).to(tl.float32) - ((1 << BITS) - 1) * 0.5
        return codes if WIDEN else codes.to(tl.bfloat16)
    return tl.inline_asm_elementwise(_centred(BITS, FIELD), "=&r,=&r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def _add_values(
    accs: tl.tuple, rescale: tl.tensor, weights: tl.tensor, address: tl.tensor,
    VALUES: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, WIDEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Multiply each of `accs` by `rescale` `[h]`, and add `weights` `[h, n]` times the value codes of n tokens.

    The accumulators `accs` are `[h, WIDTH]`. The codes are read from the bytes [FIRST, FIRST + WIDTH) of the packed
    values at `address` `[n]`. Accumulator i uses the codes at bit i * BITS of each byte (`_value_levels`).
    """
    column = FIRST + tl.arange(0, WIDTH)
    raw = tl.load(address[:, None] + column[None, :], mask=(column < VALUES)[None, :], other=0)
    acc0 = accs[0] * rescale[:, None] + tl.dot(
        weights, _value_levels(raw, 0, BITS, WIDEN, INTERPRETED), input_precision="ieee"
    )
    acc1 = accs[1] * rescale[:, None] + tl.dot(
        weights, _value_levels(raw, 1, BITS, WIDEN, INTERPRETED), input_precision="ieee"
    )
    acc2, acc3 = accs[2], accs[3]
    if BITS == 2:
        acc2 = acc2 * rescale[:, None] + tl.dot(
            weights, _value_levels(raw, 2, BITS, WIDEN, INTERPRETED), input_precision="ieee"
        )
        acc3 = acc3 * rescale[:, None] + tl.dot(
            weights, _value_levels(raw, 3, BITS, WIDEN, INTERPRETED), input_precision="ieee"
        )
    return acc0, acc1, acc2, acc3


@triton.jit
def _store_values(
    outs: tl.tensor, row: tl.tensor, mask: tl.tensor, accs: tl.tuple, total: tl.tensor,
    d: tl.constexpr, VALUES: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
) -> None:  # fmt: skip
    """Divide the sums of `_add_values` by the softmax sums `total`, and store them in the rows `row` of `outs`."""
    column = FIRST + tl.arange(0, WIDTH)
    address, stored = outs + row[:, None] * d + column[None, :], mask[:, None] & (column < VALUES)[None, :]
    tl.store(address, accs[0] / total[:, None], mask=stored)
    tl.store(address + VALUES, accs[1] / total[:, None], mask=stored)
    if BITS == 2:
        tl.store(address + 2 * VALUES, accs[2] / total[:, None], mask=stored)
        tl.store(address + 3 * VALUES, accs[3] / total[:, None], mask=stored)


@triton.jit
def _capped(scores: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """Return c tanh(s / c) for scores s and the soft cap c, computed from e^(-2 |s| / c)."""
    decays = tl.exp(tl.abs(scores) * (-2.0 / softcap))
    size = softcap * (1.0 - decays) / (1.0 + decays)
    return tl.where(scores < 0.0, -size, size)


@triton.jit(do_not_specialize=["pages", "offset", "tokens", "lists"])
def _attend(
    table: tl.tensor, pages: tl.tensor, offset: tl.tensor, q: tl.tensor, mean: tl.tensor, starts: tl.tensor,
    stops: tl.tensor, excluded: tl.tensor, outs: tl.tensor, lses: tl.tensor, heads: tl.tensor, tokens: tl.tensor,
    lists: tl.tensor, softcap: tl.tensor,
    d: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, K_REST: tl.constexpr, VALUES: tl.constexpr, V: tl.constexpr,
    V_REST: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, QUERIES: tl.constexpr, PIECE: tl.constexpr,
    WIDEN: tl.constexpr, INTERPRETED: tl.constexpr, CAPPED: tl.constexpr,
) -> None:  # fmt: skip
    """Program (i, s) attends to the blocks [s * PIECE, (s + 1) * PIECE) of list p, with an online softmax.

    For p and the query heads, see `triton_attention.query_heads`. The result is part s of the output. The lse is always
    stored. The values `[QUERIES, d]` are stored only if a block has tokens in [start, stop). They are 0 if all these
    tokens are excluded. For the sizes, see `padded_sizes`.
    """
    p, head = query_heads(G, QUERIES)
    piece = tl.program_id(1)
    begin = tl.maximum(tl.load(starts + p) // _BLOCK, piece * PIECE)
    end = tl.minimum((tl.load(stops + p) + _BLOCK - 1) // _BLOCK, (piece + 1) * PIECE)
    token, mask, row = tl.arange(0, _BLOCK), head < G, (piece * lists + p) * G + head
    peak = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    if begin < end:
        query, centre, scale, shift = query_weights(q, mean, p, head, heads, d, KEYS, K, K_REST, G)
        zero = tl.zeros((QUERIES, V), tl.float32)
        accs = (zero, zero, zero, zero)
        rests = accs
        if V_REST:
            zero_rest = tl.zeros((QUERIES, V_REST), tl.float32)
            rests = (zero_rest, zero_rest, zero_rest, zero_rest)
        page = block_of(table, pages, offset, p, heads, piece * PIECE, _BLOCK * (KEYS + VALUES + 2))
        for block in range(begin, end):
            block_address = page + (block - piece * PIECE) * (_BLOCK * (KEYS + VALUES + 2))
            steps = block_address + _BLOCK * (KEYS + VALUES) + token
            products = key_products(query, block_address + token, token >= 0, KEYS, K, K_REST, INTERPRETED)
            products -= centre[:, None]
            scores = products * decoded_steps(tl.load(steps))[None, :] * scale[:, None] + shift[:, None]
            if CAPPED:
                scores = _capped(scores, softcap)
            included = tl.load(excluded + p * tokens + block * _BLOCK + token) == 0
            scores = tl.where(included[None, :], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            finite_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            exponentials, rescale = tl.exp(scores - finite_peak[:, None]), tl.exp(peak - finite_peak)
            total = total * rescale + tl.sum(exponentials, 1)
            weights = exponentials * decoded_steps(tl.load(steps + _BLOCK))[None, :]
            if not WIDEN:
                weights = weights.to(tl.bfloat16)
            values = block_address + _BLOCK * KEYS + token * VALUES
            accs = _add_values(accs, rescale, weights, values, VALUES, 0, V, BITS, WIDEN, INTERPRETED)
            if V_REST:
                rests = _add_values(rests, rescale, weights, values, VALUES, V, V_REST, BITS, WIDEN, INTERPRETED)
            peak = new_peak
        positive_total = tl.maximum(total, 1e-30)
        _store_values(outs, row, mask, accs, positive_total, d, VALUES, 0, V, BITS)
        if V_REST:
            _store_values(outs, row, mask, rests, positive_total, d, VALUES, V, V_REST, BITS)
    lse = tl.where(total > 0.0, peak + tl.log(tl.maximum(total, 1e-30)), float("-inf"))
    tl.store(lses + row, lse, mask=mask)


@triton.jit(do_not_specialize=["parts", "rows"])
def _merge(
    outs: tl.tensor, lses: tl.tensor, mixing: tl.tensor, exact: tl.tensor, exact_lses: tl.tensor, out: tl.tensor,
    lse: tl.tensor, parts: tl.tensor, rows: tl.tensor,
    d: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, LISTED: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (r, c) merges COLUMNS channels of row r from all approximate parts and from the exact attention.

    The approximate output is multiplied by `mixing` `[d, d]` to undo the mixing of the values. The first program of a
    row also stores its lse.
    """
    r, part, column = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS), tl.arange(0, D)
    exact_lse = tl.load(exact_lses + r)
    peak, approximate = peak_and_sum(lses, r, parts, rows, exact_lse, LISTED)
    finite_peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.maximum(approximate + tl.exp(exact_lse - finite_peak), 1e-30)
    if tl.program_id(1) == 0:
        tl.store(lse + r, tl.where(peak == float("-inf"), peak, finite_peak + tl.log(total)))
    # Up to `_READ_OFTEN` channels, every program of a row reads all parts, which is faster than a separate launch that
    # merges them first.
    acc = tl.zeros((D,), tl.float32)
    for first in range(0, parts, PARTS):
        part_row = (first + part) * rows + r
        part_lse = tl.load(lses + part_row, mask=first + part < parts, other=float("-inf"))
        # Also read parts without tokens, which were never written, so that loads need not wait for each other.
        part_mask = (first + part < parts)[:, None] & (column < d)[None, :]
        part_out = tl.load(outs + part_row[:, None] * d + column[None, :], mask=part_mask, other=0.0)
        acc += tl.sum(
            tl.where((part_lse > float("-inf"))[:, None], part_out, 0.0) * tl.exp(part_lse - finite_peak)[:, None], 0
        )
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (channel < d)[:, None] & (column < d)[None, :]
    tile = tl.load(mixing + channel[:, None] * d + column[None, :], mask=mask, other=0.0)
    merged = tl.load(exact + r * d + channel, mask=channel < d, other=0.0) * tl.exp(exact_lse - finite_peak)
    tl.store(out + r * d + channel, (merged + tl.sum(tile * acc[None, :], 1)) / total, mask=channel < d)


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
    """Merge exact and approximate attention of a batch. See `low_bit_lists.merge_approximate`.

    There are four launches, or five if d exceeds `_READ_OFTEN`. Inputs and outputs are float32.
    """
    lists, group, d = q.shape
    assert out.shape == q.shape and lse.shape == (lists, group) and out.is_contiguous() and lse.is_contiguous()
    assert out.dtype == lse.dtype == mixing.dtype == torch.float32 and mixing.is_contiguous()
    outs, lses = _parts(q, mean, layout, table, starts, stops, chosen, counts, tokens, softcap)
    parts_at_once = _PARTS
    if d > _READ_OFTEN:
        outs, lses = (part.unsqueeze(0) for part in merge_parts(outs, lses))
        parts_at_once = 1
    merged, merged_lse = torch.empty_like(out), torch.empty_like(lse)
    columns = min(16, triton.next_power_of_2(d))
    _merge[(lists * group, triton.cdiv(d, columns))](
        outs, lses, mixing, out, lse, merged, merged_lse, len(outs), lists * group,
        d=d, D=triton.next_power_of_2(d), PARTS=parts_at_once, LISTED=LISTED, COLUMNS=columns,
    )  # fmt: skip
    return merged, merged_lse


def _parts(
    q: torch.Tensor,
    mean: torch.Tensor,
    layout: Layout,
    table: PageTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    chosen: torch.Tensor,
    counts: torch.Tensor,
    tokens: int,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the low-bit KV of tokens that are not excluded, in three launches, without merging the pieces.

    The first `counts[p]` tokens of list p in `chosen` are excluded if they are within [start, stop).

    Returns:
        outs `[pieces, P * G, d]` and lses `[pieces, P * G]`.
    """
    lists, group, d = q.shape
    assert table.lists == lists and q.is_contiguous() and q.dtype == mean.dtype == torch.float32
    assert starts.shape == stops.shape == counts.shape == (lists,) and chosen.is_contiguous()
    blocks = triton.cdiv(tokens, BLOCK)
    pieces, padded_tokens = triton.cdiv(blocks, PAGE_BLOCKS), blocks * BLOCK
    excluded = torch.zeros(lists, padded_tokens, dtype=torch.uint8, device=q.device)
    # Launch at least one program per list, because the first one also marks tokens outside [start, stop).
    _exclude[(lists, max(1, triton.cdiv(chosen.shape[1], _LISTED_TOKENS)))](
        chosen, counts, starts, stops, excluded, chosen.shape[1], padded_tokens, LISTED_TOKENS=_LISTED_TOKENS
    )
    outs = torch.empty(pieces, lists * group, d, dtype=torch.float32, device=q.device)
    lses = torch.empty(pieces, lists * group, dtype=torch.float32, device=q.device)
    queries, tiles = min(MAX_QUERIES, triton.next_power_of_2(group)), padded_sizes(layout)
    _attend[(lists * triton.cdiv(group, queries), pieces)](
        *page_arguments(table), q, mean, starts, stops, excluded, outs, lses, table.heads, padded_tokens, lists,
        softcap or 0.0,
        d=d, **tiles, BITS=layout.value_bits, G=group, QUERIES=queries, PIECE=PAGE_BLOCKS,
        WIDEN=not q.is_cuda, INTERPRETED=knobs.runtime.interpret, CAPPED=softcap is not None,
        num_warps=_WARPS if tiles["K"] <= 128 else 4 * _WARPS,
    )  # fmt: skip
    return outs, lses
