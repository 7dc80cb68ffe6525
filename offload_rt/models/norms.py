"""Norms that a device computes in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..kernels.dispatch import rms_norm


def fused(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A norm's forward, x `[T, D]` to `[T, D]`; on a CUDA device one kernel, if it is the norm that `rms_norm` defines:
    that of Llama, by its code, which most models have a copy of."""
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
    """Whether the module's code is that of Llama's norm."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours, theirs = (getattr(kind.forward, "__code__", None) for kind in (type(module), LlamaRMSNorm))
    if ours is None or theirs is None or not hasattr(module, "variance_epsilon"):
        return False
    return (ours.co_code, ours.co_names) == (theirs.co_code, theirs.co_names) and ours.co_consts == theirs.co_consts
