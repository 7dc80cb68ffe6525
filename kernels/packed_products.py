"""Linear layers with packed weights on a CPU (`packed_products.c`).

For a few input rows, C code multiplies by the packed weights directly. For more rows, it unpacks the weights, and torch
computes the product.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from . import native, team
from .packed_format import TILE, PackedFormat

MAX_ROWS = 16
"""Maximum number of input rows for the C product, which is then faster than unpacking and torch's product."""

PART_BYTES = 1 << 16
"""Number of bytes of packed weights that a thread reads at a time."""

MIN_THREADED_WORK = 1 << 18
"""Products use one thread if the packed weights have fewer bytes."""


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "bias", "codes", "out", "whole", "tile", "factors", "sums")),
        *((name, ctypes.c_int64) for name in ("rows", "outs", "ins", "size", "stride", "bits", "group")),
        *((name, ctypes.c_int64) for name in ("high", "scales", "minima", "zeros", "factors_of_scales")),
        *((name, ctypes.c_int64) for name in ("factors_of_minima", "units")),
        ("offset", ctypes.c_float),
        ("power", ctypes.c_float),
    ]


@dataclass(frozen=True, eq=False)
class PackedProducts:
    """Products with packed weights, compiled for one dtype of inputs and results."""

    library: ctypes.CDLL

    def linear(
        self, x: torch.Tensor, packed: torch.Tensor, form: PackedFormat, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply x `[..., in]` by interleaved weights `[out, in]` and add bias `[out]`. Return `[..., out]`."""
        assert form.interleaved and packed.is_contiguous()
        assert x.shape[-1] == form.ins and (bias is None or bias.dtype == x.dtype)
        x, outs = x.contiguous(), packed.shape[0]
        rows = x.numel() // form.ins
        out = x.new_empty(*x.shape[:-1], outs)
        call = self._call(packed, form, out)
        call.rows, call.x, call.bias = rows, x.data_ptr(), None if bias is None else bias.data_ptr()
        if x.dtype == torch.bfloat16:
            # One buffer holds the integers, factors and sums of x, because each tensor costs 2 microseconds.
            call.units = units = form.ins // (16 if form.bits == 6 else 32)
            buffer = torch.empty(rows * (2 * form.ins + 8 * units), dtype=torch.uint8)
            call.whole = start = buffer.data_ptr()
            call.factors = start + 2 * rows * form.ins
            call.sums = start + 2 * rows * form.ins + 4 * rows * units
            team.runner()(self.library.prepare, ctypes.byref(call), rows, 1)
        threads = team.threads() if packed.nbytes >= MIN_THREADED_WORK else 1
        team.runner()(self.library.linear, ctypes.byref(call), -(-outs // call.size), threads)
        return out

    def unpack(self, packed: torch.Tensor, form: PackedFormat, dtype: torch.dtype) -> torch.Tensor:
        """Return the unpacked weights `[out, in]`. `dtype` must be the dtype of the compiled code."""
        out = torch.empty(len(packed), form.ins, dtype=dtype)
        call = self._call(packed, form, out)
        tile = torch.empty(TILE, form.row_bytes, dtype=torch.uint8)
        call.tile = tile.data_ptr() if form.interleaved else None
        team.runner()(self.library.unpack, ctypes.byref(call), -(-len(packed) // call.size), 1)
        return out

    def _call(self, packed: torch.Tensor, form: PackedFormat, out: torch.Tensor) -> _Call:
        return _Call(
            codes=packed.data_ptr(), out=out.data_ptr(), outs=packed.shape[0], ins=form.ins,
            size=max(1, PART_BYTES // (TILE * form.row_bytes)) * TILE, stride=packed.stride(0),
            bits=form.bits, group=form.group, offset=form.offset, power=2.0**form.exponent,
            high=form.high_start, scales=form.scales_start,
            minima=form.minima_start if form.has_minima else -1,
            zeros=form.minima_start if form.has_zeros else -1,
            factors_of_scales=form.factors_start if form.has_factors else -1,
            factors_of_minima=form.minima_factors_start,
        )  # fmt: skip


def compiled_for(dtype: torch.dtype) -> PackedProducts | None:
    if dtype not in (torch.bfloat16, torch.float32):
        return None
    library = native.compiled("packed_products", BFLOAT16=int(dtype == torch.bfloat16))
    return None if library is None else PackedProducts(library)
