"""Write low-bit KV in Triton, and compute addresses of low-bit blocks.

`append_rows` stores the newest K and V of each sequence. Each vector is multiplied by a matrix, quantised and packed.
Memory traffic per KV head: one program reads the basis of the keys, and another the mixing matrix of the values. Each
matrix takes 4 * d^2 bytes and is the same for all sequences. Together, both programs read 2 * d elements of K and V,
and write d * (4 + bits) / 8 + 2 bytes.

`store_rows` stores the vectors of a prompt, after torch has multiplied them by the matrices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .low_bit import KEY_BITS, MIN_STEP_BITS, Layout
from .pages import BLOCK, PAGE_BLOCKS, Pages, PageTable
from .pointer_table import ALIGNED
from .triton_columns import split_columns

_BLOCK, _PAGE, _SMALLEST = tl.constexpr(BLOCK), tl.constexpr(PAGE_BLOCKS), tl.constexpr(MIN_STEP_BITS)
_ALIGNED = tl.constexpr(ALIGNED)

_TILE, _STORED = 1 << 13, 1 << 15
"""Maximum number of matrix elements that `_append` reads, and of vector elements that `_store` quantises, at a time."""


@triton.jit
def decoded_steps(codes: tl.tensor) -> tl.tensor:
    """Convert the codes of quantisation steps to float32, as `low_bit.decode_steps` does."""
    return ((codes.to(tl.int32) + _SMALLEST) << 20).to(tl.float32, bitcast=True)


@triton.jit
def block_of(
    table: tl.tensor, pages: tl.tensor, offset: tl.tensor, p: tl.tensor, heads: tl.tensor, block: tl.tensor,
    BLOCK_BYTES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the address of block number `block` of list p (one KV head of one sequence). The block must exist.

    The blocks that follow it in the same page are contiguous in memory. `offset` is the offset in bytes of the layer
    within a page. `table` contains the page addresses, int64 `[B, pages]`.
    """
    page = tl.load(table + p // heads * pages + block // _PAGE).to(tl.pointer_type(tl.uint8))
    begin = page + offset + (p % heads * _PAGE + block % _PAGE) * BLOCK_BYTES
    return tl.multiple_of(begin, _ALIGNED)


@triton.jit
def _channels(
    x: tl.tensor, basis: tl.tensor, first: tl.tensor,
    d: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Multiply x `[d]` by basis `[d, d]`. Return channels [first, first + WIDTH) in float32, `[W]`."""
    column, acc = tl.arange(0, W), tl.zeros((W,), tl.float32)
    for begin in range(0, d, ROWS):
        row = begin + tl.arange(0, ROWS)
        number = tl.load(x + row, mask=row < d, other=0.0).to(tl.float32)
        tile = tl.load(basis + row[:, None] * d + first + column[None, :],
                       mask=(row < d)[:, None] & (column < WIDTH)[None, :], other=0.0)  # fmt: skip
        acc += tl.sum(number[:, None] * tile, 0)
    return acc


@triton.jit
def _steps(largest: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return the encoded steps (`low_bit.encode_steps`) of vectors whose largest magnitudes are `largest`."""
    upper = (largest * (1.0 / (1 << (BITS - 1)))).to(tl.int32, bitcast=True) + ((1 << 20) - 1)
    return tl.minimum(tl.maximum((upper >> 20) - _SMALLEST, 0), 255)


@triton.jit
def _code(x: tl.tensor, step: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Quantise x to codes with the quantisation step `step`, as `low_bit.quantise_rows` does."""
    code = tl.floor(tl.div_rn(x, step + tl.zeros_like(x))) + (1 << (BITS - 1))
    return tl.minimum(tl.maximum(code, 0.0), (1 << BITS) - 1).to(tl.int32)


@triton.jit
def _store_row(
    x: tl.tensor, basis: tl.tensor, mean: tl.tensor, address: tl.tensor, step_address: tl.tensor, stride: tl.tensor,
    CENTRED: tl.constexpr, d: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply x `[d]` by basis, subtract mean if CENTRED is true, quantise, and store the packed codes and the step.

    The WIDTH packed bytes are stored from `address` on, `stride` bytes apart. The code of the step is stored at
    `step_address`.
    """
    column = tl.arange(0, W)
    mask = column < WIDTH
    c0 = _channels(x, basis, 0, d, WIDTH, W, ROWS)
    c1 = _channels(x, basis, WIDTH, d, WIDTH, W, ROWS)
    if CENTRED:
        c0 -= tl.load(mean + column, mask=mask, other=0.0)
        c1 -= tl.load(mean + WIDTH + column, mask=mask, other=0.0)
    largest = tl.maximum(tl.max(tl.abs(c0), 0), tl.max(tl.abs(c1), 0))
    if BITS == 2:
        c2 = _channels(x, basis, 2 * WIDTH, d, WIDTH, W, ROWS)
        c3 = _channels(x, basis, 3 * WIDTH, d, WIDTH, W, ROWS)
        largest = tl.maximum(largest, tl.maximum(tl.max(tl.abs(c2), 0), tl.max(tl.abs(c3), 0)))
    code = _steps(largest, BITS)
    step = decoded_steps(code)
    packed = _code(c0, step, BITS) | (_code(c1, step, BITS) << BITS)
    if BITS == 2:
        packed |= (_code(c2, step, BITS) << 4) | (_code(c3, step, BITS) << 6)
    tl.store(address + column * stride, packed.to(tl.uint8), mask=mask)
    tl.store(step_address, code.to(tl.uint8))


@triton.jit(do_not_specialize=["pages", "offset"])
def _append(
    k: tl.tensor, v: tl.tensor, basis: tl.tensor, mean: tl.tensor, mixing: tl.tensor, table: tl.tensor,
    pages: tl.tensor, offset: tl.tensor, slots: tl.tensor, heads: tl.tensor,
    d: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (p, 0) stores the key of list p with KEY bits, and program (p, 1) stores its value with VALUE bits.

    Lists with a negative slot are skipped.
    """
    p = tl.program_id(0).to(tl.int64)
    slot, head = tl.load(slots + p), p % heads
    valid_slot = tl.maximum(slot, 0)
    row = valid_slot % _BLOCK
    block_address = block_of(table, pages, offset, p, heads, valid_slot // _BLOCK, _BLOCK * (KEYS + VALUES + 2))
    steps = block_address + _BLOCK * (KEYS + VALUES) + row
    if (tl.program_id(1) == 0) & (slot >= 0):
        _store_row(k + p * d, basis + head * d * d, mean + head * d, block_address + row, steps, _BLOCK,
                   True, d, KEYS, K, KEY, ROWS)  # fmt: skip
    if (tl.program_id(1) == 1) & (slot >= 0):
        _store_row(v + p * d, mixing, mean, block_address + _BLOCK * KEYS + row * VALUES, steps + _BLOCK, 1,
                   False, d, VALUES, V, VALUE, ROWS)  # fmt: skip


def append_rows(
    k: torch.Tensor,
    v: torch.Tensor,
    basis: torch.Tensor,
    mean: torch.Tensor,
    mixing: torch.Tensor,
    layout: Layout,
    table: PageTable,
    slots: torch.Tensor,
) -> None:
    """Append the newest K and V of a batch to the low-bit KV, in one launch. See `low_bit_lists.append_rows`.

    basis, mean and mixing must be float32. Sums over d are computed in a different order than in torch, so a value
    halfway between two codes may get either code.
    """
    lists, d = k.shape
    assert k.shape == v.shape and k.is_contiguous() and v.is_contiguous() and slots.shape == (lists,)
    assert basis.dtype == mean.dtype == mixing.dtype == torch.float32 and table.lists == lists
    assert basis.is_contiguous() and mean.is_contiguous() and mixing.is_contiguous()
    keys, values = layout.key_bytes, layout.value_bytes
    K, V = max(32, triton.next_power_of_2(keys)), max(16, triton.next_power_of_2(values))
    _append[(lists, 2)](
        k, v, basis, mean, mixing, *page_arguments(table), slots, table.heads,
        d=d, KEYS=keys, VALUES=values, KEY=KEY_BITS, VALUE=layout.value_bits, K=K, V=V,
        ROWS=min(128, triton.next_power_of_2(d), _TILE // K), num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["offset", "start", "stop"])
def _store(
    rows: tl.tensor, table: tl.tensor, offset: tl.tensor, start: tl.tensor, stop: tl.tensor, heads: tl.tensor,
    d: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    FIRST: tl.constexpr, STEPS: tl.constexpr, TOKEN: tl.constexpr, BYTE: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (i, head) quantises and stores the vectors of ROWS tokens of a block.

    The WIDTH packed bytes of token t of the block are stored from FIRST + t * TOKEN on, BYTE bytes apart. The code of
    its step is stored at STEPS + t.
    """
    head, first = tl.program_id(1).to(tl.int64), (start // ROWS + tl.program_id(0)) * ROWS
    column, block, row = tl.arange(0, W), first // _BLOCK, first % _BLOCK + tl.arange(0, ROWS)
    token = block * _BLOCK + row
    valid = (token >= start) & (token < stop)
    mask = valid[:, None] & (column < WIDTH)[None, :]
    address = rows + (head * (stop - start) + token - start)[:, None] * d + column[None, :]
    c0, c1 = tl.load(address, mask=mask, other=0.0), tl.load(address + WIDTH, mask=mask, other=0.0)
    largest = tl.max(tl.maximum(tl.abs(c0), tl.abs(c1)), 1)
    if BITS == 2:
        c2, c3 = tl.load(address + 2 * WIDTH, mask=mask, other=0.0), tl.load(address + 3 * WIDTH, mask=mask, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(c2), tl.abs(c3)), 1))
    codes = _steps(largest, BITS)
    step = decoded_steps(codes)[:, None]
    packed = _code(c0, step, BITS) | (_code(c1, step, BITS) << BITS)
    if BITS == 2:
        packed |= (_code(c2, step, BITS) << 4) | (_code(c3, step, BITS) << 6)
    block_address = block_of(table, 0, offset, head, heads, block, BLOCK_BYTES)
    tl.store(block_address + FIRST + row[:, None] * TOKEN + column[None, :] * BYTE, packed.to(tl.uint8), mask=mask)
    tl.store(block_address + STEPS + row, codes.to(tl.uint8), mask=valid)


def store_rows(pages: Pages, layout: Layout, rows: torch.Tensor, start: int, *, values: bool) -> None:
    """Quantise and store `rows` `[Hkv, m, d]` in one launch. See `low_bit.store_rows`. `rows` must be float32.

    The stored bytes equal those of the reference implementation.
    """
    heads, m, d = rows.shape
    assert rows.dtype == torch.float32 and rows.is_contiguous() and d == layout.head_dim and heads == pages.heads
    if m == 0:
        return
    width, bits = (layout.value_bytes, layout.value_bits) if values else (layout.key_bytes, KEY_BITS)
    W: int = max(16, triton.next_power_of_2(width))
    steps = BLOCK * (layout.key_bytes + layout.value_bytes)
    rows_per_program = min(BLOCK, _STORED // (W * 8 // bits))
    _store[(triton.cdiv(start + m, rows_per_program) - start // rows_per_program, heads)](
        rows, pages.table, pages.offset, start, start + m, heads, d=d, WIDTH=width, W=W, BITS=bits,
        BLOCK_BYTES=layout.block_bytes, FIRST=BLOCK * layout.key_bytes if values else 0,
        STEPS=steps + BLOCK if values else steps, TOKEN=width if values else 1, BYTE=1 if values else BLOCK,
        ROWS=rows_per_program, num_warps=min(16, max(4, W * 8 // bits // 16)),
    )  # fmt: skip


def padded_sizes(layout: Layout) -> dict[str, int]:
    """Return the sizes in bytes of a packed key and value (KEYS, VALUES) and of their tiles (K, K_REST, V, V_REST).

    For the tiles, see `split_columns`.
    """
    keys, values = layout.key_bytes, layout.value_bytes
    K, V = split_columns(keys, 32, 32), split_columns(values, 16, 32)  # narrower tiles spill registers
    return {"KEYS": keys, "VALUES": values, "K": K["D"], "K_REST": K["REST"], "V": V["D"], "V_REST": V["REST"]}


def page_arguments(table: PageTable) -> tuple[torch.Tensor, int, int]:
    """Return the first three arguments of `block_of`: page addresses, pages per sequence, and offset of the layer."""
    return table.table, table.table.shape[1], table.offset
