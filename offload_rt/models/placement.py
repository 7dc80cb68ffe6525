"""What of a model's weights may stay in host memory by itself: the experts of a mixture, the embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Placement:
    """What of a model's weights stays in host memory.

    layers: decoder layers, whose weights cross the link for every pass.
    experts: so many experts of each layer are on the device, those used last; the others cross the link when a token's
        router chooses them. None: all are on the device.
    embedding: the embedding is looked up in host memory, and only rows cross the link.
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
    """`count` experts in each layer that has any, `chosen` of them by each token. Bytes in every layer, 0 where it has
    none: `each` of one expert, `whole` of all as they lie in the layer."""

    count: int
    chosen: int
    each: tuple[int, ...]
    whole: tuple[int, ...]


def chosen_by_a_token(layer: nn.Module) -> int:
    """How many experts of a decoder layer each token chooses; 1 where there are none."""
    return max((k for module in layer.modules() if isinstance(k := getattr(module, "top_k", None), int)), default=1)


def experts_of(layer: nn.Module) -> Any:
    """The module with the experts of a decoder layer as transformers stacks them (`use_experts_implementation`, called
    with hidden states, choices and their weights): `num_experts` of them, every parameter `[num_experts, ...]`. None
    where the layer has no such module."""
    for name, module in layer.named_modules():
        count, weights = getattr(module, "num_experts", None), list(module.parameters())
        own = len(list(module.parameters(recurse=False)))
        stacked = own == len(weights) > 0 and all(len(weight) == count for weight in weights)
        if name.rpartition(".")[2] == "experts" and stacked and hasattr(module, "has_gate"):
            return module
    return None


def lone_embedding(model: Any) -> nn.Module | None:
    """The embedding of token ids, where the head is another matrix; None where it is the same one (a tied head), which
    every token reads whole."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return None if head is None or head.weight is embedding.weight else embedding
