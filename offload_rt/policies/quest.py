"""Policy "quest": rank pages of adjacent tokens by an upper bound of their scores.

Based on "Quest: Query-Aware Sparsity" (ICML 2024), adapted to a token budget and to grouped-query attention.
"""

from __future__ import annotations

import torch

from ..core import ModelGeometry
from .options import QuestOptions
from .scorer import EntryShape, ScorerPolicy, TokenLists


class Quest(ScorerPolicy[QuestOptions]):
    """Policy "quest", which ranks pages with the true query, as in the paper."""

    name = "quest"

    @classmethod
    def entry_shape(cls, options: QuestOptions, geometry: ModelGeometry, dtype: torch.dtype) -> EntryShape:
        """Return the shape of an entry: a lower and an upper bound for each key channel."""
        return EntryShape(2 * geometry.head_dim, dtype, options.page)

    def entry(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """Return k and -k, concatenated to `[P, m, 2 * d]`, for new keys k `[P, m, d]` of P lists.

        The minimum over the tokens of a page gives the lower bounds and the negated upper bounds of its keys.
        """
        return torch.cat((k, -k), -1)

    def score(self, layer: int, queries: torch.Tensor, keys: TokenLists) -> torch.Tensor:
        """Score each token by an upper bound of the scores of its page.

        The keys of a page, including those of tokens that are not candidates, have a minimum `low` and a maximum `high`
        in each channel. The sum over channels of max(q * low, q * high) is an upper bound of their scores.
        `combine_heads` combines the bounds of the query heads in a group.

        All tokens of a page have equal scores. If the budget covers only part of the last page, its first tokens are
        selected.
        """
        # max(q * low, q * high) is q * low for q < 0 and (-q) * (-high) for q > 0.
        negative_parts = self.entry(layer, queries).clamp(max=0)
        bounds = torch.bmm(negative_parts, keys.entries.to(queries.dtype).transpose(1, 2))
        return keys.combine_heads(bounds).repeat_interleave(keys.page, 1)
