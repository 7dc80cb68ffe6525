"""A policy's budget: the share of the visible context that a sparse layer attends to, resident tokens included, so that
policies are compared at equal attended bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from ..config import BudgetOptions
from ..core import ModelGeometry, Visible
from ..errors import ConfigError
from ..kernels.selection import floor_share


def budget_tokens(budget: float, visible: Visible) -> int:
    """n: candidates to select so that resident and selected tokens together are at most `budget` of the visible ones,
    rounded down. Residents are attended in any case: where they use up the budget, n is 0."""
    return max(0, min(len(visible.candidates), floor_share(budget, len(visible.all)) - visible.resident))


def check_dense_layers(dense_layers: Iterable[int], geometry: ModelGeometry) -> None:
    """Raises ConfigError where the model does not have one of the layers."""
    for layer in dense_layers:
        if layer >= geometry.layers:
            raise ConfigError(f"dense_layers names layer {layer}, but the model has layers 0 to {geometry.layers - 1}")


class BudgetPolicy:
    """What the policies that are options and a budget have in common (see `base.Policy`); the rest is each one's."""

    name: str
    wants_weights = False
    evictable = False
    wants_queries = False
    rule = None

    def __init__(self, options: BudgetOptions, geometry: ModelGeometry) -> None:
        """Raises ConfigError where an option does not fit the model."""
        check_dense_layers(options.dense_layers, geometry)
        self.geometry = geometry
        self.budget = options.budget
        self.sinks, self.recent = options.sinks, options.recent
        self.dense_layers = frozenset(options.dense_layers)
        self.lineage = f"{self.name}-{hashlib.sha256(repr(options).encode()).hexdigest()[:16]}"

    def correct_guess(self, layer: int, attention_input: torch.Tensor) -> torch.Tensor:
        """As it is, `[T, D]`."""
        return attention_input
