"""A policy's budget: the share of the visible context that a sparse layer attends to, resident tokens included, so that
policies are compared at equal attended bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Generic, Self, TypeVar

import torch

from ..core import ModelGeometry, Visible
from ..errors import ConfigError
from ..kernels.selection import floor_share
from .demand import MemoryDemand
from .options import BudgetOptions
from .registry import PolicyContext, PolicyOptions


def budget_tokens(budget: float, visible: Visible) -> int:
    """n: candidates to select so that resident and selected tokens together are at most `budget` of the visible ones,
    rounded down. Residents are attended in any case: where they use up the budget, n is 0."""
    return max(0, min(len(visible.candidates), floor_share(budget, len(visible.all)) - visible.resident))


def dense_layers(named: Iterable[int], geometry: ModelGeometry) -> frozenset[int]:
    """The layers that attend to everything they see: those `named`, and all that slide, which see no more than their
    windows. Raises ConfigError where the model does not have one of the layers."""
    for layer in named:
        if layer >= geometry.layers:
            raise ConfigError(f"dense_layers names layer {layer}, but the model has layers 0 to {geometry.layers - 1}")
    return frozenset(named) | frozenset(geometry.sliding)


def lineage_digest(options: PolicyOptions) -> str:
    """The 16 hexadecimal digits that tell these options from all others (`PolicyOptions.lineage_text`)."""
    return hashlib.sha256(options.lineage_text().encode()).hexdigest()[:16]


Chosen = TypeVar("Chosen", bound=BudgetOptions)


class BudgetPolicy(Generic[Chosen]):
    """Base of the policies whose options are a `BudgetOptions`; a subclass has its own `name`, `query_source` and
    `new_state`."""

    name: str
    wants_weights = False
    evictable = False
    wants_queries = False
    rule = None
    dense_until = 0

    def __init__(self, options: Chosen, geometry: ModelGeometry) -> None:
        """Raises ConfigError where an option does not fit the model."""
        self.geometry = geometry
        self.budget = options.budget
        self.sinks, self.recent = options.sinks, options.recent
        self.dense_layers = dense_layers(options.dense_layers, geometry)
        self.lineage = f"{self.name}-{lineage_digest(options)}"

    @classmethod
    def build(cls, options: Chosen, context: PolicyContext) -> Self:
        """The policy for a model. Raises ConfigError where an option does not fit it."""
        return cls(options, context.geometry)

    @classmethod
    def memory_demand(cls, options: Chosen, geometry: ModelGeometry, dtype: torch.dtype) -> MemoryDemand:
        """A window, and the budget's share of the context in every layer that selects."""
        dense = tuple(sorted(dense_layers(options.dense_layers, geometry)))
        return MemoryDemand(dense, options.sinks + options.recent, options.budget)

    def correct_guess(self, layer: int, attention_input: torch.Tensor) -> torch.Tensor:
        """Returns the attention input `[T, D]` as it is: these policies correct nothing."""
        return attention_input
