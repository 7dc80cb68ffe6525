"""Root mean square norm in torch: the reference implementation of `triton_norm`."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide x `[T, D]` by its root mean square in float32, round to the dtype of x, and multiply by weight `[D]`.

    This is the order of operations in transformers' Llama.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
