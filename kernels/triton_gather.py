"""Gather and write rows of the KV pool in Triton. Row indices stay on the device.

The rows are in device memory, or in page-locked host memory, which the device reads and writes in place. Each valid row
is transferred once and written to device memory once. Its index adds 8 bytes of traffic. Rows are copied as integer
words, so one kernel handles any format and width.

A gather has just enough programs to saturate the PCIe bus, so that other multiprocessors stay free for computation.
Rows that have copies in device memory (`DeviceRows`) are read from these copies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..core import BLOCK_SIZE
from .pointer_table import ALIGNED, FIELDS, PointerTable
from .pool_rows import DeviceRows

PROGRAMS = 32
"""Number of programs per gather.

With blocks of 8 KiB (K and V), the programs request 256 KiB at a time. A 50 GB/s bus with a latency of 2 us needs 100
KiB in flight. `offload-rt eval gpu --part kernels` can measure other numbers of programs.
"""

_BLOCK_BYTES = 1 << 12
"""Number of bytes of K (and of V) that a program requests before it writes the first byte."""

_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.int8}
_BLOCK_SIZE, _FIELDS = tl.constexpr(BLOCK_SIZE), tl.constexpr(FIELDS)


@triton.jit(do_not_specialize=["first", "lists", "listed"])
def _gather(
    rows: tl.tensor, ids: tl.tensor, counts: tl.tensor, out: tl.tensor, copies: tl.tensor, first: tl.tensor,
    lists: tl.tensor, listed: tl.tensor,
    WORDS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, COPIED: tl.constexpr,
) -> None:  # fmt: skip
    """Copy rows by index. Program i of n copies the blocks i, i + n, i + 2n, ... of BLOCK rows each.

    If COPIED is true, ids from `first` on refer to rows of `copies`.
    """
    # The number of words per row is a constant, so that the compiler knows the alignment of rows and uses 16-byte loads
    # if possible.
    columns, blocks = tl.arange(0, COLS), tl.cdiv(listed, BLOCK)
    for item in range(tl.program_id(0), lists * blocks, tl.num_programs(0)):
        p, index = (item // blocks).to(tl.int64), item % blocks * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(ids + p * listed + index, mask=index < tl.load(counts + p), other=-1)
        mask = (row >= 0)[:, None] & (columns < WORDS)[None, :]
        source = rows + row[:, None] * WORDS
        if COPIED:
            at_copy = row >= first
            source = tl.where(at_copy, copies, rows)[:, None] + tl.where(at_copy, row - first, row)[:, None] * WORDS
        words = tl.load(source + columns[None, :], mask=mask, other=0)
        tl.store(out + (p * listed + index)[:, None] * WORDS + columns[None, :], words, mask=mask)


@triton.jit(do_not_specialize=["first", "lists", "listed", "heads", "blocks"])
def _gather_tokens(
    rows: tl.tensor, tokens: tl.tensor, counts: tl.tensor, bases: tl.tensor, planes: tl.tensor, out: tl.tensor,
    copies: tl.tensor, copy_planes: tl.tensor, tally: tl.tensor, first: tl.tensor,
    lists: tl.tensor, listed: tl.tensor, heads: tl.tensor, blocks: tl.tensor,
    WORDS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr, PLANES: tl.constexpr,
    COPIED: tl.constexpr,
) -> None:  # fmt: skip
    """Program i of n copies K and V of the blocks i, i + n, i + 2n, ... of BLOCK tokens each.

    If COUNTED is true, only the first `counts[p]` tokens of each list are valid. If PLANES is 1, only K is copied. If
    COPIED is true, blocks whose first row (`bases`) is at least `first` are read from `copies`. In this case, the
    numbers of KV entries read from `rows` and from `copies` are added to `tally`.
    """
    columns, tiles = tl.arange(0, COLS), tl.cdiv(listed, BLOCK)
    for item in range(tl.program_id(0), lists * tiles, tl.num_programs(0)):
        p, begin = (item // tiles).to(tl.int64), item % tiles * BLOCK
        count = listed
        if COUNTED:
            count = tl.load(counts + p)
        if begin < count:
            index = begin + tl.arange(0, BLOCK)
            token = tl.load(tokens + p * listed + index, mask=index < count, other=0)
            row = (
                tl.load(bases + p // heads * blocks + token // _BLOCK_SIZE, mask=index < count, other=0)
                + token % _BLOCK_SIZE
            )
            mask = (index < count)[:, None] & (columns < WORDS)[None, :]
            source, plane = rows, tl.load(planes + p % heads)
            if COPIED:
                at_copy = row >= first
                source = tl.where(at_copy, copies, rows)[:, None]
                plane = tl.where(at_copy, tl.load(copy_planes + p % heads), plane)
                valid, hits = tl.sum((index < count).to(tl.int64), 0), tl.sum(at_copy.to(tl.int64), 0)
                tl.atomic_add(tally + p // heads * 2, valid - hits, sem="relaxed")
                tl.atomic_add(tally + p // heads * 2 + 1, hits, sem="relaxed")
            k_words = tl.load(source + (row + plane)[:, None] * WORDS + columns[None, :], mask=mask, other=0)
            target = (p * listed + index)[:, None] * WORDS + columns[None, :]
            if PLANES == 2:  # load V before K is stored, so that both loads are in flight together
                plane = tl.load(planes + heads + p % heads)
                if COPIED:
                    plane = tl.where(at_copy, tl.load(copy_planes + heads + p % heads), plane)
                v_words = tl.load(source + (row + plane)[:, None] * WORDS + columns[None, :], mask=mask, other=0)
                tl.store(out + lists.to(tl.int64) * listed * WORDS + target, v_words, mask=mask)
            tl.store(out + target, k_words, mask=mask)


@triton.jit(do_not_specialize=["heads"])
def _write(
    rows: tl.tensor, k: tl.tensor, v: tl.tensor, newest: tl.tensor, planes: tl.tensor, copies: tl.tensor,
    copy_planes: tl.tensor, heads: tl.tensor, WORDS: tl.constexpr, COLS: tl.constexpr, PLANES: tl.constexpr,
    COPIED: tl.constexpr,
) -> None:  # fmt: skip
    """Program p writes K and V (only K if PLANES is 1) of list p, one KV head of one sequence, to their rows.

    If COPIED is true, they are also written to the rows of the copies, which the second half of `newest` contains.
    """
    p, column = tl.program_id(0).to(tl.int64), tl.arange(0, COLS)
    row = tl.load(newest + p // heads)
    mask = (column < WORDS) & (row >= 0)
    k_words = tl.load(k + p * WORDS + column, mask=mask)
    if PLANES == 2:
        v_words = tl.load(v + p * WORDS + column, mask=mask)
        tl.store(rows + (row + tl.load(planes + heads + p % heads)) * WORDS + column, v_words, mask=mask)
    tl.store(rows + (row + tl.load(planes + p % heads)) * WORDS + column, k_words, mask=mask)
    if COPIED:
        copy = tl.load(newest + tl.num_programs(0) // heads + p // heads)
        mask = (column < WORDS) & (copy >= 0)
        tl.store(copies + (copy + tl.load(copy_planes + p % heads)) * WORDS + column, k_words, mask=mask)
        if PLANES == 2:
            tl.store(copies + (copy + tl.load(copy_planes + heads + p % heads)) * WORDS + column, v_words, mask=mask)


@triton.jit(do_not_specialize=["lists", "listed", "heads", "capacity"])
def _slots(
    table: tl.tensor, slots: tl.tensor, rows: tl.tensor, lists: tl.tensor, listed: tl.tensor, heads: tl.tensor,
    capacity: tl.tensor, WORDS: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, SCATTER: tl.constexpr,
    ALIGN: tl.constexpr, PLANES: tl.constexpr,
) -> None:  # fmt: skip
    """Program (p, i) copies K and V of list p from the slots `slots[p, i * BLOCK : (i + 1) * BLOCK]` to `rows`.

    If SCATTER is true, it copies from `rows` to the slots. If PLANES is 1, it copies only K.
    """
    p, index = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLS)
    slot = tl.load(slots + p * listed + index, mask=index < listed, other=-1)
    mask = (slot >= 0)[:, None] & (column < WORDS)[None, :]
    list_base = tl.load(table + p // heads * _FIELDS).to(tl.pointer_type(rows.dtype.element_ty))
    list_base = tl.multiple_of(list_base, ALIGN)  # after the cast, because a cast drops the hint
    k = list_base + (p % heads * capacity + slot)[:, None] * WORDS + column[None, :]
    v = k + heads.to(tl.int64) * capacity * WORDS
    k_rows = rows + (p * listed + index)[:, None] * WORDS + column[None, :]
    v_rows = k_rows + lists.to(tl.int64) * listed * WORDS
    if SCATTER:
        tl.store(k, tl.load(k_rows, mask=mask), mask=mask)
        if PLANES == 2:
            tl.store(v, tl.load(v_rows, mask=mask), mask=mask)
    else:
        tl.store(k_rows, tl.load(k, mask=mask), mask=mask)
        if PLANES == 2:
            tl.store(v_rows, tl.load(v, mask=mask), mask=mask)


def gather_rows(
    rows: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    device: DeviceRows | None = None,
    programs: int = PROGRAMS,
) -> None:
    """Copy rows by index, in one launch of at most `programs` programs. See `pool_rows.gather_rows`.

    `rows` `[R, w]` must be contiguous, in device memory or in page-locked host memory. All other tensors are on the
    device.
    """
    lists, listed = ids.shape
    assert rows.is_contiguous() and ids.is_contiguous() and out.is_contiguous()
    assert out.shape == (lists, listed, rows.shape[1]) and out.dtype == rows.dtype and counts.shape == (lists,)
    if ids.numel() == 0:
        return
    word_type, shape = _words(rows)
    copies, first = (rows, 0) if device is None else (_copies(device, rows), device.first)
    _gather[(min(programs, lists * triton.cdiv(listed, shape["BLOCK"])),)](
        rows.view(word_type), ids, counts, out.view(word_type), copies.view(word_type), first, lists, listed,
        **shape, COPIED=device is not None,
    )  # fmt: skip


def gather_tokens(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor | None,
    bases: torch.Tensor,
    planes: torch.Tensor,
    out: torch.Tensor,
    device: DeviceRows | None = None,
    tally: torch.Tensor | None = None,
) -> None:
    """Copy K and V of tokens, in one launch of at most `PROGRAMS` programs. See `pool_rows.gather_tokens`.

    The requirements on `rows` are those of `gather_rows`.
    """
    (lists, listed), (batch, blocks), (count, heads) = tokens.shape, bases.shape, planes.shape
    assert rows.is_contiguous() and tokens.is_contiguous() and bases.is_contiguous() and planes.is_contiguous()
    assert out.shape == (count, lists, listed, rows.shape[1]) and out.is_contiguous() and out.dtype == rows.dtype
    assert lists == batch * heads and count in (1, 2) and (counts is None or counts.shape == (lists,))
    if tokens.numel() == 0:
        return
    word_type, shape = _words(rows)
    copies, copy_planes, first = rows, planes, 0
    if device is not None:
        assert tally is not None and tally.shape == (batch, 2) and tally.is_contiguous() and tally.dtype == torch.int64
        copies, copy_planes, first = _copies(device, rows), device.planes, device.first
        assert copy_planes.shape == planes.shape and copy_planes.is_contiguous()
    _gather_tokens[(min(PROGRAMS, lists * triton.cdiv(listed, shape["BLOCK"])),)](
        rows.view(word_type), tokens, tokens if counts is None else counts, bases, planes, out.view(word_type),
        copies.view(word_type), copy_planes, bases if tally is None else tally, first, lists, listed, heads, blocks,
        **shape, COUNTED=counts is not None, PLANES=count, COPIED=device is not None,
    )  # fmt: skip


def write_rows(
    rows: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    newest: torch.Tensor,
    planes: torch.Tensor,
    device: DeviceRows | None = None,
) -> None:
    """Write K and V of the newest tokens to the KV pool, in one launch. See `pool_rows.write_rows`.

    The requirements on `rows` are those of `gather_rows`.
    """
    (lists, width), (count, heads) = k.shape, planes.shape
    assert rows.is_contiguous() and k.is_contiguous() and v.is_contiguous() and rows.dtype == k.dtype == v.dtype
    assert k.shape == v.shape and rows.shape[1] == width and planes.is_contiguous() and count in (1, 2)
    assert newest.shape == (lists // heads * (1 if device is None else 2),)
    word_type, shape = _words(rows)
    copies, copy_planes = (rows, planes) if device is None else (_copies(device, rows), device.planes)
    assert copy_planes.shape == planes.shape and copy_planes.is_contiguous()
    _write[(lists,)](
        rows.view(word_type), k.view(word_type), v.view(word_type), newest, planes, copies.view(word_type),
        copy_planes, heads,
        WORDS=shape["WORDS"], COLS=shape["COLS"], PLANES=count, COPIED=device is not None,
    )  # fmt: skip


def gather_slots(table: PointerTable, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Copy K and V from slots of the sequences' tensors, in one launch. See `lists.gather_slots`."""
    _copy_slots(table, slots, out, scatter=False)


def scatter_slots(table: PointerTable, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy K and V to slots of the sequences' tensors, in one launch. See `lists.scatter_slots`."""
    _copy_slots(table, slots, rows, scatter=True)


def _copy_slots(table: PointerTable, slots: torch.Tensor, rows: torch.Tensor, *, scatter: bool) -> None:
    (lists, listed), capacity, planes = slots.shape, table.tensors[0].shape[1], len(rows)
    assert all(tensor.is_contiguous() and tensor.shape[1] == capacity for tensor in table.tensors)
    assert planes in (1, 2) and table.lists == planes * lists
    assert all(tensor.data_ptr() % ALIGNED == 0 for tensor in table.tensors)
    assert slots.is_contiguous() and rows.is_contiguous() and rows.dtype == table.dtype
    assert rows.shape == (planes, lists, listed, table.tensors[0].shape[2])
    if slots.numel() == 0:
        return
    word_type, shape = _words(rows.flatten(0, 2))
    _slots[(lists, triton.cdiv(listed, shape["BLOCK"]))](
        table.table, slots, rows.view(word_type), lists, listed, table.heads // planes, capacity,
        **shape, SCATTER=scatter, ALIGN=ALIGNED, PLANES=planes,
    )  # fmt: skip


def _copies(device: DeviceRows, rows: torch.Tensor) -> torch.Tensor:
    copies = device.rows
    assert copies.is_contiguous() and copies.shape[1:] == rows.shape[1:] and copies.dtype == rows.dtype
    assert _words(copies) == _words(rows)
    return copies


def _words(rows: torch.Tensor) -> tuple[torch.dtype, dict[str, int]]:
    """Return the dtype of the integer words in which rows are copied, and kernel arguments for this word size.

    A word is the largest integer whose size divides the size and the address of a row. The arguments are the number of
    words per row (WORDS), the same number rounded up to a power of two (COLS), and the number of rows per block
    (BLOCK).
    """
    row_bytes = rows.shape[1] * rows.itemsize
    size = next(size for size in _WORDS if row_bytes % size == 0 and rows.data_ptr() % size == 0)
    block = max(1, _BLOCK_BYTES // triton.next_power_of_2(row_bytes))
    words = row_bytes // size
    return _WORDS[size], {"WORDS": words, "COLS": triton.next_power_of_2(words), "BLOCK": block}
