"""Policy "streaming": sinks and a window, independent of the query (StreamingLLM's pattern, original positions)."""

from __future__ import annotations

import torch

from ..core import ModelGeometry
from .base import QuerySource
from .options import BudgetOptions
from .scorer import EntryShape, ScorerPolicy, TokenLists


class Streaming(ScorerPolicy[BudgetOptions]):
    """Policy "streaming". It needs no query, so it selects as early as possible."""

    name = "streaming"
    query_source: QuerySource = "attention_input"

    @classmethod
    def entry_shape(cls, options: BudgetOptions, geometry: ModelGeometry, dtype: torch.dtype) -> EntryShape:
        """Return the shape of empty entries."""
        return EntryShape(0, dtype)

    def entry(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """Return empty entries."""
        return k[:, :, :0]

    def score(self, layer: int, queries: torch.Tensor, keys: TokenLists) -> torch.Tensor:
        """Score tokens by position, so that the newest candidates extend the recent window."""
        return keys.tokens.float().expand(len(queries), -1)
