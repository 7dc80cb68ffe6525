"""Policy "streaming": attend to sinks and recent tokens, regardless of the query.

This is the attention pattern of StreamingLLM, except that tokens keep their original positions.
"""

from __future__ import annotations

import torch

from ..core import ModelGeometry
from .base import QuerySource
from .options import BudgetOptions
from .scorer import EntryShape, ScorerPolicy, TokenLists


class Streaming(ScorerPolicy[BudgetOptions]):
    """Policy "streaming". Scores do not depend on the query, so KV can be fetched before the query is known."""

    name = "streaming"
    query_source: QuerySource = "attention_input"

    @classmethod
    def entry_shape(cls, options: BudgetOptions, geometry: ModelGeometry, dtype: torch.dtype) -> EntryShape:
        return EntryShape(0, dtype)

    def entry(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        return k[:, :, :0]

    def score(self, layer: int, queries: torch.Tensor, keys: TokenLists) -> torch.Tensor:
        """Return the token indices as scores, so that the most recent candidates are selected."""
        return keys.tokens.float().expand(len(queries), -1)
