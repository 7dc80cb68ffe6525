"""One layer of a decoder around its attention: where its norms stand, whether its MLP runs beside the attention, and
how both join the residual stream. All of it is read off the layer's modules by their names.

Every module of the layer that has weights is used, or the model is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from .norms import fused
from .projections import first_of, refuse_unused

ATTENTION = ("self_attn", "attention", "self_attention", "attn")
_MLP = ("mlp", "block_sparse_moe", "feed_forward")


@dataclass(frozen=True)
class Norms:
    """Names of a layer's norms: of the attention's input and output, of the MLP's input and output. None: there is
    none. parallel: the MLP reads the layer's input, not the residual stream behind the attention; without a norm of its
    own it reads what the attention reads."""

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
"""Told apart by which norms there are."""


class DecoderLayer:
    """What one layer does before and after its attention."""

    def __init__(self, module: Any) -> None:
        """Raises ModelError where the layer has a norm, or another module with weights, that is in no placement."""
        self.attention = first_of(module, ATTENTION)
        self._mlp = first_of(module, _MLP)
        own = {name for name, child in module.named_children() if child in (self.attention, self._mlp)}
        present = {name for name, child in module.named_children() if "norm" in name or name.startswith("ln_")}
        norms = next((n for n in _PLACEMENTS if present == _names(n)), None)
        if norms is None:
            raise ModelError(
                f"{type(module).__name__} has the norms {', '.join(sorted(present))}: how they are placed is not known",
                reason="norms",
            )
        refuse_unused(module, own | present)
        self._before_attention, self._after_attention, self._before_mlp, self._after_mlp = (
            fused(getattr(module, name)) if name else nn.Identity()
            for name in (norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp)
        )
        self._parallel = norms.parallel or bool(getattr(module, "use_parallel_residual", False))
        if self._parallel and norms.before_mlp is None:
            self._before_mlp = self._before_attention
        self._multiplier = float(getattr(module, "residual_multiplier", 1.0))
        self.of_experts = hasattr(self._mlp, "experts")

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """What is projected to q, k and v, `[T, D]`, of the layer's input `[T, D]`."""
        normed: torch.Tensor = self._before_attention(hidden)
        return normed

    def after_attention(self, hidden: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """The residual stream `[T, D]` from the layer's input and its projected attention, both `[T, D]`. Where the
        MLP runs beside the attention, it is in it already."""
        residual = hidden + self._scaled(self._after_attention(projected))
        return residual + self._run_mlp(hidden) if self._parallel else residual

    def mlp(self, residual: torch.Tensor) -> torch.Tensor:
        """The layer's output `[T, D]` from the residual stream behind its attention."""
        return residual if self._parallel else residual + self._run_mlp(residual)

    def _run_mlp(self, x: torch.Tensor) -> torch.Tensor:
        """What the MLP adds to the residual stream, `[T, D]`. A mixture of experts takes `[1, T, D]`, and may give the
        router's scores too."""
        normed = self._before_mlp(x)
        if not self.of_experts:
            return self._scaled(self._after_mlp(self._mlp(normed)))
        out = self._mlp(normed[None])
        return self._scaled(self._after_mlp((out[0] if isinstance(out, tuple) else out).view_as(x)))

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._multiplier == 1 else x * self._multiplier


def _names(norms: Norms) -> set[str]:
    names = (norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp)
    return {name for name in names if name}
