"""Policy "full": every layer attends to everything. Exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core import Selection, Visible
from .base import KeyReader, QuerySource
from .passive import PassiveState


class FullState(PassiveState):
    """Remembers nothing; no layer ever asks it."""

    def select(self, layer: int, q: torch.Tensor, visible: Visible) -> Selection:
        """Never asked: every layer is dense."""
        raise AssertionError(f"layer {layer} of policy 'full' is dense")

    def fork(self, keys: KeyReader) -> FullState:
        """There is nothing to copy."""
        return self


@dataclass(frozen=True)
class Full:
    """Every one of `layers` layers is dense; no window, so that nothing is held twice."""

    layers: int
    name: str = "full"
    query_source: QuerySource = "query"
    sinks: int = 0
    recent: int = 1
    wants_weights: bool = False
    evictable: bool = True
    wants_queries: bool = False
    lineage: str = "exact"
    rule: None = None

    @property
    def dense_layers(self) -> frozenset[int]:
        """All of them."""
        return frozenset(range(self.layers))

    def correct_guess(self, layer: int, attention_input: torch.Tensor) -> torch.Tensor:
        """Never asked: nothing selects."""
        return attention_input

    def new_state(self, keys: KeyReader) -> FullState:
        """A state without memory."""
        return FullState()
