"""Policy "streaming": sinks and a window, independent of the query (StreamingLLM's pattern, original positions)."""

from __future__ import annotations

import torch

from ..core import Selection, VisibleTokens
from .base import KeyReader, QuerySource
from .budget import BudgetPolicy, budget_tokens
from .options import BudgetOptions
from .passive import PassiveState


class StreamingState(PassiveState):
    """State of policy "streaming", which has no data."""

    def __init__(self, policy: Streaming) -> None:
        self._policy = policy

    def select(self, layer: int, q: torch.Tensor, visible: VisibleTokens) -> Selection:
        """Select the newest candidates, which extend the recent window to the size that the budget allows."""
        stop = visible.candidates.stop
        newest = torch.arange(stop - budget_tokens(self._policy.budget, visible), stop, device=q.device)
        return Selection(newest.expand(self._policy.geometry.kv_heads, -1).contiguous())

    def fork(self, keys: KeyReader) -> StreamingState:
        """Return this state, which is immutable."""
        return self


class Streaming(BudgetPolicy[BudgetOptions]):
    """Policy "streaming". It needs no query, so it selects as early as possible."""

    name = "streaming"
    query_source: QuerySource = "attention_input"

    def new_state(self, keys: KeyReader) -> StreamingState:
        """Return an empty state."""
        return StreamingState(self)
