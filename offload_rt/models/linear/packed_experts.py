"""Stacked experts that are computed from packed weights (gpt-oss)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...kernels.packed_format import PackedFormat
from .packed import packed_linear

PROJECTIONS = ("gate_up_proj", "down_proj")
"""Parameters `[experts, in, out]` of stacked experts that can be packed."""


class PackedStack(nn.Module):
    """The packed weights of a projection of all experts: `packed`, uint8 `[experts, out, form.row_bytes]`."""

    def __init__(self, form: PackedFormat, packed: torch.Tensor) -> None:
        super().__init__()
        self.form, self.packed = form, nn.Parameter(packed, requires_grad=False)

    def product(self, x: torch.Tensor, expert: int, bias: torch.Tensor) -> torch.Tensor:
        """Return x `[n, in]` times the weight of an expert plus `bias[expert]`, `[n, out]`."""
        return packed_linear(x, self.packed[expert], self.form, bias[expert])


class PackedExperts(nn.Module):
    """Experts of gpt-oss with packed projections. Existing modules get a subclass of this class in place."""

    gate_up_proj: PackedStack
    down_proj: PackedStack
    gate_up_proj_bias: nn.Parameter
    down_proj_bias: nn.Parameter

    def forward(
        self, hidden_states: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the experts' outputs `[T, D]`, as transformers' loop over experts does.

        Args:
            hidden_states: `[T, D]`.
            router_indices: Chosen experts `[T, k]`.
            routing_weights: Their weights `[T, k]`.
        """
        own: Any = self
        out = torch.zeros_like(hidden_states)
        for expert in router_indices.unique().tolist():
            tokens, place = torch.where(router_indices == expert)
            gate_up = self.gate_up_proj.product(hidden_states[tokens], expert, self.gate_up_proj_bias)
            result = self.down_proj.product(own._apply_gate(gate_up), expert, self.down_proj_bias)
            out.index_add_(0, tokens, (result * routing_weights[tokens, place, None]).to(out.dtype))
        return out


def is_stacked(module: nn.Module, name: str) -> bool:
    """Return whether `name` is a parameter of stacked experts that `hold_packed_stack` supports."""
    weight = module._parameters.get(name)
    return name in PROJECTIONS and weight is not None and weight.dim() == 3 and hasattr(module, "_apply_gate")


def hold_packed_stack(experts: nn.Module, name: str, form: PackedFormat) -> None:
    """Replace a projection of stacked experts by uninitialised packed weights, in place."""
    weight: torch.Tensor = getattr(experts, name)
    packed = weight.new_empty((weight.shape[0], weight.shape[2], form.row_bytes), dtype=torch.uint8)
    delattr(experts, name)
    setattr(experts, name, PackedStack(form, packed))
    kind = type(experts)
    if not issubclass(kind, PackedExperts):
        experts.__class__ = type(kind.__name__, (PackedExperts, kind), {})
