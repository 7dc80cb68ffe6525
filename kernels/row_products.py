"""Linear layers with few input rows on a CPU (`row_products.c`), whose speed is limited by reading the weights."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from ..utils.native_code import processor_level
from . import native, team

MAX_ROWS = 12
"""The C product is used for up to this number of input rows. It is then faster than torch's product."""

PART_BYTES = 1 << 18
"""Number of bytes of a weight that a thread reads at a time, in about 20 microseconds."""

WORTH_THREADS = 1 << 20
"""Size in bytes of a weight from which several threads are used."""


class _Call(ctypes.Structure):
    """The structure `Call` of row_products.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "outs", "ins", "size")),
    ]


@dataclass(frozen=True, eq=False)
class RowProducts:
    """Compiled code for one dtype of weights."""

    library: ctypes.CDLL

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply x `[..., in]` by weight `[out, in]` and add bias `[out]`. Return `[..., out]`. Sums are float32."""
        (outs, ins), x = weight.shape, x.contiguous()
        out = x.new_empty(*x.shape[:-1], outs)
        size = max(1, PART_BYTES // (ins * weight.element_size()))
        bias_at = None if bias is None else bias.data_ptr()
        call = _Call(x.data_ptr(), weight.data_ptr(), bias_at, out.data_ptr(), x.numel() // ins, outs, ins, size)
        threads = team.threads() if weight.nbytes >= WORTH_THREADS else 1
        team.runner()(self.library.linear, ctypes.byref(call), -(-outs // size), threads)
        return out


def takes(weight: torch.Tensor) -> RowProducts | None:
    """Return the code for a weight `[out, in]`, or None if it is not supported or there is no compiled code."""
    if weight.device.type != "cpu" or weight.shape[1] % 32 or not weight.is_contiguous():
        return None
    return code_for(weight.dtype)


@cache
def torch_multiplies_bfloat16() -> bool:
    """Return whether torch has bfloat16 product instructions (AVX512-BF16 or AMX) on this processor."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return processor_level() == "avx512_bf16" and any(getattr(torch.cpu, name, bool)() for name in names)


@native.level_cache
def code_for(dtype: torch.dtype) -> RowProducts | None:
    """Return the code for weights of `dtype`, or None if there is none."""
    if dtype not in (torch.bfloat16, torch.float32):
        return None
    library = native.compiled("row_products", _Call, BFLOAT16=int(dtype == torch.bfloat16))
    return None if library is None else RowProducts(library)
