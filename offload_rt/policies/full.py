"""Policy "full": every layer attends to all tokens, so attention is exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from ..core import ModelGeometry, Selection, VisibleTokens
from .base import KeyReader, PolicyState, QuerySource
from .demand import MemoryDemand
from .options import FullOptions
from .registry import PolicyContext


class FullState(PolicyState):
    def select(self, layer: int, q: torch.Tensor, visible: VisibleTokens) -> Selection:
        raise AssertionError(f"layer {layer} of policy 'full' is dense")

    def fork(self, keys: KeyReader) -> FullState:
        return self


@dataclass(frozen=True)
class Full:
    """Policy "full". It keeps no recent window on the device, because every step fetches all KV anyway."""

    layers: int
    name: str = "full"
    query_source: QuerySource = "query"
    sinks: int = 0
    recent: int = 1
    wants_weights: bool = False
    evictable: bool = True
    wants_queries: bool = False
    provenance_key: str = "exact"
    rule: None = None
    dense_until: int = 0

    @classmethod
    def build(cls, options: FullOptions, context: PolicyContext) -> Self:
        return cls(context.geometry.layers)

    @staticmethod
    def memory_demand(options: FullOptions, geometry: ModelGeometry, dtype: torch.dtype) -> MemoryDemand:
        return MemoryDemand(dense=tuple(range(geometry.layers)), resident=1, fetched_fraction=0.0)

    @property
    def dense_layers(self) -> frozenset[int]:
        return frozenset(range(self.layers))

    def correct_prediction(self, layer: int, attention_input: torch.Tensor) -> torch.Tensor:
        return attention_input

    def new_state(self, keys: KeyReader) -> FullState:
        return FullState()
