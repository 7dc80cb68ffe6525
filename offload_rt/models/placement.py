"""Placement of weights in host memory: decoder layers, experts, embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Placement:
    """Weights that stay in host memory.

    Attributes:
        layers: Decoder layers whose weights are copied to the device in every pass.
        experts: Number of most recently used experts per layer on the device. Others are copied when the router chooses
            them. None: all experts are on the device.
        embedding: Look up the embedding in host memory, and copy only the results to the device.
    """

    layers: tuple[int, ...] = ()
    experts: int | None = None
    embedding: bool = False

    def __bool__(self) -> bool:
        return bool(self.layers or self.embedding or self.experts is not None)


ON_DEVICE = Placement()
"""Nothing stays in host memory."""


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of the experts of a model.

    Attributes:
        count: Experts in each layer that has any.
        chosen: Experts per token.
        each: Bytes of one expert, per layer; 0 if the layer has none.
        whole: Aligned bytes of all experts, per layer; 0 if the layer has none.
    """

    count: int
    chosen: int
    each: tuple[int, ...]
    whole: tuple[int, ...]


def chosen_by_a_token(layer: nn.Module) -> int:
    """Return the number of experts per token of a decoder layer, or 1 if it has none."""
    return max((k for module in layer.modules() if isinstance(k := getattr(module, "top_k", None), int)), default=1)


def experts_of(layer: nn.Module) -> Any:
    """Return the module with the stacked experts of a decoder layer, or None if there is none.

    Each of its parameters is `[num_experts, ...]`, as transformers stacks them for `use_experts_implementation`.
    """
    for name, module in layer.named_modules():
        count, weights = getattr(module, "num_experts", None), list(module.parameters())
        own = len(list(module.parameters(recurse=False)))
        stacked = own == len(weights) > 0 and all(len(weight) == count for weight in weights)
        if name.rpartition(".")[2] == "experts" and stacked and hasattr(module, "has_gate"):
            return module
    return None


def lone_embedding(model: Any) -> nn.Module | None:
    """Return the token embedding, or None if the head shares its weight.

    Every token reads the whole matrix of a tied head, so it must stay on the device.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return None if head is None or head.weight is embedding.weight else embedding
