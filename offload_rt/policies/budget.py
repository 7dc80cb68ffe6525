"""Base of the policies with a budget.

The budget is the fraction of the visible context that a sparse layer attends to, resident tokens included. At equal
budgets, policies are compared at equal numbers of attended bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Generic, Self, TypeVar

import torch

from ..core import ModelGeometry
from ..errors import ConfigError
from .demand import MemoryDemand
from .options import BudgetOptions
from .registry import PolicyContext, PolicyOptions
from .rule import Rule


def dense_layers(named: Iterable[int], geometry: ModelGeometry) -> frozenset[int]:
    """Return the layers that attend to all visible tokens: those `named` and all sliding-window layers.

    Raises:
        ConfigError: If the model does not have one of the layers.
    """
    for layer in named:
        if layer >= geometry.layers:
            raise ConfigError(f"dense_layers names layer {layer}, but the model has layers 0 to {geometry.layers - 1}")
    return frozenset(named) | frozenset(geometry.sliding)


def provenance_digest(options: PolicyOptions) -> str:
    """Return a digest of the options (`PolicyOptions.provenance_text`): 16 hexadecimal digits."""
    return hashlib.sha256(options.provenance_text().encode()).hexdigest()[:16]


Chosen = TypeVar("Chosen", bound=BudgetOptions)


class BudgetPolicy(Generic[Chosen]):
    """Base of the policies with `BudgetOptions`. Subclasses define `name`, `query_source` and `new_state`."""

    name: str
    wants_weights = False
    evictable = False
    wants_queries = False
    rule: Rule | None = None
    dense_until = 0

    def __init__(self, options: Chosen, geometry: ModelGeometry) -> None:
        """Raises ConfigError if an option does not fit the model."""
        self.geometry = geometry
        self.budget = options.budget
        self.sinks, self.recent = options.sinks, options.recent
        self.dense_layers = dense_layers(options.dense_layers, geometry)
        self.provenance_key = f"{self.name}-{provenance_digest(options)}"

    @classmethod
    def build(cls, options: Chosen, context: PolicyContext) -> Self:
        """Build the policy for a model. Raises ConfigError if an option does not fit the model."""
        return cls(options, context.geometry)

    @classmethod
    def memory_demand(cls, options: Chosen, geometry: ModelGeometry, dtype: torch.dtype) -> MemoryDemand:
        """Return the demand: sinks, window, and the budget of every sparse layer."""
        dense = tuple(sorted(dense_layers(options.dense_layers, geometry)))
        return MemoryDemand(dense, options.sinks + options.recent, options.budget)

    def correct_guess(self, layer: int, attention_input: torch.Tensor) -> torch.Tensor:
        """Return `attention_input` `[T, D]` unchanged."""
        return attention_input
