"""Policy "oracle": the tokens with the largest weights of the true query (the paper's "Optimal").

It reads every key from the host pool, which is not counted as a transfer. It is an upper bound for other policies and
not meant for production.
"""

from __future__ import annotations

import torch

from ..core import Selection, VisibleTokens
from ..kernels.reference import capped
from ..kernels.selection import dot_scores, group_lse, group_scores, top_tokens
from .base import KeyReader, QuerySource
from .budget import BudgetPolicy, budget_tokens
from .options import BudgetOptions
from .passive import PassiveState


class OracleState(PassiveState):
    """State of policy "oracle": a reader of the keys."""

    def __init__(self, policy: Oracle, keys: KeyReader) -> None:
        self._policy, self._keys = policy, keys

    def select(self, layer: int, q: torch.Tensor, visible: VisibleTokens) -> Selection:
        """Select the candidates of each KV head with the largest softmax weight in any of its query heads."""
        geometry, candidates = self._policy.geometry, visible.candidates
        n = budget_tokens(self._policy.budget, visible)
        if n == 0:
            return Selection(torch.empty(geometry.kv_heads, 0, dtype=torch.int64, device=q.device))
        compute = torch.promote_types(q.dtype, torch.float32)
        keys = self._keys(layer, candidates).to(q.device).transpose(1, 2)
        query = q.to(compute).view(geometry.kv_heads, geometry.group, -1) * geometry.scales[layer]
        scores = capped(dot_scores(query, keys), geometry.softcap)
        return Selection(top_tokens(group_scores(scores, group_lse(scores)), n) + candidates.start)

    def fork(self, keys: KeyReader) -> OracleState:
        """Return a state that reads the keys of the fork."""
        return OracleState(self._policy, keys)


class Oracle(BudgetPolicy[BudgetOptions]):
    """Policy "oracle". It selects with the true query."""

    name = "oracle"
    evictable = True
    query_source: QuerySource = "query"

    def new_state(self, keys: KeyReader) -> OracleState:
        """Return a state that reads `keys`."""
        return OracleState(self, keys)
