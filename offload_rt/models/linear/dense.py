"""Linear layers with float32 or bfloat16 weights on a CPU, without quantisation.

For few input rows, the C code (`row_products.c`) is as fast as the weights can be read from memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels import native, team
from ...utils.native_code import processor_level
from .backend import BackendLinear, LinearBackend

MAX_ROWS = 12
"""The C code is used for up to this many input rows. For more rows, torch is faster."""

PART_BYTES = 1 << 18
"""Size in bytes of the part of a weight matrix that a thread processes as one work item.

An item takes about 20 microseconds.
"""

MIN_THREADED_WORK = 1 << 20
"""If the weight has fewer bytes than this, its product is computed by one thread."""

TILE_BYTES = 1 << 22
"""Maximum size in bytes of a weight tile in float32. bfloat16 weights are converted tile by tile."""


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "outs", "ins", "size")),
    ]


@native.level_cache
def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the library `row_products.c`, compiled for weights of `dtype`, or None if it is not available."""
    if dtype not in (torch.bfloat16, torch.float32):
        return None
    return native.compiled("row_products", _Call, BFLOAT16=int(dtype == torch.bfloat16))


class DenseLinear(BackendLinear):
    """Linear layer that multiplies up to `MAX_ROWS` input rows in C. For more rows, it uses torch.

    In C, the result for a row does not depend on the number of rows, and sums are float32.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight  # Modules look up parameters slowly, and a decode step has hundreds of linear layers.
        if torch.is_grad_enabled() or input.dtype != weight.dtype or not input.numel():
            return super().forward(input)
        if input.numel() > MAX_ROWS * self.in_features:
            return product_by_tiles(input, lambda tile, dtype: weight[tile].to(dtype), len(weight), self.bias)
        # The C code reads the weight through its address, and the owner of the model may have moved the weight.
        code = library(weight.dtype) if weight.is_cpu and weight.is_contiguous() else None
        if code is None:
            return super().forward(input)
        x, bias, (outs, ins) = input.contiguous(), self.bias, weight.shape
        out = x.new_empty(*x.shape[:-1], outs)
        part_outs = max(1, PART_BYTES // (ins * weight.element_size()))
        bias_address = None if bias is None else bias.data_ptr()
        call = _Call(
            x.data_ptr(), weight.data_ptr(), bias_address, out.data_ptr(), x.numel() // ins, outs, ins, part_outs
        )
        threads = team.threads() if weight.nbytes >= MIN_THREADED_WORK else 1
        team.runner()(code.linear, ctypes.byref(call), -(-outs // part_outs), threads)
        return out


class DenseCPU(LinearBackend):
    layer_class = DenseLinear

    def supports(self, layer: nn.Linear, device: torch.device) -> bool:
        weight = layer.weight
        if not device.type == weight.device.type == "cpu" or weight.shape[1] % 32 or not weight.is_contiguous():
            return False
        return library(weight.dtype) is not None


DENSE = DenseCPU()


def product_by_tiles(
    x: torch.Tensor,
    weights: Callable[[slice, torch.dtype], torch.Tensor],
    outs: int,
    bias: torch.Tensor | None,
    unit: int = 1,
) -> torch.Tensor:
    """Multiply many rows `x` `[..., in]` by a weight `[outs, in]`, and add the bias. The result is `[..., outs]`.

    `x` is float32 or bfloat16. `weights(rows, dtype)` returns the rows `rows` of the weight in `dtype`. It is called
    for one tile at a time. A tile begins at a multiple of `unit` rows.
    """
    # Without bfloat16 instructions, torch multiplies bfloat16 slowly, so tiles of the weight are converted to float32.
    converts = x.dtype == torch.bfloat16 and not torch_multiplies_bfloat16()
    dtype, ins = torch.float32 if converts else x.dtype, x.shape[-1]
    rows = x.reshape(-1, ins).to(dtype)
    out = x.new_empty(len(rows), outs)
    max_height = max(1, TILE_BYTES // (4 * ins * unit)) * unit
    tile_count = max(-(-outs // max_height), min(team.threads(), outs))
    height = -(-outs // tile_count)
    height += -height % unit

    def compute(index: int) -> None:
        tile = slice(index * height, (index + 1) * height)
        out[:, tile] = F.linear(rows, weights(tile, dtype), None if bias is None else bias[tile].to(dtype))

    team.run_parts(compute, -(-outs // height))
    return out.view(*x.shape[:-1], outs)


@cache
def torch_multiplies_bfloat16() -> bool:
    """Return whether torch multiplies bfloat16 with native instructions (AVX512-BF16 or AMX) on this CPU."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return processor_level() == "avx512_bf16" and any(getattr(torch.cpu, name, bool)() for name in names)


def computes_bfloat16() -> bool:
    return library(torch.bfloat16) is not None or native.has_amx()
