"""Attend to low-bit KV and merge the result with exact attention, for a batch, in Triton.

Memory traffic per token and KV head: the packed key, the packed value and their quantisation steps,
d * (4 + bits) / 8 + 2 bytes, are read once for all G query heads of the group. One more byte marks excluded tokens.

The softmax weights are multiplied by the quantisation steps of the values and rounded to bfloat16 before they are
multiplied by the codes (not under Triton's interpreter). The scores of the selection are not reused, because the
selection may use a predicted query. Reference: `low_bit_lists.merge_approximate`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

from .low_bit import Layout
from .pages import BLOCK, PAGE_BLOCKS, PageTable
from .triton_attention import LISTED, peak_and_sum
from .triton_low_bit_rows import block_of, decoded_steps, padded_sizes, page_arguments
from .triton_low_bit_scores import key_products, query_weights

_LISTED_TOKENS = 1024
"""Number of listed tokens per program of `_exclude`."""

_PARTS = 64
"""Number of parts that the merge reads at a time."""

_WARPS = 2
"""Warps of a program of `_attend`. Of 1 to 8 warps, 2 were fastest on an H200."""

_BLOCK = tl.constexpr(BLOCK)


@triton.constexpr_function
def _centred(bits: int, field: int) -> str:
    """Return assembly code that unpacks one code from each of four bytes to bfloat16, minus the middle code.

    The code begins at bit `bits * field` of a byte. Converting single bytes would take more instructions than the
    products.
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
    """Mark the chosen tokens [i * LISTED_TOKENS, (i + 1) * LISTED_TOKENS) of list p as excluded, in program (p, i).

    A list is one KV head of one sequence. Only the first `counts[p]` entries of chosen `[P, n]` are valid. The first
    program of a list also marks the tokens outside [start, stop) in the list's first and last block.
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
    """Unpack the codes at bit FIELD * BITS of packed values, minus the middle code. The result is exact in bfloat16."""
    if INTERPRETED:
        codes = ((raw >> (FIELD * BITS)) & ((1 << BITS) - 1)).to(tl.float32) - ((1 << BITS) - 1) * 0.5
        return codes if WIDEN else codes.to(tl.bfloat16)
    return tl.inline_asm_elementwise(_centred(BITS, FIELD), "=&r,=&r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def _add_values(
    acc: tl.tensor, rescale: tl.tensor, weights: tl.tensor, raw: tl.tensor,
    FIELD: tl.constexpr, BITS: tl.constexpr, WIDEN: tl.constexpr, INTERPRETED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return acc `[GROUP, V]` * rescale `[GROUP]` + weights `[GROUP, 64]` times the codes of 64 tokens.

    The codes are at bit FIELD * BITS of each byte of the packed values (`_value_levels`).
    """
    return acc * rescale[:, None] + tl.dot(
        weights, _value_levels(raw, FIELD, BITS, WIDEN, INTERPRETED), input_precision="ieee"
    )


@triton.jit
def _store_field(
    outs: tl.tensor, first: tl.tensor, acc: tl.tensor, total: tl.tensor,
    d: tl.constexpr, VALUES: tl.constexpr, V: tl.constexpr, FIELD: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Divide the sums `acc` by the softmax sums `total`, and store the output channels of one field.

    The output is stored in rows [first, first + G) of `outs`, from channel FIELD * VALUES on.
    """
    head, column = tl.arange(0, GROUP), tl.arange(0, V)
    address = outs + (first + head)[:, None] * d + FIELD * VALUES + column[None, :]
    tl.store(address, acc / total[:, None], mask=(head < G)[:, None] & (column < VALUES)[None, :])


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
    d: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, VALUES: tl.constexpr, V: tl.constexpr, BITS: tl.constexpr,
    G: tl.constexpr, GROUP: tl.constexpr, PIECE: tl.constexpr, WIDEN: tl.constexpr,
    INTERPRETED: tl.constexpr, CAPPED: tl.constexpr,
) -> None:  # fmt: skip
    """Attend to the blocks [s * PIECE, (s + 1) * PIECE) of list p, in program (p, s), with an online softmax.

    A list is one KV head of one sequence. The result is stored as part s: always the lse, and the output `[G, d]` if a
    block has tokens in [start, stop) (0 if all of them are excluded). For the sizes, see `padded_sizes`.
    """
    p, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = tl.maximum(tl.load(starts + p) // _BLOCK, piece * PIECE)
    end = tl.minimum((tl.load(stops + p) + _BLOCK - 1) // _BLOCK, (piece + 1) * PIECE)
    head, token, byte, column = tl.arange(0, GROUP), tl.arange(0, _BLOCK), tl.arange(0, K), tl.arange(0, V)
    first, mask = (piece * lists + p) * G, head < G
    peak = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    if begin < end:
        low, high, centre, scale, shift = query_weights(q, mean, p, heads, d, KEYS, K, G, GROUP)
        acc0, acc1 = tl.zeros((GROUP, V), tl.float32), tl.zeros((GROUP, V), tl.float32)
        acc2, acc3 = tl.zeros((GROUP, V), tl.float32), tl.zeros((GROUP, V), tl.float32)
        page = block_of(table, pages, offset, p, heads, piece * PIECE, _BLOCK * (KEYS + VALUES + 2))
        for block in range(begin, end):
            block_address = page + (block - piece * PIECE) * (_BLOCK * (KEYS + VALUES + 2))
            keys = tl.load(
                block_address + byte[:, None] * _BLOCK + token[None, :], mask=(byte < KEYS)[:, None], other=0
            )
            steps = block_address + _BLOCK * (KEYS + VALUES) + token
            products = key_products(low, high, keys, INTERPRETED) - centre[:, None]
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
            value_address = block_address + _BLOCK * KEYS + token[:, None] * VALUES + column[None, :]
            raw = tl.load(value_address, mask=(column < VALUES)[None, :], other=0)
            acc0 = _add_values(acc0, rescale, weights, raw, 0, BITS, WIDEN, INTERPRETED)
            acc1 = _add_values(acc1, rescale, weights, raw, 1, BITS, WIDEN, INTERPRETED)
            if BITS == 2:
                acc2 = _add_values(acc2, rescale, weights, raw, 2, BITS, WIDEN, INTERPRETED)
                acc3 = _add_values(acc3, rescale, weights, raw, 3, BITS, WIDEN, INTERPRETED)
            peak = new_peak
        positive_total = tl.maximum(total, 1e-30)
        _store_field(outs, first, acc0, positive_total, d, VALUES, V, 0, G, GROUP)
        _store_field(outs, first, acc1, positive_total, d, VALUES, V, 1, G, GROUP)
        if BITS == 2:
            _store_field(outs, first, acc2, positive_total, d, VALUES, V, 2, G, GROUP)
            _store_field(outs, first, acc3, positive_total, d, VALUES, V, 3, G, GROUP)
    lse = tl.where(total > 0.0, peak + tl.log(tl.maximum(total, 1e-30)), float("-inf"))
    tl.store(lses + first + head, lse, mask=mask)


@triton.jit(do_not_specialize=["parts", "rows"])
def _merge(
    outs: tl.tensor, lses: tl.tensor, mixing: tl.tensor, exact: tl.tensor, exact_lses: tl.tensor, out: tl.tensor,
    lse: tl.tensor, parts: tl.tensor, rows: tl.tensor,
    d: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, LISTED: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Merge COLUMNS channels of row r of all approximate parts and of the exact attention, in program (r, c).

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
    # Every program of a row reads all parts, which is faster than a separate launch that merges them first.
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
    """Merge exact and approximate attention of a batch, in four launches. See `low_bit_lists.merge_approximate`.

    Inputs and outputs are float32.
    """
    lists, group, d = q.shape
    assert out.shape == q.shape and lse.shape == (lists, group) and out.is_contiguous() and lse.is_contiguous()
    assert out.dtype == lse.dtype == mixing.dtype == torch.float32 and mixing.is_contiguous()
    outs, lses = _parts(q, mean, layout, table, starts, stops, chosen, counts, tokens, softcap)
    merged, merged_lse = torch.empty_like(out), torch.empty_like(lse)
    columns = min(16, triton.next_power_of_2(d))
    _merge[(lists * group, triton.cdiv(d, columns))](
        outs, lses, mixing, out, lse, merged, merged_lse, len(outs), lists * group,
        d=d, D=triton.next_power_of_2(d), PARTS=_PARTS, LISTED=LISTED, COLUMNS=columns,
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
    """Attend to the low-bit KV of tokens that are not excluded, in three launches, without the merge of the pieces.

    An entry of `chosen` excludes a token if it is before `counts[p]` and within [start, stop).

    Returns:
        outs `[pieces, P * G, d]` and lses `[pieces, P * G]`.
    """
    lists, group, d = q.shape
    assert table.lists == lists and q.is_contiguous() and q.dtype == mean.dtype == torch.float32
    assert starts.shape == stops.shape == counts.shape == (lists,) and chosen.is_contiguous()
    blocks = triton.cdiv(tokens, BLOCK)
    pieces, padded_tokens = triton.cdiv(blocks, PAGE_BLOCKS), blocks * BLOCK
    excluded = torch.zeros(lists, padded_tokens, dtype=torch.uint8, device=q.device)
    # At least one program per list, because it also marks tokens outside [start, stop).
    _exclude[(lists, max(1, triton.cdiv(chosen.shape[1], _LISTED_TOKENS)))](
        chosen, counts, starts, stops, excluded, chosen.shape[1], padded_tokens, LISTED_TOKENS=_LISTED_TOKENS
    )
    outs = torch.empty(pieces, lists * group, d, dtype=torch.float32, device=q.device)
    lses = torch.empty(pieces, lists * group, dtype=torch.float32, device=q.device)
    _attend[(lists, pieces)](
        *page_arguments(table), q, mean, starts, stops, excluded, outs, lses, table.heads, padded_tokens, lists,
        softcap or 0.0,
        d=d, **padded_sizes(layout), BITS=layout.value_bits,
        G=group, GROUP=triton.next_power_of_2(group), PIECE=PAGE_BLOCKS,
        WIDEN=not q.is_cuda, INTERPRETED=knobs.runtime.interpret, CAPPED=softcap is not None,
        num_warps=_WARPS,
    )  # fmt: skip
    return outs, lses
