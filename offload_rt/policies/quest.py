"""Policy "quest": pages of adjacent tokens, ranked by an upper bound of their scores.

From "Quest: Query-Aware Sparsity", adapted to a token budget and to grouped queries.
"""

from __future__ import annotations

import torch

from ..core import ModelGeometry
from .options import QuestOptions
from .scorer import EntryShape, ScorerPolicy, TokenLists


class Quest(ScorerPolicy[QuestOptions]):
    """Policy "quest". It selects with the true query, as published."""

    name = "quest"

    @classmethod
    def entry_shape(cls, options: QuestOptions, geometry: ModelGeometry, dtype: torch.dtype) -> EntryShape:
        """Return the shape of two bounds in the model's dtype for each key channel of a page."""
        return EntryShape(2 * geometry.head_dim, dtype, options.page)

    def entry(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """Return k and -k `[P, m, 2 * d]`, whose minima over a page are the lower and the negated upper bounds."""
        return torch.cat((k, -k), -1)

    def score(self, layer: int, queries: torch.Tensor, keys: TokenLists) -> torch.Tensor:
        """Score tokens by the rank of their page, so that the first tokens of the last selected page are selected.

        The bound of a page for a query head is the sum over channels of max(q * low, q * high). The rank of a page is
        its largest softmax weight (over the pages of the candidates) in the query group. A page with tokens that are
        not candidates is ranked by all its keys.
        """
        # q * low for q < 0, and (-q) * (-high) for q > 0.
        least = self.entry(layer, queries).clamp(max=0)
        bounds = torch.bmm(least, keys.entries.to(queries.dtype).transpose(1, 2))
        return keys.group_ranks(bounds).repeat_interleave(keys.page, 1)
