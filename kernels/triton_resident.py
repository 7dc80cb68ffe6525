"""Decode attention over resident KV (on the device) and KV fetched for this step, in Triton.

The kernel receives the address of each sequence's resident KV. Each key and value vector is read once for all G query
heads of its group. For rounding, see `triton_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .pointer_table import FIELDS, PointerTable
from .triton_attention import PIECE_ROWS, alignment, are_same, attend_rows, merge_parts, query_heads, sizes, store_part

_FIELDS = tl.constexpr(FIELDS)


@triton.jit(do_not_specialize=["lists", "heads", "kept_pieces", "k_list", "v_list"])
def _attend(
    q: tl.tensor, table: tl.tensor, starts: tl.tensor, stops: tl.tensor, k: tl.tensor, v: tl.tensor, counts: tl.tensor,
    outs: tl.tensor, lses: tl.tensor, scale: tl.tensor, lists: tl.tensor, heads: tl.tensor, resident_pieces: tl.tensor,
    k_list: tl.tensor, k_row: tl.tensor, v_list: tl.tensor, v_row: tl.tensor,
    d: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, G: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    PIECE: tl.constexpr, ALIGN: tl.constexpr, WIDEN: tl.constexpr, PLANES: tl.constexpr, SAME: tl.constexpr,
) -> None:  # fmt: skip
    """Program (i, s) attends with a block of query heads to one piece of list p (one KV head of one sequence).

    If s < resident_pieces, the piece is rows [s * PIECE, (s + 1) * PIECE) of the resident KV. Otherwise it is a piece
    of the fetched KV. For the query heads and part s, see `triton_attention._attend`. All strides and addresses are
    multiples of ALIGN elements. If PLANES is 1, the resident values are the resident keys.
    """
    p, head = query_heads(G, QUERIES)
    part = tl.program_id(1)
    if part < resident_pieces:
        fields = table + p // heads * _FIELDS
        step, begin = tl.load(fields + 1), tl.maximum(tl.load(starts + p), part * PIECE)
        stop = tl.minimum(tl.load(stops + p), (part + 1) * PIECE)
        from_k = tl.load(fields).to(tl.pointer_type(q.dtype.element_ty))
        from_v, k_at = from_k + (PLANES - 1) * heads * step, p % heads * step
        k_step, v_step, v_at = tl.load(fields + 2), tl.load(fields + 2), k_at
    else:
        begin = (part - resident_pieces) * PIECE
        stop = tl.minimum(tl.load(counts + p), begin + PIECE)
        from_k, from_v, k_at, v_at = k, v, p * k_list, p * v_list
        k_step, v_step = k_row.to(tl.int64), v_row.to(tl.int64)
    # With a known alignment, the compiler uses 16-byte loads.
    BYTES: tl.constexpr = ALIGN * q.dtype.element_ty.primitive_bitwidth // 8
    from_k, from_v = tl.multiple_of(from_k + k_at, BYTES), tl.multiple_of(from_v + v_at, BYTES)
    k_step, v_step = k_step // ALIGN * ALIGN, v_step // ALIGN * ALIGN
    peak, total, acc, acc_rest = attend_rows(
        q, (p * G + head) * d, head < G, from_k, from_v, k_step, v_step, begin, stop, scale,
        d, D, REST, QUERIES, BLOCK, WIDEN, SAME,
    )  # fmt: skip
    row = (part * lists + p) * G + head
    store_part(outs, lses, row, head < G, peak, total, acc, acc_rest, stop > begin, d, D, REST)


def attend_resident(
    q: torch.Tensor,
    resident: PointerTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to resident and fetched KV of a batch, in one launch followed by a merge. See `lists.attend_resident`.

    All tensors must have the same dtype: float32, float16 or bfloat16.
    """
    (lists, group, d), capacity = q.shape, resident.tensors[0].shape[1]
    planes = resident.lists // lists
    assert planes in (1, 2) and resident.dtype == q.dtype and starts.shape == stops.shape == (lists,)
    assert k.shape == v.shape == (lists, k.shape[1], d) and q.dtype == k.dtype == v.dtype and counts.shape == (lists,)
    assert q.is_contiguous() and k.stride(2) == v.stride(2) == 1
    resident_pieces, fetched_pieces = triton.cdiv(capacity, PIECE_ROWS), triton.cdiv(k.shape[1], PIECE_ROWS)
    outs = torch.empty(resident_pieces + fetched_pieces, lists * group, d, dtype=torch.float32, device=q.device)
    lses = torch.empty(resident_pieces + fetched_pieces, lists * group, dtype=torch.float32, device=q.device)
    tiles = sizes(d, q.itemsize, group, same=planes == 1 and are_same(k, v))
    _attend[(lists * triton.cdiv(group, tiles["QUERIES"]), resident_pieces + fetched_pieces)](
        q, resident.table, starts, stops, k, v, counts, outs, lses, scale, lists, resident.heads // planes,
        resident_pieces, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        d=d, G=group, **tiles, PIECE=PIECE_ROWS, ALIGN=alignment(k, v) if resident.aligned else 1,
        WIDEN=not q.is_cuda or q.dtype == torch.float32, PLANES=planes,
    )  # fmt: skip
    out, lse = merge_parts(outs, lses)
    return out.view(lists, group, d), lse.view(lists, group)
