"""A policy's budget: the share of the visible context that a sparse layer attends to, resident tokens included, so that
policies are compared at equal attended bytes."""

from __future__ import annotations

from ..core import Visible
from ..kernels.selection import floor_share


def budget_tokens(budget: float, visible: Visible) -> int:
    """n: candidates to select so that resident and selected tokens together are at most `budget` of the visible ones,
    rounded down. Residents are attended in any case: where they use up the budget, n is 0."""
    return max(0, min(len(visible.candidates), floor_share(budget, len(visible.all)) - visible.resident))
