"""Decode attention over the rows that a sequence keeps on the device, found by address, together with those that were
fetched for this step, in Triton.

Bytes: each row of a range, and each counted row, once for all G query heads of its group. Two launches and a merge for
the whole batch. Definition and bounds: `lists.attend_kept`; rounding as `triton_attention` says.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .pointer_table import FIELDS, PointerTable
from .triton_attention import PIECE_ROWS, attend_pieces, attend_rows, block_rows, merge_parts, store_part

_FIELDS = tl.constexpr(FIELDS)


@triton.jit
def _attend(
    q: tl.tensor, table: tl.tensor, starts: tl.tensor, stops: tl.tensor, outs: tl.tensor, lses: tl.tensor,
    scale: tl.tensor, lists: tl.tensor, heads: tl.tensor,
    d: tl.constexpr, D: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, PIECE: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Program (p, s): kept rows [s * PIECE, ...) of list p, as far as they are in its range. Writes part s as
    `triton_attention._attend` does."""
    p, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, column = tl.arange(0, GROUP), tl.arange(0, D)
    begin = tl.maximum(tl.load(starts + p), piece * PIECE)
    stop = tl.minimum(tl.load(stops + p), (piece + 1) * PIECE)
    known = (head < G)[:, None] & (column < d)[None, :]
    query = tl.load(q + (p * G + head)[:, None] * d + column[None, :], mask=known, other=0.0)
    own = table + p // heads * _FIELDS
    step, row = tl.load(own + 1), tl.load(own + 2)
    k = tl.load(own).to(tl.pointer_type(q.dtype.element_ty)) + p % heads * step
    peak, total, acc = attend_rows(query, k, k + heads * step, row, row, begin, stop, scale, d, D, GROUP, BLOCK, WIDEN)
    store_part(outs, lses, (piece * lists + p) * G, peak, total, acc, stop > begin, d, D, G, GROUP)


def attend_kept(
    q: torch.Tensor,
    kept: PointerTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`lists.attend_kept` in two launches and a merge; all of one dtype: float32, float16 or bfloat16."""
    (lists, group, d), room = q.shape, kept.tensors[0].shape[1]
    assert kept.lists == 2 * lists and kept.dtype == q.dtype and starts.shape == stops.shape == (lists,)
    own, listed = triton.cdiv(room, PIECE_ROWS), triton.cdiv(k.shape[1], PIECE_ROWS)
    outs = torch.empty(own + listed, lists * group, d, dtype=torch.float32, device=q.device)
    lses = torch.empty(own + listed, lists * group, dtype=torch.float32, device=q.device)
    _attend[(lists, own)](
        q, kept.table, starts, stops, outs, lses, scale, lists, kept.heads // 2,
        d=d, D=max(16, triton.next_power_of_2(d)), G=group, GROUP=max(16, triton.next_power_of_2(group)),
        BLOCK=block_rows(d, q.itemsize), PIECE=PIECE_ROWS, WIDEN=not q.is_cuda or q.dtype == torch.float32,
    )  # fmt: skip
    if listed:
        attend_pieces(q, k, v, counts, outs[own:], lses[own:], scale)
    out, lse = merge_parts(outs, lses)
    return out.view(lists, group, d), lse.view(lists, group)
