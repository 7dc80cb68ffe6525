"""Policy "h2o": keep recent tokens and *heavy hitters*, the tokens with the most accumulated attention (H2O).

A token that has been dropped is never selected again. As in the paper's local policy, only queries up to the current
step contribute to a token's accumulated attention.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ..core import ModelGeometry
from ..kernels.reference import capped
from .base import QuerySource
from .demand import MemoryDemand
from .options import BudgetOptions
from .scorer import EntryShape, ScorerPolicy, TokenLists

MAX_PREFILL_WEIGHTS = 1 << 22
"""Maximum number of attention weights of a prompt that are computed at a time, to limit temporary memory."""

NEWEST = 1e30
"""Score of the most recent candidates. It is larger than any accumulated attention."""


class H2O(ScorerPolicy[BudgetOptions]):
    """Policy "h2o". Scores do not depend on the query, so KV can be fetched before the query is known.

    The entry of a token is its accumulated attention, summed over the query heads of a KV head. For a dropped token, it
    is -inf.
    """

    name = "h2o"
    query_source: QuerySource = "attention_input"
    wants_weights = True
    wants_queries = True
    can_exclude = True

    @classmethod
    def entry_shape(cls, options: BudgetOptions, geometry: ModelGeometry, dtype: torch.dtype) -> EntryShape:
        return EntryShape(1, torch.float32)

    @classmethod
    def memory_demand(cls, options: BudgetOptions, geometry: ModelGeometry, dtype: torch.dtype) -> MemoryDemand:
        return replace(super().memory_demand(options, geometry, dtype), max_prefill_weights=MAX_PREFILL_WEIGHTS)

    def entry(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        return k.new_zeros(*k.shape[:2], 1)

    def score(self, layer: int, queries: torch.Tensor, keys: TokenLists) -> torch.Tensor:
        """Return the accumulated attention of each token.

        Half of the budget, including the recent window, is reserved for the most recent tokens. Candidates among these
        tokens get the score `NEWEST`.
        """
        half = (keys.contexts.double() * (self.budget / 2) + 1e-9).floor()
        recent = (half - (keys.contexts - keys.stops)).clamp(min=0).minimum(keys.limits.double())
        return keys.entries.squeeze(2).masked_fill(keys.tokens >= keys.stops - recent, NEWEST)

    def on_queries(self, layer: int, q: torch.Tensor, k: torch.Tensor, start: int, entries: torch.Tensor) -> None:
        stop = start + q.shape[1]
        for head, row in enumerate(entries[:, :, 0]):
            queries = q.view(len(entries), -1, *q.shape[1:])[head]
            size = max(1, MAX_PREFILL_WEIGHTS // (stop * len(queries)))
            for begin in range(start, stop, size):
                end = min(stop, begin + size)
                part = queries[:, begin - start : end - start]
                row[:end] += self._causal_weights(layer, part, k[head, :end], begin)

    def _causal_weights(self, layer: int, q: torch.Tensor, k: torch.Tensor, start: int) -> torch.Tensor:
        """Return the causal attention weights `[n]` of the keys k `[n, d]`, summed over the queries q `[G, m, d]`.

        The first of the m queries belongs to token `start`.
        """
        geometry = self.geometry
        compute = torch.promote_types(q.dtype, torch.float32)
        scores = capped((q.to(compute) * geometry.scales[layer]) @ k.to(compute).T, geometry.softcap)
        token = torch.arange(len(k), device=k.device)
        distance = torch.arange(start, start + q.shape[1], device=k.device).unsqueeze(1) - token
        return scores.masked_fill_(distance < 0, -math.inf).softmax(-1).sum((0, 1))

    def on_attended(self, layer: int, keys: TokenLists, weights: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Add the attention weights to the entries, and drop all candidates that were not attended to."""
        received = keys.entries.squeeze(2) + weights
        return received.masked_fill(keys.inside & ~attended, -math.inf).unsqueeze(2)
