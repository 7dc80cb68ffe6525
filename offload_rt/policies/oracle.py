"""Policy "oracle": the tokens with the largest weights of the true query (the paper's "Optimal").

It reads every key from the host pool, which is not counted as a transfer. It is an upper bound for other policies and
not meant for production.
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
    """State of policy "oracle", which reads keys from the pool instead of storing entries."""

    def on_keys(self, layer: int, k: torch.Tensor, start: int) -> None:
        """No-op, because keys are read from the pool."""

    def _stored(self, layer: int, pages: range) -> torch.Tensor:
        return self._keys(layer, pages).to(self._policy.device)


class Oracle(ScorerPolicy[BudgetOptions]):
    """Policy "oracle". It selects with the true query, sequence by sequence."""

    name = "oracle"
    evictable = True

    def __init__(
        self, options: BudgetOptions, geometry: ModelGeometry, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(options, geometry, device, dtype)
        self.rule = None

    @classmethod
    def entry_shape(cls, options: BudgetOptions, geometry: ModelGeometry, dtype: torch.dtype) -> EntryShape:
        """Return the shape of empty entries."""
        return EntryShape(0, dtype)

    def score(self, layer: int, queries: torch.Tensor, keys: TokenLists) -> torch.Tensor:
        """Score tokens by their largest softmax weight in any query head of the group."""
        return keys.group_ranks(capped(dot_scores(queries, keys.entries.transpose(1, 2)), self.geometry.softcap))

    def new_state(self, keys: KeyReader) -> OracleState:
        """Return a state that reads `keys`."""
        return OracleState(self, keys)
