"""Sparse decode attention with grouped queries in Triton, and the merge of parts by their log-sum-exp.

A list is the KV of one KV head of one sequence. Each key and value vector is read once for all G query heads of its
group. Every list is split into pieces, so that even one sequence occupies all multiprocessors. The results of the
pieces, called *parts*, are merged.

Products of half-precision numbers are exact in float32. The softmax weights are rounded to the dtype of the KV before
the second product, except under Triton's interpreter, whose half-precision products are wrong. Apart from float32
rounding, the error of the output is at most 2^-9 (bf16) or 2^-12 (fp16) times the largest |v| of the list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..core import BLOCK_SIZE
from .pointer_table import ALIGNED
from .triton_columns import load_columns, split_columns

_STEP_BYTES = 1 << 14
"""Number of bytes of K (and of V) that a loop iteration reads.

Several iterations then fit in the shared memory of consumer cards (99 KiB).
"""

_TILE_BYTES = 92 << 10
"""Maximum number of bytes of queries, K and V in shared memory, which a consumer card limits to 99 KiB."""

_QUERY_BYTES = 1 << 14
"""Maximum size in bytes of a program's queries (16 to 64 queries).

Queries and KV together fit in the shared memory of a consumer card.
"""

PIECE_ROWS = 256
"""Number of KV vectors per piece. One program computes one piece."""

_BLOCK_SIZE = tl.constexpr(BLOCK_SIZE)

_PARTS, LISTED = 16, 256
"""Number of outputs, and number of log-sum-exps, that the merge reads at a time."""


@triton.jit
def query_heads(G: tl.constexpr, QUERIES: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the list and the QUERIES query heads that this program processes.

    Adjacent programs share a list, so that its KV is read from memory once. Head indices from G on are padding.
    """
    BLOCKS: tl.constexpr = (G + QUERIES - 1) // QUERIES
    item = tl.program_id(0)
    return (item // BLOCKS).to(tl.int64), item % BLOCKS * QUERIES + tl.arange(0, QUERIES)


@triton.jit
def attend_rows(
    q: tl.tensor, query_start: tl.tensor, query_mask: tl.tensor, k: tl.tensor, v: tl.tensor, k_row: tl.tensor,
    v_row: tl.tensor, begin: tl.tensor, stop: tl.tensor, scale: tl.tensor,
    d: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    WIDEN: tl.constexpr, SAME: tl.constexpr, bases: tl.tensor | None = None, paged: tl.tensor | None = None,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Attend with QUERIES queries to rows [begin, stop) of K and V, with an online softmax.

    The queries begin at elements `query_start` `[QUERIES]` of q. `k` and `v` are the addresses of row 0. Successive
    rows are `k_row` and `v_row` elements apart. If SAME is true, the values are the keys. For D and REST, see
    `split_columns`.

    If there are `bases` and `paged` is true, row t is at index `bases[t // BLOCK_SIZE] + t % BLOCK_SIZE` instead of t.

    Returns:
        The largest score of each query `[QUERIES]` (-inf if there are no rows), its sum of exp(score - largest)
        `[QUERIES]`, and the sum of the values weighted by these exponentials: `[QUERIES, D]` and, if REST is not 0,
        `[QUERIES, REST]`.
    """
    query = load_columns(q, query_start, query_mask, d, 0, D)
    query = query.to(tl.float32) if WIDEN else query
    peak = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc, acc_rest = tl.zeros((QUERIES, D), tl.float32), peak
    if REST:
        query_rest = load_columns(q, query_start, query_mask, d, D, REST)
        query_rest = query_rest.to(tl.float32) if WIDEN else query_rest
        acc_rest = tl.zeros((QUERIES, REST), tl.float32)
    start = begin
    if bases is not None:  # Each tile begins at a multiple of BLOCK, so that it is in one block.
        start = tl.where(begin < stop, begin // BLOCK * BLOCK, stop)
    for first in range(start, stop, BLOCK):
        row = first + tl.arange(0, BLOCK)
        valid, index = row < stop, row.to(tl.int64)
        if bases is not None:
            block = first // _BLOCK_SIZE
            valid &= row >= begin
            index += tl.load(bases + block, mask=paged, other=block * _BLOCK_SIZE) - block * _BLOCK_SIZE
        keys = load_columns(k, index * k_row, valid, d, 0, D)
        values = keys if SAME else load_columns(v, index * v_row, valid, d, 0, D)
        if WIDEN:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if REST:
            keys_rest = load_columns(k, index * k_row, valid, d, D, REST)
            values_rest = keys_rest if SAME else load_columns(v, index * v_row, valid, d, D, REST)
            if WIDEN:
                keys_rest, values_rest = keys_rest.to(tl.float32), values_rest.to(tl.float32)
            scores = tl.dot(query_rest, tl.trans(keys_rest), scores, input_precision="ieee")
        scores = tl.where(valid[None, :], scores * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - new_peak[:, None])
        rescale = tl.exp(peak - new_peak)
        total = total * rescale + tl.sum(weights, 1)
        weights = weights.to(values.dtype)
        acc = acc * rescale[:, None] + tl.dot(weights, values, input_precision="ieee")
        if REST:
            acc_rest = acc_rest * rescale[:, None] + tl.dot(weights, values_rest, input_precision="ieee")
        peak = new_peak
    return peak, total, acc, acc_rest


@triton.jit
def store_part(
    outs: tl.tensor, lses: tl.tensor, row: tl.tensor, mask: tl.tensor, peak: tl.tensor, total: tl.tensor,
    acc: tl.tensor, acc_rest: tl.tensor, has_rows: tl.tensor, d: tl.constexpr, D: tl.constexpr, REST: tl.constexpr,
) -> None:  # fmt: skip
    """Store the result of `attend_rows` in the rows `row` `[QUERIES]` of `outs` and `lses`, for queries in `mask`.

    The output is stored only if `has_rows` is true.
    """
    lse = tl.where(total > 0.0, peak + tl.log(tl.maximum(total, 1e-30)), float("-inf"))
    tl.store(lses + row, lse, mask=mask)
    if has_rows:
        column = tl.arange(0, D)
        address = outs + row[:, None] * d + column[None, :]
        tl.store(address, acc / total[:, None], mask=mask[:, None] & (column < d)[None, :])
        if REST:
            column = D + tl.arange(0, REST)
            address = outs + row[:, None] * d + column[None, :]
            tl.store(address, acc_rest / total[:, None], mask=mask[:, None] & (column < d)[None, :])


@triton.jit(do_not_specialize=["lists", "k_list", "v_list"])
def _attend(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, counts: tl.tensor, outs: tl.tensor, lses: tl.tensor, scale: tl.tensor,
    lists: tl.tensor, k_list: tl.tensor, k_row: tl.tensor, v_list: tl.tensor, v_row: tl.tensor,
    d: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, G: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK: tl.constexpr, PIECE: tl.constexpr, ALIGN: tl.constexpr, WIDEN: tl.constexpr, SAME: tl.constexpr,
) -> None:  # fmt: skip
    """Program (i, s) attends with QUERIES query heads to rows [s * PIECE, (s + 1) * PIECE) of list p.

    For p and the query heads, see `query_heads`. The result is stored as part s. The lse is always stored, but the
    output `[QUERIES, d]` only if the piece has valid rows. All strides and addresses are multiples of ALIGN elements.
    """
    p, head = query_heads(G, QUERIES)
    piece = tl.program_id(1)
    BYTES: tl.constexpr = ALIGN * q.dtype.element_ty.primitive_bitwidth // 8
    k, v = tl.multiple_of(k + p * k_list, BYTES), tl.multiple_of(v + p * v_list, BYTES)
    k_row, v_row = k_row // ALIGN * ALIGN, v_row // ALIGN * ALIGN
    stop = tl.minimum(tl.load(counts + p), (piece + 1) * PIECE)
    peak, total, acc, acc_rest = attend_rows(
        q, (p * G + head) * d, head < G, k, v, k_row, v_row, piece * PIECE, stop, scale,
        d, D, REST, QUERIES, BLOCK, WIDEN, SAME,
    )  # fmt: skip
    row = (piece * lists + p) * G + head
    store_part(outs, lses, row, head < G, peak, total, acc, acc_rest, stop > piece * PIECE, d, D, REST)


@triton.jit
def peak_and_sum(
    lses: tl.tensor, r: tl.tensor, parts: tl.tensor, rows: tl.tensor, peak: tl.tensor, LISTED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return m, the maximum of `peak` and the lses of all parts in row r, and the sum of exp(lse - m) over the parts.

    LISTED parts are read at a time. This number is a constant, so that longer contexts do not cause a recompilation.
    """
    part = tl.arange(0, LISTED)
    for first in range(0, parts, LISTED):
        part_lses = tl.load(lses + (first + part) * rows + r, mask=first + part < parts, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(part_lses, 0))
    finite_peak = tl.where(peak == float("-inf"), 0.0, peak)
    exponentials = tl.zeros((LISTED,), tl.float32)
    for first in range(0, parts, LISTED):
        part_lses = tl.load(lses + (first + part) * rows + r, mask=first + part < parts, other=float("-inf"))
        exponentials += tl.exp(part_lses - finite_peak)
    return peak, tl.sum(exponentials, 0)


@triton.jit(do_not_specialize=["parts", "rows"])
def _merge(
    outs: tl.tensor, lses: tl.tensor, out: tl.tensor, lse: tl.tensor, parts: tl.tensor, rows: tl.tensor,
    d: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, LISTED: tl.constexpr,
) -> None:  # fmt: skip
    """Program r merges the results of all parts for row r (one query)."""
    r, part, column = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS), tl.arange(0, D)
    peak, total = peak_and_sum(lses, r, parts, rows, tl.load(lses + r), LISTED)
    finite_peak = tl.where(peak == float("-inf"), 0.0, peak)
    acc = tl.zeros((D,), tl.float32)
    for first in range(0, parts, PARTS):
        index = (first + part) * rows + r
        part_lse = tl.load(lses + index, mask=first + part < parts, other=float("-inf"))
        mask = (part_lse > float("-inf"))[:, None] & (column < d)[None, :]
        part_out = tl.load(outs + index[:, None] * d + column[None, :], mask=mask, other=0.0)
        acc += tl.sum(part_out * tl.exp(part_lse - finite_peak)[:, None], 0)
    positive_total = tl.maximum(total, 1e-30)  # at least 1 if any part has rows
    tl.store(lse + r, tl.where(total > 0.0, finite_peak + tl.log(positive_total), float("-inf")))
    tl.store(out + r * d + column, acc / positive_total, mask=column < d)


def sizes(d: int, itemsize: int, queries: int, *, same: bool) -> dict[str, int]:
    """Return the tile sizes of `attend_rows` for `queries` queries per KV head.

    BLOCK is the number of rows per loop iteration, at least 16 for matrix products. num_stages is the number of
    iterations in flight. Fewer iterations are in flight if 16 rows exceed `_STEP_BYTES`.
    """
    columns = split_columns(d)
    rows = _STEP_BYTES // (columns["D"] * itemsize)
    block, stages = max(16, min(64, 2 * rows if same else rows)), 3 if rows >= 16 else 2
    warps = 8 if d * itemsize > 2048 else 4  # keys of 576 float32 numbers would spill registers
    queries = min(max_queries(d, itemsize), triton.next_power_of_2(queries))
    planes, row_bytes = 1 if same else 2, (columns["D"] + columns["REST"]) * itemsize
    # All but one of the iterations in flight are in shared memory. With a second tile, they may be too large.
    if (block * planes * (stages - 1) + queries) * row_bytes > _TILE_BYTES:
        block, stages = max(16, block // 2), 3 if block > 16 else 2
    tiles = {"BLOCK": block, "num_stages": stages, "QUERIES": queries, "SAME": same, "num_warps": warps}
    return columns | tiles


def max_queries(d: int, itemsize: int) -> int:
    """Return the maximum number of queries per program.

    For float32, it is 16, because float32 products do not use tensor cores.
    """
    return 16 if itemsize == 4 else max(16, min(64, _QUERY_BYTES // (triton.next_power_of_2(d) * itemsize)))


def alignment(*rows: torch.Tensor) -> int:
    """Return the number of elements per 16-byte load, or 1 if some vectors `[P, n, d]` are not aligned to 16 bytes."""
    addresses = (x for each in rows for x in (each.data_ptr(), *(each.itemsize * step for step in each.stride()[:2])))
    return ALIGNED // rows[0].itemsize if all(x % ALIGNED == 0 for x in addresses) else 1


def are_same(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether the values are the keys (latent attention)."""
    return k.data_ptr() == v.data_ptr() and k.stride() == v.stride()


def attend_counted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the valid KV of each list, in one launch followed by a merge. See `lists.attend_counted`.

    q, k and v must have the same dtype: float32, float16 or bfloat16.
    """
    lists, group, d = q.shape
    pieces = max(1, triton.cdiv(k.shape[1], PIECE_ROWS))
    outs = torch.empty(pieces, lists * group, d, dtype=torch.float32, device=q.device)
    lses = torch.empty(pieces, lists * group, dtype=torch.float32, device=q.device)
    attend_pieces(q, k, v, counts, outs, lses, scale)
    out, lse = merge_parts(outs, lses)
    return out.view(lists, group, d), lse.view(lists, group)


def attend_pieces(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor,
    outs: torch.Tensor,
    lses: torch.Tensor,
    scale: float,
) -> None:
    """Attend to pieces of PIECE_ROWS KV vectors each, and store the results without merging them.

    Writes float32 outs `[pieces, P * G, d]` and lses `[pieces, P * G]`. For the inputs, see `lists.attend_counted`.
    """
    (lists, group, d), listed = q.shape, k.shape[1]
    assert k.shape == v.shape == (lists, listed, d) and q.dtype == k.dtype == v.dtype and counts.shape == (lists,)
    assert q.is_contiguous() and k.stride(2) == v.stride(2) == 1 and len(outs) * PIECE_ROWS >= listed
    tiles = sizes(d, k.itemsize, group, same=are_same(k, v))
    _attend[(lists * triton.cdiv(group, tiles["QUERIES"]), len(outs))](
        q, k, v, counts, outs, lses, scale, lists, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        d=d, G=group, **tiles, PIECE=PIECE_ROWS, ALIGN=alignment(k, v), WIDEN=not q.is_cuda or q.dtype == torch.float32,
    )  # fmt: skip


def merge_parts(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge outs `[S, R, d]` and lses `[S, R]` of S parts, in one launch and in float32. See `reference.merge_lse`.

    Outputs of parts with lse -inf are ignored, so they may be uninitialised.
    """
    parts, rows, d = outs.shape
    assert outs.dtype == lses.dtype == torch.float32 and outs.is_contiguous() and lses.is_contiguous()
    out, lse = outs.new_empty(rows, d), lses.new_empty(rows)
    _merge[(rows,)](
        outs, lses, out, lse, parts, rows,
        d=d, D=triton.next_power_of_2(d), PARTS=_PARTS, LISTED=LISTED,
    )  # fmt: skip
    return out, lse
