"""Root mean square norm in Triton, in one launch instead of six."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FEW_ROWS = 32
"""Up to this number of rows, each program computes a single row. One row per multiprocessor is fastest."""

_TILE = 4096
"""Number of elements that a program processes if it computes several rows."""


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, step: tl.tensor, rows: tl.tensor, eps: tl.tensor,
    d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Program i normalises rows [i * ROWS, (i + 1) * ROWS). The order of summation differs from torch's."""
    t, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    mask = (t < rows)[:, None] & (column < d)[None, :]
    wide = tl.load(x + t[:, None] * step + column[None, :], mask=mask, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1) / d + eps)[:, None]
    scale = tl.load(weight + column, mask=column < d).to(tl.float32)
    rounded = normed.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + t[:, None] * d + column[None, :], (scale[None, :] * rounded).to(x.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute a root mean square norm in one launch. See `reference.rms_norm`.

    x `[T, D]` and weight `[D]` must have the same dtype and contiguous rows.
    """
    tokens, d = x.shape
    assert weight.shape == (d,) and weight.dtype == x.dtype and weight.is_contiguous() and x.stride(1) == 1
    out = torch.empty(tokens, d, dtype=x.dtype, device=x.device)
    width: int = triton.next_power_of_2(d)
    rows = 1 if tokens <= FEW_ROWS else max(1, _TILE // width)
    warps = min(16, max(1, rows * width // 256))
    _rms_norm[(triton.cdiv(tokens, rows),)](
        x, weight, out, x.stride(0), tokens, eps, d=d, D=width, ROWS=rows, num_warps=warps
    )
    return out
