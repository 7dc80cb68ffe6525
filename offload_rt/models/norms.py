"""RMS norms as one kernel launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..kernels.dispatch import rms_norm


def fused(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that computes a norm, `[T, D]` to `[T, D]`, in one kernel on a CUDA device if possible.

    Only copies of `LlamaRMSNorm`, which most models contain, are fused. Other modules are returned unchanged.
    """
    if not _is_llamas(module):
        return module
    known: Any = module

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda or x.dtype != known.weight.dtype:
            plain: torch.Tensor = known(x)
            return plain
        return rms_norm(x, known.weight, known.variance_epsilon)

    return forward


def _is_llamas(module: nn.Module) -> bool:
    """Return whether the module's `forward` has the same bytecode as that of `LlamaRMSNorm`."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours, theirs = (getattr(kind.forward, "__code__", None) for kind in (type(module), LlamaRMSNorm))
    if ours is None or theirs is None or not hasattr(module, "variance_epsilon"):
        return False
    return (ours.co_code, ours.co_names) == (theirs.co_code, theirs.co_names) and ours.co_consts == theirs.co_consts
