"""Policy "quest": rank pages of adjacent tokens by an upper bound on the scores of their tokens.

It is based on "Quest: Query-Aware Sparsity" (ICML 2024), adapted to a token budget and to grouped-query attention.
"""

from __future__ import annotations

import torch

from ..core import ModelGeometry
from .options import QuestOptions
from .scorer import EntryShape, ScorerPolicy, TokenLists


class Quest(ScorerPolicy[QuestOptions]):
    name = "quest"

    @classmethod
    def entry_shape(cls, options: QuestOptions, geometry: ModelGeometry, dtype: torch.dtype) -> EntryShape:
        return EntryShape(2 * geometry.head_dim, dtype, options.page)

    def entry(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """Return k and -k, concatenated to `[P, m, 2 * d]`.

        The element-wise minimum over the tokens of a page then contains the smallest and the negated largest key of
        each channel.
        """
        return torch.cat((k, -k), -1)

    def score(self, layer: int, queries: torch.Tensor, keys: TokenLists) -> torch.Tensor:
        """Score each token by an upper bound on the scores in its page.

        The bound is the sum of max(q * low, q * high) over all channels, where `low` and `high` are the smallest and
        the largest key of the page in the channel. `combine_heads` combines the bounds for a group's query heads. If
        the budget covers only a part of a page, the first tokens of the page are selected.
        """
        # max(q * low, q * high) equals q * low for q < 0 and (-q) * (-high) for q > 0.
        negative_parts = self.entry(layer, queries).clamp(max=0)
        bounds = torch.bmm(negative_parts, keys.entries.to(queries.dtype).transpose(1, 2))
        return keys.combine_heads(bounds).repeat_interleave(keys.page, 1)
