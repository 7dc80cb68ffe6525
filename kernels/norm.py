"""Root mean square norms, in torch: the definition of the Triton kernel in `triton_norm`."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x `[T, D]` over the root of its mean square, in float32, rounded to the dtype of x, times weight `[D]`: as
    transformers' Llama computes it."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
