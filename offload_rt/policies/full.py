"""Policy "full": every layer attends to everything. Exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from ..core import ModelGeometry, Selection, Visible
from .base import KeyReader, QuerySource
from .demand import MemoryDemand
from .options import FullOptions
from .passive import PassiveState
from .registry import PolicyContext


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
    dense_until: int = 0

    @classmethod
    def build(cls, options: FullOptions, context: PolicyContext) -> Self:
        """The policy for a model of so many layers."""
        return cls(context.geometry.layers)

    @staticmethod
    def memory_demand(options: FullOptions, geometry: ModelGeometry, dtype: torch.dtype) -> MemoryDemand:
        """Every layer fetches the whole context; only the newest token is resident."""
        return MemoryDemand(dense=tuple(range(geometry.layers)), resident=1, share=0.0)

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
