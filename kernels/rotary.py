"""RoPE in torch for heads whose dimensions are all rotated. The reference implementation of `triton_rotary`."""

from __future__ import annotations

import torch


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x times cos plus x with swapped halves times sin, `[heads, T, d]` in the dtype of x.

    x is `[heads, T, d]`, cos and sin are `[1, T, d]`. `sin` includes the sign of each half. The result is computed in
    the wider of the two dtypes.
    """
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    return (wide * cos).add_(wide.roll(x.shape[-1] // 2, dims=-1).mul_(sin)).to(x.dtype)
