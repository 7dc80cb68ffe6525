"""Policy "h2o": recent tokens and heavy hitters, the tokens with the most accumulated attention (H2O).

A dropped token is never selected again. Unlike the publication, the policy is causal: queries after the moment of
dropping have no influence.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Self

import torch

from ..core import ModelGeometry, Selection, VisibleTokens
from ..kernels.reference import capped
from ..kernels.selection import floor_share, top_tokens
from .base import KeyReader, QuerySource
from .budget import BudgetPolicy, budget_tokens
from .demand import MemoryDemand
from .growing import LayerTensors
from .options import BudgetOptions
from .passive import PassiveState
from .registry import PolicyContext

WEIGHED_AT_ONCE = 1 << 22
"""Number of attention weights of a prompt computed at a time."""


class H2OState(PassiveState):
    """Accumulated attention of each token, float32 `[Hkv, capacity]` per layer.

    Weights are summed over queries and over the query heads of a KV head. Dropped tokens have -inf.
    """

    def __init__(self, policy: H2O) -> None:
        self._policy = policy
        self._drawn = LayerTensors(1, torch.float32, policy.device)

    @property
    def device_bytes(self) -> int:
        """Bytes of the accumulated attention."""
        return self._drawn.nbytes

    def on_queries(self, layer: int, q: torch.Tensor, k: torch.Tensor, start: int) -> None:
        """Add the causal attention of queries q `[H, m, d]` of tokens [start, start + m) to keys k `[Hkv, n, d]`."""
        if layer in self._policy.dense_layers:
            return
        stop = start + q.shape[1]
        drawn = self._room(layer, stop)
        for head, row in enumerate(drawn):
            queries = q.view(len(drawn), -1, *q.shape[1:])[head]
            size = max(1, WEIGHED_AT_ONCE // (stop * len(queries)))
            for begin in range(start, stop, size):
                end = min(stop, begin + size)
                part = queries[:, begin - start : end - start]
                row[:end] += self._causal_weights(layer, part, k[head, :end], begin)

    def _causal_weights(self, layer: int, q: torch.Tensor, k: torch.Tensor, start: int) -> torch.Tensor:
        """Return attention weights `[n]` of keys k `[n, d]`, summed over queries q `[G, m, d]` of tokens >= `start`."""
        geometry = self._policy.geometry
        compute = torch.promote_types(q.dtype, torch.float32)
        scores = capped((q.to(compute) * geometry.scales[layer]) @ k.to(compute).T, geometry.softcap)
        token = torch.arange(len(k), device=k.device)
        ago = torch.arange(start, start + q.shape[1], device=k.device).unsqueeze(1) - token
        return scores.masked_fill_(ago < 0, -math.inf).softmax(-1).sum((0, 1))

    def on_keys(self, layer: int, k: torch.Tensor, start: int) -> None:
        """Allocate entries for tokens [start, start + m). The attention of a prompt has been added already."""
        if layer not in self._policy.dense_layers:
            self._room(layer, start + k.shape[1])

    def _room(self, layer: int, length: int) -> torch.Tensor:
        """Return the accumulated attention `[Hkv, length]` for writing, with 0 for new tokens."""
        self._drawn.open(layer, self._policy.geometry.kv_heads, 0)
        known = self._drawn.length(layer)
        drawn = self._drawn.reserve(layer, length)
        drawn[:, known:length] = 0
        return drawn[:, : max(known, length)]

    def select(self, layer: int, q: torch.Tensor, visible: VisibleTokens) -> Selection:
        """Select the newest tokens for half of the budget and heavy hitters for the rest. Drop other candidates."""
        candidates = visible.candidates
        half = floor_share(self._policy.budget / 2, len(visible.all))
        n = budget_tokens(self._policy.budget, visible)
        local = min(n, max(0, half - len(visible.recent)))
        drawn = self._room(layer, candidates.stop)[:, candidates.start : candidates.stop]
        values = drawn.clone()
        values[:, len(candidates) - local :] = math.inf
        n = min(n, int((values > -math.inf).sum(1).min()) if candidates else 0)
        tokens = top_tokens(values, n)
        drawn.copy_(torch.full_like(drawn, -math.inf).scatter_(1, tokens, drawn.gather(1, tokens)))
        return Selection(tokens + candidates.start)

    def on_attended(self, layer: int, tokens: torch.Tensor, weights: torch.Tensor) -> None:
        """Add the weights `[Hkv, n]` of `tokens` `[Hkv, n]`."""
        drawn = self._room(layer, self._drawn.length(layer))
        drawn.scatter_add_(1, tokens, weights.to(drawn.dtype))

    def fork(self, keys: KeyReader) -> H2OState:
        """Return a copy that shares the accumulated attention until either side writes."""
        twin = H2OState(self._policy)
        twin._drawn = self._drawn.fork()
        return twin

    def check_integrity(self) -> None:
        """Assert that accumulated attention is not negative, except for dropped tokens."""
        self._drawn.check_integrity()
        for layer in self._drawn.layers:
            known = self._drawn.data(layer)[:, : self._drawn.length(layer)]
            assert bool(((known >= 0) | (known == -math.inf)).all())


class H2O(BudgetPolicy[BudgetOptions]):
    """Policy "h2o". It needs no query, so it selects as early as possible, and observes the attention of each step."""

    name = "h2o"
    query_source: QuerySource = "attention_input"
    wants_weights = True
    wants_queries = True

    def __init__(self, options: BudgetOptions, geometry: ModelGeometry, device: torch.device) -> None:
        super().__init__(options, geometry)
        self.device = device

    @classmethod
    def build(cls, options: BudgetOptions, context: PolicyContext) -> Self:
        """Build the policy for a model. Raises ConfigError if an option does not fit the model."""
        return cls(options, context.geometry, context.device)

    @classmethod
    def memory_demand(cls, options: BudgetOptions, geometry: ModelGeometry, dtype: torch.dtype) -> MemoryDemand:
        """Return the demand: a float32 per token and KV head, and the attention weights of a prompt."""
        keys = float(torch.float32.itemsize * geometry.kv_heads)
        window = super().memory_demand(options, geometry, dtype)
        return replace(window, key_bytes=keys, weights_at_once=WEIGHED_AT_ONCE)

    def new_state(self, keys: KeyReader) -> H2OState:
        """Return an empty state. `keys` is not used."""
        return H2OState(self)
