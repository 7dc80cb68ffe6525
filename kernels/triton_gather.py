"""Rows by row ids that never leave the device, in Triton: gathered from pinned host memory, which the device reads in
place, and written back there.

Bytes: each counted row crosses the link once and is written to device memory once; 8 bytes of id a row are read. Rows
move as integer words, so any format of any width is one kernel (quantised rows have odd widths). Definitions:
`lists.gather_rows`, `lists.scatter_rows`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK_ROWS = 8
"""Rows of a program: with 256-byte rows 2 KiB are asked for before the first use; many programs keep the link busy."""

_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit(do_not_specialize=["listed"])
def _gather(
    rows: tl.tensor, ids: tl.tensor, counts: tl.tensor, out: tl.tensor, listed: tl.tensor,
    WORDS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Program (i, p): rows [i * BLOCK, ...) of list p. WORDS, words of a row, is constant so that the alignment of a
    row's address is known to the compiler and loads are 16 bytes wide where the row allows it."""
    p = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + p * listed + at, mask=at < tl.load(counts + p), other=-1)
    wanted = row >= 0
    columns = tl.arange(0, COLS)
    mask = wanted[:, None] & (columns < WORDS)[None, :]
    words = tl.load(rows + row[:, None] * WORDS + columns[None, :], mask=mask, other=0)
    tl.store(out + (p * listed + at)[:, None] * WORDS + columns[None, :], words, mask=mask)


@triton.jit(do_not_specialize=["number"])
def _scatter(
    rows: tl.tensor, ids: tl.tensor, source: tl.tensor, number: tl.tensor,
    WORDS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Program i: rows [i * BLOCK, ...) of the source."""
    at, columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, COLS)
    row = tl.load(ids + at, mask=at < number, other=0)
    mask = (at < number)[:, None] & (columns < WORDS)[None, :]
    words = tl.load(source + at[:, None] * WORDS + columns[None, :], mask=mask, other=0)
    tl.store(rows + row[:, None] * WORDS + columns[None, :], words, mask=mask)


def gather_rows(rows: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
    """`lists.gather_rows` in one launch. `rows` `[R, w]`, contiguous, lies in device memory or in host memory that
    CUDA has page-locked; all else on the device."""
    lists, listed = ids.shape
    assert rows.is_contiguous() and ids.is_contiguous() and out.is_contiguous()
    assert out.shape == (lists, listed, rows.shape[1]) and out.dtype == rows.dtype and counts.shape == (lists,)
    if ids.numel() == 0:
        return
    kind, words = _words(rows)
    grid = (triton.cdiv(listed, _BLOCK_ROWS), lists)
    _gather[grid](
        rows.view(kind), ids, counts, out.view(kind), listed,
        WORDS=words, COLS=triton.next_power_of_2(words), BLOCK=_BLOCK_ROWS,
    )  # fmt: skip


def scatter_rows(rows: torch.Tensor, ids: torch.Tensor, source: torch.Tensor) -> None:
    """`lists.scatter_rows` in one launch; memory as `gather_rows` takes it."""
    assert rows.is_contiguous() and ids.is_contiguous() and source.is_contiguous() and source.dtype == rows.dtype
    assert source.shape == (len(ids), rows.shape[1])
    kind, words = _words(rows)
    _scatter[(triton.cdiv(len(ids), _BLOCK_ROWS),)](
        rows.view(kind), ids, source.view(kind), len(ids),
        WORDS=words, COLS=triton.next_power_of_2(words), BLOCK=_BLOCK_ROWS,
    )  # fmt: skip


def _words(rows: torch.Tensor) -> tuple[torch.dtype, int]:
    """The largest words that rows consist of, and how many make one."""
    row_bytes = rows.shape[1] * rows.itemsize
    size = next(size for size in _WORDS if row_bytes % size == 0 and rows.data_ptr() % size == 0)
    return _WORDS[size], row_bytes // size
