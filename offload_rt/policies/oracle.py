"""Policy "oracle": the tokens that the true query weighs most (the paper's "Optimal"). It reads every key where it
lies, which is not counted as link traffic: a bound for the others, not a way to run."""

from __future__ import annotations

import torch

from ..core import Selection, Visible
from ..kernels.reference import capped
from ..kernels.selection import dot_scores, group_lse, group_scores, top_tokens
from .base import KeyReader, QuerySource
from .budget import BudgetPolicy, budget_tokens
from .options import BudgetOptions
from .passive import PassiveState


class OracleState(PassiveState):
    """Remembers nothing but where the keys are."""

    def __init__(self, policy: Oracle, keys: KeyReader) -> None:
        self._policy, self._keys = policy, keys

    def select(self, layer: int, q: torch.Tensor, visible: Visible) -> Selection:
        """Each KV head's candidates with the largest softmax of true scores, the largest over its query heads, as many
        as the budget leaves."""
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
        """The same, over the fork's keys."""
        return OracleState(self._policy, keys)


class Oracle(BudgetPolicy[BudgetOptions]):
    """Selects with the true query."""

    name = "oracle"
    evictable = True
    query_source: QuerySource = "query"

    def new_state(self, keys: KeyReader) -> OracleState:
        """A state that reads `keys`."""
        return OracleState(self, keys)
