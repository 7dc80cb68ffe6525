"""Policy "full": every layer attends to all tokens, so attention is exact."""

from __future__ import annotations

from typing import Self

import torch

from ..core import ModelGeometry, Selection, VisibleTokens
from .base import KeyReader, Policy, PolicyState
from .demand import MemoryDemand
from .options import FullOptions
from .registry import PolicyContext


class FullState(PolicyState):
    def select(self, layer: int, q: torch.Tensor, visible: VisibleTokens) -> Selection:
        raise AssertionError(f"layer {layer} of policy 'full' is dense")

    def fork(self, keys: KeyReader) -> FullState:
        return self


class Full(Policy):
    """Policy "full". It keeps no recent window on the device, because every step fetches all KV anyway."""

    name = "full"
    sinks = 0
    recent = 1
    evictable = True
    provenance_key = "exact"

    def __init__(self, layers: int) -> None:
        self.dense_layers = frozenset(range(layers))

    @classmethod
    def build(cls, options: FullOptions, context: PolicyContext) -> Self:
        return cls(context.geometry.layers)

    @staticmethod
    def memory_demand(options: FullOptions, geometry: ModelGeometry, dtype: torch.dtype) -> MemoryDemand:
        return MemoryDemand(dense=tuple(range(geometry.layers)), resident=1, fetched_fraction=0.0)

    def new_state(self, keys: KeyReader) -> FullState:
        return FullState()
