"""Decode attention over resident KV (on the device) and other KV, in Triton.

The other KV was fetched for this step, or is in copies of blocks on the device. The kernel receives the address of each
sequence's resident KV. Each key and value vector is read once for all G query heads of its group. For rounding, see
`triton_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..core import BLOCK_SIZE
from .pointer_table import FIELDS, PointerTable
from .pool_rows import DeviceRows
from .triton_attention import PIECE_ROWS, alignment, are_same, attend_rows, merge_parts, query_heads, sizes, store_part

_FIELDS = tl.constexpr(FIELDS)

_COPIED_PIECES = 128
"""Maximum number of pieces per list of KV in copies of blocks.

With eight lists, these are 1,024 programs, more than the multiprocessors of a GPU. The merge reads every piece.
"""


@triton.jit(do_not_specialize=["lists", "heads", "k_list", "v_list", "blocks"])
def _attend(
    q: tl.tensor, table: tl.tensor, starts: tl.tensor, stops: tl.tensor, k: tl.tensor, v: tl.tensor,
    firsts: tl.tensor | None, counts: tl.tensor, bases: tl.tensor | None, planes: tl.tensor | None,
    outs: tl.tensor, lses: tl.tensor, scale: tl.tensor, lists: tl.tensor, heads: tl.tensor, resident_pieces: tl.tensor,
    size: tl.tensor | None, k_list: tl.tensor, k_row: tl.tensor, v_list: tl.tensor, v_row: tl.tensor, blocks: tl.tensor,
    d: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, G: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    PIECE: tl.constexpr, ALIGN: tl.constexpr, WIDEN: tl.constexpr, PLANES: tl.constexpr, SAME: tl.constexpr,
) -> None:  # fmt: skip
    """Program (i, s) attends with a block of query heads to one piece of list p (one KV head of one sequence).

    If s < resident_pieces, the piece is rows [s * PIECE, (s + 1) * PIECE) of the resident KV. Otherwise it is a piece
    of the fetched KV or, if there are `bases`, `size` of the tokens [firsts[p], counts[p]) in blocks. For the query
    heads and part s, see `triton_attention._attend`. All strides and addresses are multiples of ALIGN elements. If
    PLANES is 1, the resident values are the resident keys.
    """
    p, head = query_heads(G, QUERIES)
    part = tl.program_id(1)
    rows = PIECE if size is None else size
    if part < resident_pieces:
        fields = table + p // heads * _FIELDS
        step, begin = tl.load(fields + 1), tl.maximum(tl.load(starts + p), part * PIECE)
        stop = tl.minimum(tl.load(stops + p), (part + 1) * PIECE)
        from_k = tl.load(fields).to(tl.pointer_type(q.dtype.element_ty))
        from_v, k_at = from_k + (PLANES - 1) * heads * step, p % heads * step
        k_step, v_step, v_at = tl.load(fields + 2), tl.load(fields + 2), k_at
    else:
        begin = (part - resident_pieces) * rows
        stop = tl.minimum(tl.load(counts + p), begin + rows)
        from_k, from_v, k_at, v_at = k, v, p * k_list, p * v_list
        k_step, v_step = k_row.to(tl.int64), v_row.to(tl.int64)
        if bases is not None:
            begin = tl.maximum(begin, tl.load(firsts + p))
            plane = planes + p % heads
            k_at, v_at = tl.load(plane) * k_row, tl.load(plane + (PLANES - 1) * heads) * v_row
    # With a known alignment, the compiler uses 16-byte loads.
    BYTES: tl.constexpr = ALIGN * q.dtype.element_ty.primitive_bitwidth // 8
    from_k, from_v = tl.multiple_of(from_k + k_at, BYTES), tl.multiple_of(from_v + v_at, BYTES)
    k_step, v_step = k_step // ALIGN * ALIGN, v_step // ALIGN * ALIGN
    own_bases = None if bases is None else bases + p // heads * blocks
    peak, total, acc, acc_rest = attend_rows(
        q, (p * G + head) * d, head < G, from_k, from_v, k_step, v_step, begin, stop, scale,
        d, D, REST, QUERIES, BLOCK, WIDEN, SAME, own_bases, part >= resident_pieces,
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
    assert k.shape == v.shape == (len(q), k.shape[1], q.shape[2]) and k.stride(2) == v.stride(2) == 1
    return _launch(q, resident, starts, stops, k, v, counts, scale)


def attend_copies(
    q: torch.Tensor,
    resident: PointerTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    copies: DeviceRows,
    bases: torch.Tensor,
    firsts: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to resident KV and KV in copies of blocks, in one launch followed by a merge. See `lists.attend_copies`.

    All tensors must have the same dtype: float32, float16 or bfloat16.
    """
    rows = copies.rows.unsqueeze(0)
    assert rows.is_contiguous() and rows.shape[2] == q.shape[2] and bases.is_contiguous() and firsts.shape == ends.shape
    assert copies.planes.is_contiguous() and copies.planes.shape[1] * len(bases) == len(q)
    return _launch(q, resident, starts, stops, rows, rows, ends, scale, firsts, bases, copies.planes)


def _launch(
    q: torch.Tensor,
    resident: PointerTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    firsts: torch.Tensor | None = None,
    bases: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `_attend` and merge the parts. If there are `bases`, k and v are copies of blocks, and not fetched KV."""
    (lists, group, d), capacity = q.shape, resident.tensors[0].shape[1]
    planes = resident.lists // lists
    assert planes in (1, 2) and resident.dtype == q.dtype and starts.shape == stops.shape == counts.shape == (lists,)
    assert q.is_contiguous() and q.dtype == k.dtype == v.dtype
    tiles = sizes(d, q.itemsize, group, same=planes == 1 and are_same(k, v))
    resident_pieces, size, blocks = triton.cdiv(capacity, PIECE_ROWS), None, 0
    parts = resident_pieces + triton.cdiv(k.shape[1], PIECE_ROWS)
    if bases is not None:
        assert BLOCK_SIZE % tiles["BLOCK"] == 0 == PIECE_ROWS % BLOCK_SIZE  # each tile lies in one block
        blocks = bases.shape[1]
        size = max(1, triton.cdiv(blocks * BLOCK_SIZE, _COPIED_PIECES * PIECE_ROWS)) * PIECE_ROWS
        parts = resident_pieces + triton.cdiv(blocks * BLOCK_SIZE, size)
        tiles["num_stages"] = 2 * tiles["num_stages"] - 1  # half of the stages load the bases of blocks
    outs = torch.empty(parts, lists * group, d, dtype=torch.float32, device=q.device)
    lses = torch.empty(parts, lists * group, dtype=torch.float32, device=q.device)
    _attend[(lists * triton.cdiv(group, tiles["QUERIES"]), parts)](
        q, resident.table, starts, stops, k, v, firsts, counts, bases, offsets, outs, lses, scale, lists,
        resident.heads // planes, resident_pieces, size, k.stride(0), k.stride(1), v.stride(0), v.stride(1), blocks,
        d=d, G=group, **tiles, PIECE=PIECE_ROWS, ALIGN=alignment(k, v) if resident.aligned else 1,
        WIDEN=not q.is_cuda or q.dtype == torch.float32, PLANES=planes,
    )  # fmt: skip
    out, lse = merge_parts(outs, lses)
    return out.view(lists, group, d), lse.view(lists, group)
