"""Rotary positions of whole heads, in torch: the definition of the Triton kernel in `triton_rotary`."""

from __future__ import annotations

import torch


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x `[heads, T, d]` times cos, plus x with its halves swapped times sin, `[1, T, d]` each, sin with the sign that
    goes with the half: `[heads, T, d]` in the dtype of x, computed in the wider one."""
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    return (wide * cos).add_(wide.roll(x.shape[-1] // 2, dims=-1).mul_(sin)).to(x.dtype)
