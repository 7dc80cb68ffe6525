"""Skew the queries of a batch in Triton: one launch instead of a cast, two copies, a matrix product and a scaling.

Memory traffic: 4 * d * r bytes of the basis per KV head and sequence. Sums over d are computed in float32 and in a
different order than in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 16
"""Number of columns per program."""

_QUERIES = 16
"""Number of queries per program. A program reads its columns of the basis once for all of them."""


@triton.jit(do_not_specialize=["heads", "bases", "group"])
def _skew(
    q: tl.tensor, basis: tl.tensor, out: tl.tensor, head_step: tl.tensor, row_step: tl.tensor, heads: tl.tensor,
    bases: tl.tensor, group: tl.tensor, scale: tl.tensor, r: tl.tensor,
    d: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr,
) -> None:  # fmt: skip
    """Program (p, c, i) computes columns [c * COLUMNS, (c + 1) * COLUMNS) of QUERIES queries of list p."""
    p, row, first = tl.program_id(0).to(tl.int64), tl.arange(0, D), tl.program_id(2) * QUERIES
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tile = tl.load(basis + p % bases * d * r + row[:, None] * r + column[None, :],
                   mask=(row < d)[:, None] & (column < r)[None, :], other=0.0)  # fmt: skip
    for g in range(first, tl.minimum(group, first + QUERIES)):
        query = tl.load(q + (p % heads * group + g) * head_step + p // heads * row_step + row, mask=row < d, other=0.0)
        skewed = tl.sum(query.to(tl.float32)[:, None] * tile, 0) * scale
        tl.store(out + (p * group + g) * r + column, skewed, mask=column < r)


def skew_queries(q: torch.Tensor, basis: torch.Tensor, kv_heads: int, scale: float) -> torch.Tensor:
    """Skew and scale the queries of a batch, in one launch. See `lists.skew_queries`. The basis must be float32."""
    (heads, batch, d), (bases, _, r) = q.shape, basis.shape
    group, lists = heads // kv_heads, batch * kv_heads
    assert basis.shape[1] == d and basis.dtype == torch.float32 and basis.is_contiguous() and lists % bases == 0
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(lists, group, r, dtype=torch.float32, device=q.device)
    D: int = triton.next_power_of_2(d)
    _skew[(lists, triton.cdiv(r, _COLUMNS), triton.cdiv(group, _QUERIES))](
        q, basis, out, q.stride(0), q.stride(1), kv_heads, bases, group, float(scale), r,
        d=d, D=D, COLUMNS=_COLUMNS, QUERIES=_QUERIES, num_warps=max(1, D // 256),
    )  # fmt: skip
    return out
