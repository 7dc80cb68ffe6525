"""Rotary position embedding (RoPE) in Triton, in one launch instead of four.

Results are rounded exactly like those of `reference.rotate_halves`. In models with large keys, such as Qwen, different
rounding would change scores by 1 or more, and the results would differ from those of transformers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_norm import FEW_ROWS

_TILE = 2048
"""Number of elements that a program processes if it rotates several tokens."""


@triton.jit(do_not_specialize=["tokens"])
def _rotate(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, out: tl.tensor, head_step: tl.tensor, token_step: tl.tensor,
    tokens: tl.tensor, d: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, ROUNDED: tl.constexpr,
) -> None:  # fmt: skip
    """Program (h, i) rotates head h of the tokens [i * ROWS, (i + 1) * ROWS).

    If ROUNDED is true, both products are rounded to the dtype of x before they are added.
    """
    h, t = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, D)[None, :]
    address, mask = x + h * head_step + t * token_step, (t < tokens) & (column < d)
    partner = tl.where(column < d // 2, column + d // 2, column - d // 2)
    value = tl.load(address + column, mask=mask, other=0.0).to(tl.float32)
    partner_value = tl.load(address + partner, mask=mask, other=0.0).to(tl.float32)
    cos_value = tl.load(cos + t * d + column, mask=mask, other=0.0).to(tl.float32)
    sin_value = tl.load(sin + t * d + column, mask=mask, other=0.0).to(tl.float32)
    first, second = value * cos_value, partner_value * sin_value
    if ROUNDED:
        first, second = first.to(x.dtype.element_ty).to(tl.float32), second.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + (h * tokens + t) * d + column, (first + second).to(x.dtype.element_ty), mask=mask)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE in one launch. See `reference.rotate_halves`. The last dimension of x must be contiguous."""
    heads, tokens, d = x.shape
    assert cos.shape == sin.shape == (1, tokens, d) and cos.is_contiguous() and sin.is_contiguous()
    assert x.stride(2) == 1 and d % 2 == 0
    out = torch.empty(heads, tokens, d, dtype=x.dtype, device=x.device)
    width: int = triton.next_power_of_2(d)
    rows = 1 if tokens <= FEW_ROWS else max(1, _TILE // width)
    # Disable fused multiply-add, which would not round the first product.
    _rotate[(heads, triton.cdiv(tokens, rows))](
        x, cos, sin, out, x.stride(0), x.stride(1), tokens, d=d, D=width, ROWS=rows,
        ROUNDED=cos.dtype == x.dtype != torch.float32, num_warps=1 if rows == 1 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
