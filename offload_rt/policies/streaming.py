"""Policy "streaming": sinks and a window, whatever the query (StreamingLLM's attention pattern; positions are kept)."""

from __future__ import annotations

import torch

from ..core import Selection, Visible
from .base import KeyReader, QuerySource
from .budget import BudgetPolicy, budget_tokens
from .options import BudgetOptions
from .passive import PassiveState


class StreamingState(PassiveState):
    """Remembers nothing."""

    def __init__(self, policy: Streaming) -> None:
        self._policy = policy

    def select(self, layer: int, q: torch.Tensor, visible: Visible) -> Selection:
        """The newest candidates: with the resident ones they are the sinks and one window, sized by the budget."""
        stop = visible.candidates.stop
        newest = torch.arange(stop - budget_tokens(self._policy.budget, visible), stop, device=q.device)
        return Selection(newest.expand(self._policy.geometry.kv_heads, -1).contiguous())

    def fork(self, keys: KeyReader) -> StreamingState:
        """There is nothing to copy."""
        return self


class Streaming(BudgetPolicy[BudgetOptions]):
    """Needs no query, so it selects at the earliest moment."""

    name = "streaming"
    query_source: QuerySource = "attention_input"

    def new_state(self, keys: KeyReader) -> StreamingState:
        """A state without memory."""
        return StreamingState(self)
