"""Multiply a few input rows by packed weights, and unpack packed weights, in Triton.

The memory traffic of a product is that of the packed rows, which are read in place. A program multiplies up to eight
input rows. Programs that use the same weights are adjacent, so that they find the weights in the caches.

A *unit* is 16 bytes with the lower bits of codes. With 8-bit codes, it covers 16 inputs. With 4 to 6 bits, it covers
two *halves*, which are groups of 16 adjacent inputs. The inputs of a half share one scale. The reference implementation
is `PackedFormat.unpack`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from .packed_format import BLOCK, PackedFormat

MAX_ROWS = 16
"""`linear` is used for up to this number of input rows. For more rows, unpacking should be faster (not measured)."""

_ROWS = 8
"""Maximum number of input rows per program."""

_OUTS = 4
"""Number of outputs per program. A program has one warp."""

_UNITS = 32
"""Number of units that a program reads at a time. A warp then reads 8 bytes of weights and 8 inputs per thread."""

PART = 64
"""Ranges of inputs that `unpack` can unpack begin and end at multiples of this number. Two units contain 64 inputs."""

_BLOCK = tl.constexpr(BLOCK)
_ROWS_OF_ACC = tl.constexpr(_ROWS)


@triton.constexpr_function
def _spread(bits: int, half: int) -> str:
    """Return assembly code that turns four bytes into four floats: 1.0 with the code of half `half` in the mantissa.

    The code that Triton generates for bytes takes twice as many instructions.
    """
    mask, mantissa_bit = ("0x7F8000", 15) if bits == 8 else ("0xF0000", 16)
    shifts = [mantissa_bit - 8 * byte - 4 * half for byte in range(4)]
    moves = (f"{'shl' if shift > 0 else 'shr'}.b32 ${i}, $4, {abs(shift)};" for i, shift in enumerate(shifts))
    merges = (f"lop3.b32 ${i}, ${i}, {mask}, one, 0xEA;" for i in range(4))  # (moved & mask) | one
    return f"{{ .reg .b32 one; mov.b32 one, 0x3F800000; {' '.join((*moves, *merges))} }}"


@triton.jit
def _words(address: tl.tensor, mask: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """Load 16-bit words from byte addresses. If EVEN is true, all addresses are even. Masked words are 0."""
    if EVEN:
        return tl.load(address.to(tl.pointer_type(tl.uint16)), mask=mask, other=0)
    low, high = tl.load(address, mask=mask, other=0), tl.load(address + 1, mask=mask, other=0)
    return low.to(tl.uint16) | (high.to(tl.uint16) << 8)


@triton.jit
def _numbers(
    row: tl.tensor, group: tl.tensor, mask: tl.tensor, start: tl.tensor, factors: tl.tensor, power: tl.tensor,
    GROUP: tl.constexpr, FACTORS: tl.constexpr, EVEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load the scales or minima of groups in float32; 0 for masked groups.

    `start` is the offset of the scales or minima in a row, and `factors` is the offset of their factors.
    """
    if FACTORS:
        integers = tl.load((row + start + group).to(tl.pointer_type(tl.int8)), mask=mask, other=0).to(tl.float32)
        factor = _words(row + factors + 2 * (group // (_BLOCK // GROUP)), mask, EVEN)
        return integers * (factor.to(tl.float16, bitcast=True).to(tl.float32) * power)
    return _words(row + start + 2 * group, mask, EVEN).to(tl.float16, bitcast=True).to(tl.float32) * power


@triton.jit
def _scales(
    row: tl.tensor, unit: tl.tensor, mask: tl.tensor, scales: tl.tensor, minima: tl.tensor, factors: tl.tensor,
    minima_factors: tl.tensor, power: tl.tensor, offset: tl.tensor,
    HALF: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, MINIMA: tl.constexpr, ZEROS: tl.constexpr,
    FACTORS: tl.constexpr, EVEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the scales and minima of one half of each unit, float32 `[OUTS, UNITS]`."""
    group = _first_input(unit, HALF, BITS) // GROUP
    scale = _numbers(row, group, mask, scales, factors, power, GROUP, FACTORS, EVEN)
    if MINIMA:
        return scale, _numbers(row, group, mask, minima, minima_factors, power, GROUP, FACTORS, EVEN)
    if ZEROS:
        offset = tl.load(row + minima + group, mask=mask, other=0).to(tl.float32)
    return scale, -offset * scale


@triton.jit
def _first_input(unit: tl.tensor, HALF: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Return the index of the first of the 16 inputs in a half of a unit."""
    if BITS == 8:
        return unit * 16
    return unit // 2 * 64 + unit % 2 * 16 + 32 * HALF


@triton.jit
def _raw(row: tl.tensor, unit: tl.tensor, mask: tl.tensor, PART: tl.constexpr) -> tl.tensor:
    """Load the first or last 8 bytes of units, uint8 `[OUTS, UNITS, 8]`.

    Inputs are also loaded in groups of 8 (`_inputs`). Both have the same layout, so they need not pass through shared
    memory.
    """
    address = (row + unit * 16 + 8 * PART)[:, :, None] + tl.arange(0, 8)[None, None, :]
    return tl.load(address, mask=mask[:, :, None], other=0)


@triton.jit
def _levels(
    row: tl.tensor, raw: tl.tensor, unit: tl.tensor, mask: tl.tensor, high: tl.tensor,
    PART: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, INTERPRETED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return 1 + code / 128 (with 8 bits: 1 + code / 256) for 8 codes of a half, float32 `[OUTS, UNITS, 8]`.

    `raw` contains the lower bits (`_raw`). Codes are put into the mantissa of 1.0, because converting integers is slow
    on some GPUs.
    """
    if INTERPRETED:
        codes = (raw.to(tl.int32) >> (4 * HALF)) & (255 if BITS == 8 else 15)
        levels = (codes << (15 if BITS == 8 else 16)) | 0x3F800000
    else:
        levels = tl.inline_asm_elementwise(
            _spread(BITS, HALF), "=&r,=&r,=&r,=&r,r", [raw], dtype=tl.int32, is_pure=True, pack=4
        )
    if BITS == 5:
        bits = tl.load(row + high + unit // 2 * 8 + unit % 2 * 2 + 4 * HALF + PART, mask=mask, other=0).to(tl.int32)
        levels |= ((bits[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1) << 20
    if BITS == 6:
        address = (row + high + unit // 4 * 32 + unit % 2 * 16 + 8 * PART)[:, :, None] + tl.arange(0, 8)[None, None, :]
        bits = tl.load(address, mask=mask[:, :, None], other=0).to(tl.int32)
        levels |= ((bits >> (unit // 2 % 2 * 4 + 2 * HALF)[:, :, None]) & 3) << 20
    return levels.to(tl.float32, bitcast=True)


@triton.jit
def _inputs(
    x: tl.tensor, unit: tl.tensor, units: tl.tensor, PART: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Load the first or last 8 inputs in a half of each unit in float32, `[1, UNITS, 8]`."""
    column = (_first_input(unit, HALF, BITS) + 8 * PART)[:, :, None] + tl.arange(0, 8)[None, None, :]
    return tl.load(x + column, mask=(unit < units)[:, :, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "outs"])
def _linear(
    x: tl.tensor, packed: tl.tensor, bias: tl.tensor, experts: tl.tensor, out: tl.tensor, x_step: tl.tensor,
    rows: tl.tensor, outs: tl.tensor, step: tl.tensor, units: tl.tensor, high: tl.tensor, scales: tl.tensor,
    minima: tl.tensor, factors: tl.tensor, minima_factors: tl.tensor, power: tl.tensor, offset: tl.tensor,
    BIAS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    MINIMA: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr, ALIGN: tl.constexpr, OUTS: tl.constexpr,
    UNITS: tl.constexpr, INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """Program i * n + m computes block i of OUTS outputs for block m of ROWS input rows, if there are n row blocks.

    If EXPERTS is true, ROWS is 1, and row m is multiplied by the weights of expert `experts[m]`. The minimum of a group
    is multiplied by the sum of its inputs. The rows of the weights are `step * ALIGN` bytes apart.
    """
    # Use a single grid axis, because a second axis could not hold all outputs of a large vocabulary.
    blocks = (rows + ROWS - 1) // ROWS
    m, out_index = (tl.program_id(0) % blocks).to(tl.int64), tl.program_id(0) // blocks * OUTS + tl.arange(0, OUTS)
    first_out = tl.load(experts + m).to(tl.int64) * outs if EXPERTS else 0
    row = (packed + (first_out + out_index.to(tl.int64)) * (step * ALIGN))[:, None]
    LEVELS: tl.constexpr = 256.0 if BITS == 8 else 128.0
    # One thread holds the sums of all rows in its registers, like the 8 weights of a half.
    number, acc = tl.arange(0, _ROWS_OF_ACC), tl.zeros((OUTS, UNITS, _ROWS_OF_ACC), tl.float32)
    for begin in range(0, units, UNITS):
        unit = begin + tl.arange(0, UNITS)[None, :]
        mask = (out_index < outs)[:, None] & (unit < units)
        raw0, raw1 = _raw(row, unit, mask, 0), _raw(row, unit, mask, 1)
        for HALF in tl.static_range(1 if BITS == 8 else 2):
            levels0 = _levels(row, raw0, unit, mask, high, 0, HALF, BITS, INTERPRETED)
            levels1 = _levels(row, raw1, unit, mask, high, 1, HALF, BITS, INTERPRETED)
            scale, minimum = _scales(row, unit, mask, scales, minima, factors, minima_factors, power, offset,
                                     HALF, BITS, GROUP, MINIMA, ZEROS, FACTORS, ALIGN > 1)  # fmt: skip
            for R in tl.static_range(ROWS):
                input_row = x + tl.minimum(m * ROWS + R, rows - 1) * x_step
                x0, x1 = _inputs(input_row, unit, units, 0, HALF, BITS), _inputs(input_row, unit, units, 1, HALF, BITS)
                products = scale * LEVELS * (tl.sum(levels0 * x0, 2) + tl.sum(levels1 * x1, 2))
                products += (minimum - scale * LEVELS) * (tl.sum(x0, 2) + tl.sum(x1, 2))
                acc = tl.where((number == R)[None, None, :], acc + products[:, :, None], acc)
    sums = tl.sum(acc, 1)
    if BIAS:
        sums += tl.load(bias + first_out + out_index, mask=out_index < outs, other=0.0).to(tl.float32)[:, None]
    out_row, stored = m * ROWS + number[None, :], (out_index < outs)[:, None] & (number < ROWS)[None, :]
    tl.store(out + out_row * outs + out_index[:, None], sums.to(out.dtype.element_ty), mask=stored & (out_row < rows))


@triton.jit(do_not_specialize=["rows", "first", "units"])
def _unpack(
    packed: tl.tensor, ids: tl.tensor, out: tl.tensor, rows: tl.tensor, width: tl.tensor, first: tl.tensor,
    step: tl.tensor, units: tl.tensor, high: tl.tensor, scales: tl.tensor, minima: tl.tensor, factors: tl.tensor,
    minima_factors: tl.tensor, power: tl.tensor, offset: tl.tensor,
    IDS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, MINIMA: tl.constexpr, ZEROS: tl.constexpr,
    FACTORS: tl.constexpr, ALIGN: tl.constexpr, OUTS: tl.constexpr, UNITS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """Program (i, j) unpacks UNITS units of rows [i * OUTS, (i + 1) * OUTS) of `out`, starting at `first + j * UNITS`.

    `out` contains the `width` inputs of the units [first, units). If IDS is true, row r of `out` is row `ids[r]` of
    `packed`.
    """
    out_index = tl.program_id(0).to(tl.int64) * OUTS + tl.arange(0, OUTS)
    source = tl.load(ids + out_index, mask=out_index < rows, other=0).to(tl.int64) if IDS else out_index
    row = (packed + source * (step * ALIGN))[:, None]
    unit = first + tl.program_id(1) * UNITS + tl.arange(0, UNITS)[None, :]
    LEVELS: tl.constexpr = 256.0 if BITS == 8 else 128.0
    mask = (out_index < rows)[:, None] & (unit < units)
    for HALF in tl.static_range(1 if BITS == 8 else 2):
        scale, minimum = _scales(row, unit, mask, scales, minima, factors, minima_factors, power, offset,
                                 HALF, BITS, GROUP, MINIMA, ZEROS, FACTORS, ALIGN > 1)  # fmt: skip
        for PART in tl.static_range(2):
            raw = _raw(row, unit, mask, PART)
            codes = (_levels(row, raw, unit, mask, high, PART, HALF, BITS, INTERPRETED) - 1.0) * LEVELS
            column = (_first_input(unit, HALF, BITS) + 8 * PART)[:, :, None] + tl.arange(0, 8)[None, None, :]
            weights = codes * scale[:, :, None] + minimum[:, :, None]
            address = out + out_index[:, None, None] * width + column - _first_input(first, 0, BITS)
            tl.store(address, weights.to(out.dtype.element_ty), mask=mask[:, :, None])


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    form: PackedFormat,
    bias: torch.Tensor | None,
    experts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows x `[n, in]` by packed weights and add a bias, in one launch. Return `[n, out]`.

    Without `experts`, packed is uint8 `[out, form.row_bytes]` and bias is `[out]` or None. With `experts` `[n]`, packed
    and bias have an additional first axis, and row i is multiplied by the weight at index `experts[i]`.
    """
    (rows, ins), outs = x.shape, packed.shape[-2]
    assert ins == form.ins and not form.interleaved and packed.is_contiguous()
    assert bias is None or bias.is_contiguous()
    assert experts is None or (experts.is_contiguous() and len(experts) == rows)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(rows, outs)
    rows_per_program = min(_ROWS, triton.next_power_of_2(rows)) if experts is None else 1
    _linear[(triton.cdiv(rows, rows_per_program) * triton.cdiv(outs, _OUTS),)](
        x, packed, x if bias is None else bias, x if experts is None else experts, out, x.stride(0), rows, outs,
        *_offsets(form), BIAS=bias is not None, EXPERTS=experts is not None, ROWS=rows_per_program, **_constants(form),
        num_warps=1,
    )  # fmt: skip
    return out


def unpack(
    packed: torch.Tensor,
    form: PackedFormat,
    dtype: torch.dtype,
    ids: torch.Tensor | None = None,
    inputs: range | None = None,
) -> torch.Tensor:
    """Return unpacked weights `[n, in]` of packed rows, uint8 `[rows, form.row_bytes]`, in one launch.

    Args:
        packed: The rows, in device memory or in page-locked host memory.
        dtype: Dtype of the result.
        ids: Indices of the rows to unpack, `[n]` on the device. None means all rows, which must then be in device
            memory.
        inputs: Inputs to unpack. None means all. A range must begin and end at multiples of `PART`.
    """
    assert packed.is_contiguous() and not form.interleaved and (ids is None or ids.is_contiguous())
    rows, inputs = len(packed) if ids is None else len(ids), range(form.ins) if inputs is None else inputs
    assert inputs.start % PART == 0 == inputs.stop % PART and inputs.stop <= form.ins
    out = torch.empty(rows, len(inputs), dtype=dtype, device=(packed if ids is None else ids).device)
    (step, _, *offsets), constants = _offsets(form), _constants(form)
    per_unit = 16 if form.bits == 8 else 32
    first, stop = inputs.start // per_unit, inputs.stop // per_unit
    _unpack[(triton.cdiv(rows, _OUTS), triton.cdiv(stop - first, constants["UNITS"]))](
        packed, packed if ids is None else ids, out, rows, len(inputs), first, step, stop, *offsets,
        IDS=ids is not None, **constants, num_warps=1,
    )  # fmt: skip
    return out


def _offsets(form: PackedFormat) -> tuple[int | float, ...]:
    """Return the kernel arguments that describe a row: `step`, `units`, offsets of parts, `power` and `offset`."""
    starts = form.high_start, form.scales_start, form.minima_start, form.factors_start, form.minima_factors_start
    step, units = form.row_bytes // _alignment(form), form.high_start // 16
    return step, units, *starts, 2.0**form.exponent, float(form.offset)


def _constants(form: PackedFormat) -> dict[str, Any]:
    return {
        "BITS": form.bits, "GROUP": form.group, "MINIMA": form.has_minima, "ZEROS": form.has_zeros,
        "FACTORS": form.has_factors, "ALIGN": _alignment(form), "OUTS": _OUTS,
        "UNITS": min(_UNITS, triton.next_power_of_2(form.high_start // 16)), "INTERPRETED": knobs.runtime.interpret,
    }  # fmt: skip


def _alignment(form: PackedFormat) -> int:
    return math.gcd(form.row_bytes, 16)
