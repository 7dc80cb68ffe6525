"""One decoder layer without its attention: norms, MLP and residual stream.

The structure is recognised by the names of the layer's modules. A model with unused weights is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from ..kernels.dispatch import rms_norm
from .projections import first_of, refuse_unused
from .weights import ATTENTION

_MLP = ("mlp", "block_sparse_moe", "feed_forward")


@dataclass(frozen=True)
class Norms:
    """Names of a layer's norms before and after attention and MLP, each None if there is none.

    If `parallel` is set, the MLP reads the layer's input instead of the residual stream after attention. Without a norm
    of its own, it uses the norm of the attention's input.
    """

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None
    parallel: bool = False


_PLACEMENTS = (
    # Llama and most others; Apertus; VaultGemma
    Norms("input_layernorm", None, "post_attention_layernorm", None),
    Norms("attention_layernorm", None, "feedforward_layernorm", None),
    Norms("input_layernorm", None, "pre_feedforward_layernorm", None),
    # Gemma 2 and 3
    Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    # GLM-4
    Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    # OLMo 2 and 3
    Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    # Cohere, Phi, Falcon-7B
    Norms("input_layernorm", None, None, None, parallel=True),
    # Falcon-40B
    Norms("ln_attn", None, "ln_mlp", None, parallel=True),
)
"""Known norm placements, distinguished by the set of norm names."""


class DecoderLayer:
    """The computation of one layer before and after its attention."""

    def __init__(self, module: Any) -> None:
        """Raise ModelError if the layer's norms match no placement, or a module with weights is unused."""
        self.attention = first_of(module, ATTENTION)
        self._mlp = first_of(module, _MLP)
        own = {name for name, child in module.named_children() if child in (self.attention, self._mlp)}
        present = {name for name, child in module.named_children() if "norm" in name or name.startswith("ln_")}
        norms = next((n for n in _PLACEMENTS if present == _names(n)), None)
        if norms is None:
            raise ModelError(
                f"{type(module).__name__} has the norms {', '.join(sorted(present))}, whose placement is unknown",
                reason="norms",
            )
        refuse_unused(module, own | present)
        self._before_attention, self._after_attention, self._before_mlp, self._after_mlp = (
            fused_norm(getattr(module, name)) if name else nn.Identity()
            for name in (norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp)
        )
        self._parallel = norms.parallel or bool(getattr(module, "use_parallel_residual", False))
        if self._parallel and norms.before_mlp is None:
            self._before_mlp = self._before_attention
        self._multiplier = float(getattr(module, "residual_multiplier", 1.0))
        self.of_experts = hasattr(self._mlp, "experts")

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input `[T, D]` of the q, k and v projections, from the layer's input `[T, D]`."""
        normed: torch.Tensor = self._before_attention(hidden)
        return normed

    def after_attention(self, hidden: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """Return the residual stream `[T, D]` from the layer's input and its projected attention, both `[T, D]`.

        If attention and MLP run in parallel, the MLP is already included.
        """
        residual = hidden + self._scaled(self._after_attention(projected))
        return residual + self._run_mlp(hidden) if self._parallel else residual

    def mlp(self, residual: torch.Tensor) -> torch.Tensor:
        """Return the layer's output `[T, D]` from the residual stream after its attention."""
        return residual if self._parallel else residual + self._run_mlp(residual)

    def _run_mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Return the MLP's contribution to the residual stream, `[T, D]`."""
        normed = self._before_mlp(x)
        if not self.of_experts:
            return self._scaled(self._after_mlp(self._mlp(normed)))
        out = self._mlp(normed[None])  # a mixture of experts takes [1, T, D] and may also return router scores
        return self._scaled(self._after_mlp((out[0] if isinstance(out, tuple) else out).view_as(x)))

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._multiplier == 1 else x * self._multiplier


def _names(norms: Norms) -> set[str]:
    names = (norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp)
    return {name for name in names if name}


def fused_norm(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that computes a norm, `[T, D]` to `[T, D]`, in one kernel on a CUDA device if possible.

    Only copies of `LlamaRMSNorm`, which most models contain, are fused. Other modules are returned unchanged.
    """
    if not _is_llama_norm(module):
        return module
    known: Any = module

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda or x.dtype != known.weight.dtype:
            plain: torch.Tensor = known(x)
            return plain
        return rms_norm(x, known.weight, known.variance_epsilon)

    return forward


def _is_llama_norm(module: nn.Module) -> bool:
    """Return whether the module's `forward` has the same bytecode as that of `LlamaRMSNorm`."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours, theirs = (getattr(kind.forward, "__code__", None) for kind in (type(module), LlamaRMSNorm))
    if ours is None or theirs is None or not hasattr(module, "variance_epsilon"):
        return False
    return (ours.co_code, ours.co_names) == (theirs.co_code, theirs.co_names) and ours.co_consts == theirs.co_consts
