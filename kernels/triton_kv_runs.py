"""Decode attention for a batch whose sequences share KV, in Triton.

Kernels find the KV of each run (`kv_runs.Run`) through addresses in a table, which takes 88 bytes per run and is copied
to the device.

Runs that several sequences share are computed in one launch, with tensor-core products and up to 64 queries per
program, so that KV is read once per 64 queries. A second launch computes the runs that belong to a single sequence. The
results are merged in float32. Long runs are split into pieces, so that a few sequences occupy all multiprocessors. For
rounding, see `triton_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .h2d_copy import to_device
from .kv_runs import Run
from .triton_attention import are_same, attend_rows, merge_parts, sizes, store_part

_PIECE, _PIECES = 256, 64
"""Minimum number of KV vectors per piece, and maximum number of pieces per run. Longer runs have larger pieces."""

_FIELDS = tl.constexpr(11)
"""Number of fields of a run in the table.

Fields: addresses of k and v; head and row strides of k and of v; number of rows; first and stop of its sequences; its
first slot among the parts; rows per piece.
"""


@triton.jit(do_not_specialize=["batch", "heads", "kv_heads"])
def _attend(
    q: tl.tensor, table: tl.tensor, outs: tl.tensor, lses: tl.tensor, scale: tl.tensor,
    batch: tl.tensor, heads: tl.tensor, kv_heads: tl.tensor,
    d: tl.constexpr, D: tl.constexpr, REST: tl.constexpr, G: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    WIDEN: tl.constexpr, ALIGN: tl.constexpr, SAME: tl.constexpr,
) -> None:  # fmt: skip
    """Attend with one block of queries to one piece of a run.

    The axes of the launch grid are the run, the piece, and the KV head combined with the query block. The output `[d]`
    and the lse of each query are stored as one of the parts of the query's sequence. Programs after the run's last
    piece or last query do nothing. All strides are multiples of ALIGN elements, so that the compiler can use 16-byte
    loads.
    """
    run, piece = table + tl.program_id(0) * _FIELDS, tl.program_id(1)
    head, block = tl.program_id(2) % kv_heads, tl.program_id(2) // kv_heads
    first, stop = tl.load(run + 7), tl.load(run + 8)
    size = tl.load(run + 10)
    begin, end = piece * size, tl.minimum(tl.load(run + 6), (piece + 1) * size)
    index = block * QUERIES + tl.arange(0, QUERIES)
    valid = index < (stop - first) * G
    if (begin < end) & (block * QUERIES < (stop - first) * G):
        query_row = (head * G + index % G) * batch + first + index // G
        k_head, k_row = tl.multiple_of(tl.load(run + 2), ALIGN), tl.multiple_of(tl.load(run + 3), ALIGN)
        v_head, v_row = tl.multiple_of(tl.load(run + 4), ALIGN), tl.multiple_of(tl.load(run + 5), ALIGN)
        k = tl.load(run).to(tl.pointer_type(q.dtype.element_ty)) + head * k_head
        v = tl.load(run + 1).to(tl.pointer_type(q.dtype.element_ty)) + head * v_head
        k, v = tl.multiple_of(k, 2 * ALIGN), tl.multiple_of(v, 2 * ALIGN)  # after the cast, which drops the hint
        peak, total, acc, acc_rest = attend_rows(
            q, query_row * d, valid, k, v, k_row, v_row, begin, end, scale, d, D, REST, QUERIES, BLOCK, WIDEN, SAME
        )
        part_row = (tl.load(run + 9) + piece) * heads * batch + query_row
        store_part(outs, lses, part_row, valid, peak, total, acc, acc_rest, begin < end, d, D, REST)


def attend_runs(q: torch.Tensor, runs: Sequence[Run], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to all runs of a batch, in two launches followed by a merge. See `kv_runs.attend_runs`.

    q and all KV must be on the same device and have the same dtype: float32, float16 or bfloat16.
    """
    heads, batch, d = q.shape
    q = q.contiguous()
    shared = [run for run in runs if run.stop - run.first > 1 and run.k.shape[1]]
    private = [run for run in runs if run.stop - run.first == 1 and run.k.shape[1]]
    kv_heads = len(private[0].k)
    parts_of = [0] * batch
    tables = [[_table_row(run, parts_of) for run in group] for group in (shared, private)]
    parts = max(parts_of)
    outs = torch.empty(parts, heads * batch, d, dtype=torch.float32, device=q.device)
    lses = torch.empty(parts, heads * batch, dtype=torch.float32, device=q.device)
    if min(parts_of) < parts:
        lses.fill_(-torch.inf)
    group = heads // kv_heads
    same = all(are_same(run.k, run.v) for run in runs)
    for rows in filter(None, tables):
        queries = max((row[8] - row[7]) * group for row in rows)
        pieces, tiles = max(triton.cdiv(row[6], row[10]) for row in rows), sizes(d, q.itemsize, queries, same=same)
        _attend[(len(rows), pieces, kv_heads * triton.cdiv(queries, tiles["QUERIES"]))](
            q, to_device(torch.tensor(rows), q.device), outs, lses, scale, batch, heads, kv_heads,
            d=d, G=group, **tiles, WIDEN=not q.is_cuda or q.dtype == torch.float32, ALIGN=_alignment(rows),
        )  # fmt: skip
    out, lse = merge_parts(outs, lses)
    return out.view(heads, batch, d), lse.view(heads, batch)


def _table_row(run: Run, parts_of: list[int]) -> list[int]:
    """Return the table fields of a run, including the number of its first part.

    The partial results (*parts*) of each sequence are numbered in the order of its runs. `parts_of[b]` is the number of
    parts that sequence b has so far. This function increases it. If runs form a tree, parents must come before their
    children, so that the first part has the same number in all sequences of a run.
    """
    k, v, n = run.k, run.v, run.k.shape[1]
    assert k.stride(2) == v.stride(2) == 1 and k.shape == v.shape and run.stop <= len(parts_of)
    size = max(_PIECE, triton.cdiv(triton.cdiv(n, _PIECES), _PIECE) * _PIECE)
    first_part = max(parts_of[run.first : run.stop])
    parts_of[run.first : run.stop] = [first_part + triton.cdiv(n, size)] * (run.stop - run.first)
    return [
        k.data_ptr(), v.data_ptr(), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        n, run.first, run.stop, first_part, size,
    ]  # fmt: skip


def _alignment(rows: Sequence[Sequence[int]]) -> int:
    aligned = all(address % 16 == 0 for row in rows for address in row[:2])
    return 8 if aligned and all(stride % 8 == 0 for row in rows for stride in row[2:6]) else 1
