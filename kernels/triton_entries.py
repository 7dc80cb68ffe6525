"""Read, write and append the entries that scoring policies store for each token or page, in Triton.

The entries of a sequence are in one tensor (`PointerTable`), with one list per KV head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .lists import Scores
from .pointer_table import FIELDS, PointerTable
from .triton_scores import store_scores

_NUMBERS = 4096
"""Number of elements per program."""

_ROWS = 1024
"""Maximum number of rows per program of `_copy`. The addresses of more rows would spill registers."""

_FIELDS = tl.constexpr(FIELDS)


@triton.jit(do_not_specialize=["heads", "rows"])
def _copy(
    lists: tl.tensor, table: tl.tensor, counts: tl.tensor, heads: tl.tensor, rows: tl.tensor,
    w: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, WRITE: tl.constexpr,
) -> None:  # fmt: skip
    """Program (i, p) copies rows [i * ROWS, (i + 1) * ROWS) of list p between `lists` and the sequence's tensor.

    If WRITE is true, it copies to the tensor, otherwise to `lists`. Only rows of the first `counts[b]` tokens are
    copied. Later rows of `lists` become 0.
    """
    p, column = tl.program_id(1).to(tl.int64), tl.arange(0, W)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    fields, valid_rows = table + p // heads * _FIELDS, (tl.load(counts + p // heads) + PAGE - 1) // PAGE
    list_address = tl.load(fields).to(tl.pointer_type(lists.dtype.element_ty)) + p % heads * tl.load(fields + 1)
    stored_address = list_address + row.to(tl.int64)[:, None] * tl.load(fields + 2) + column[None, :]
    lists_address = lists + (p * rows + row)[:, None] * w + column[None, :]
    in_bounds = (row < rows)[:, None] & (column < w)[None, :]
    valid = in_bounds & (row < valid_rows)[:, None]
    if WRITE:
        tl.store(stored_address, tl.load(lists_address, mask=valid), mask=valid)
    else:
        tl.store(lists_address, tl.load(stored_address, mask=valid, other=0.0), mask=in_bounds)


@triton.jit(do_not_specialize=["heads"])
def _append(
    entries: tl.tensor, table: tl.tensor, slots: tl.tensor, heads: tl.tensor,
    w: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr,
) -> None:  # fmt: skip
    """Program p stores the newest entry of list p (one KV head of one sequence).

    A page stores the element-wise minimum of the entries of its tokens.
    """
    p, column = tl.program_id(0).to(tl.int64), tl.arange(0, W)
    slot, fields = tl.load(slots + p), table + p // heads * _FIELDS
    mask = (column < w) & (slot >= 0)
    list_address = tl.load(fields).to(tl.pointer_type(entries.dtype.element_ty)) + p % heads * tl.load(fields + 1)
    address = list_address + slot // PAGE * tl.load(fields + 2) + column
    entry = tl.load(entries + p * w + column, mask=mask, other=0.0)
    old = tl.load(address, mask=mask & (slot % PAGE > 0), other=float("inf"))
    tl.store(address, tl.minimum(entry, old), mask=mask)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _mask_scores(
    unmasked: tl.tensor, starts: tl.tensor, stops: tl.tensor, scores: tl.tensor, maxima: tl.tensor, sums: tl.tensor,
    tokens: tl.tensor, blocks: tl.tensor,
    G: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Set the scores of pages without candidates to -inf, and compute block statistics, like `lists.mask_scores`.

    Program (p, i) processes pages [i * BLOCK, (i + 1) * BLOCK) of list p.
    """
    p, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, head = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, GROUP)
    mask = (head < G)[:, None] & (token < tokens)[None, :]
    acc = tl.load(unmasked + ((p * G + head) * tokens)[:, None] + token[None, :], mask=mask, other=float("-inf"))
    start, stop = tl.load(starts + p) // PAGE, (tl.load(stops + p) + PAGE - 1) // PAGE
    stop = tl.minimum(stop, tokens)
    store_scores(acc, token, start, stop, p, head, block, blocks, tokens, scores, maxima, sums, G)


def mask_scores(scores: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor, page: int = 1) -> Scores:
    """Set scores outside [start, stop) to -inf and compute block statistics, in one launch. See `lists.mask_scores`.

    `scores` must be float32 and contiguous.
    """
    count, group, tokens = scores.shape
    assert scores.dtype == torch.float32 and scores.is_contiguous() and starts.shape == stops.shape == (count,)
    width = triton.next_power_of_2(group)
    block = max(16, _NUMBERS // width)
    blocks = triton.cdiv(tokens, block)
    masked, (maxima, sums) = torch.empty_like(scores), scores.new_empty(2, count, group, blocks)
    _mask_scores[(count, blocks)](
        scores, starts, stops, masked, maxima, sums, tokens, blocks, G=group, GROUP=width, PAGE=page, BLOCK=block
    )
    return Scores(masked, maxima, sums)


def _launch(lists: torch.Tensor, table: PointerTable, counts: torch.Tensor, page: int, *, write: bool) -> None:
    count, rows, w = lists.shape
    assert lists.is_contiguous() and count == table.lists and lists.dtype == table.dtype
    assert counts.shape == (len(table.tensors),) and table.tensors[0].shape[2] == w
    if lists.numel():
        width = triton.next_power_of_2(w)
        rows_per_program = max(1, min(_ROWS, _NUMBERS // width))
        # A grid has at most 65,535 programs on its second axis, and a long context may need more programs for a list.
        _copy[(triton.cdiv(rows, rows_per_program), count)](
            lists, table.table, counts, table.heads, rows, w=w, W=width, ROWS=rows_per_program, PAGE=page, WRITE=write
        )


def read_lists(table: PointerTable, rows: int, counts: torch.Tensor, page: int = 1) -> torch.Tensor:
    """Copy the entries of all sequences into one tensor, in one launch. See `lists.read_lists`."""
    first = table.tensors[0]
    lists = first.new_empty(table.lists, rows, first.shape[2])
    _launch(lists, table, counts, page, write=False)
    return lists


def write_lists(entries: torch.Tensor, table: PointerTable, counts: torch.Tensor, page: int = 1) -> None:
    """Write entries back to the tensors of the sequences, in one launch. See `lists.write_lists`."""
    _launch(entries, table, counts, page, write=True)


def append_entries(entries: torch.Tensor, table: PointerTable, slots: torch.Tensor, page: int) -> None:
    """Store the entries of the newest tokens, in one launch. See `lists.append_entries`."""
    count, w = entries.shape
    assert entries.is_contiguous() and count == table.lists and entries.dtype == table.dtype
    if w:
        _append[(count,)](
            entries, table.table, slots, table.heads,
            w=w, W=triton.next_power_of_2(w), PAGE=page,
        )  # fmt: skip
