"""Policy "oracle": select the tokens with the largest attention weights of the true query (the paper's "Optimal").

It is an upper bound on the quality of other policies and not meant for production, because it reads every key from the
host pool without counting these transfers.
"""

from __future__ import annotations

import torch

from ..core import ModelGeometry
from ..kernels.reference import capped
from ..kernels.selection import dot_scores
from .base import KeyReader
from .options import BudgetOptions
from .scorer import EntryShape, ScorerPolicy, ScorerState, TokenLists


class OracleState(ScorerState):
    def on_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None: ...

    def _entries_of_pages(self, layer: int, pages: range) -> torch.Tensor:
        return self._keys(layer, pages).to(self._policy.device)


class Oracle(ScorerPolicy[BudgetOptions]):
    """Policy "oracle". Tokens are selected for each sequence separately."""

    name = "oracle"
    evictable = True

    def __init__(
        self, options: BudgetOptions, geometry: ModelGeometry, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(options, geometry, device, dtype)
        self.rule = None

    @classmethod
    def entry_shape(cls, options: BudgetOptions, geometry: ModelGeometry, dtype: torch.dtype) -> EntryShape:
        return EntryShape(0, dtype)

    def score(self, layer: int, queries: torch.Tensor, keys: TokenLists) -> torch.Tensor:
        """Score each token by its largest softmax weight over the query heads that share the KV head."""
        return keys.combine_heads(capped(dot_scores(queries, keys.entries.transpose(1, 2)), self.geometry.softcap))

    def new_state(self, keys: KeyReader) -> OracleState:
        return OracleState(self, keys)
