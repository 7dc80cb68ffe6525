"""Policy "quest": pages of adjacent tokens, ranked by an upper bound of their scores.

From "Quest: Query-Aware Sparsity", adapted to a token budget and to grouped queries.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch

from ..core import ModelGeometry, Selection, VisibleTokens
from ..kernels.selection import group_lse, group_scores, top_tokens
from .base import KeyReader, QuerySource
from .budget import BudgetPolicy, budget_tokens
from .demand import MemoryDemand
from .growing import LayerTensors
from .options import QuestOptions
from .passive import PassiveState
from .registry import PolicyContext


class QuestState(PassiveState):
    """Minimum and maximum of each key channel per page: `[2, Hkv, pages, d]` per layer, in the model's dtype."""

    def __init__(self, policy: Quest) -> None:
        self._policy = policy
        self._bounds = LayerTensors(2, policy.dtype, policy.device, per_slot=policy.page)

    @property
    def device_bytes(self) -> int:
        """Bytes of the bounds."""
        return self._bounds.nbytes

    def on_keys(self, layer: int, k: torch.Tensor, start: int) -> None:
        """Update the page bounds with keys k `[Hkv, m, d]` of tokens [start, start + m)."""
        if layer in self._policy.dense_layers:
            return
        page, length = self._policy.page, self._bounds.length(layer)
        assert start == length, f"layer {layer} has {length} keys, not {start}"
        kv_heads, added, d = k.shape
        self._bounds.open(layer, 2, kv_heads, 0, d)
        first, stop = start // page, start + added
        last = -(-stop // page)
        low, high = self._bounds.reserve(layer, stop).unbind(0)
        if added == 1 and start % page:
            for bound, narrow in ((low, torch.minimum), (high, torch.maximum)):
                narrow(bound[:, first], k[:, 0].to(bound.dtype), out=bound[:, first])
            return
        begun = -(-start // page)
        for bound, reduce, unset in ((low, "amin", torch.inf), (high, "amax", -torch.inf)):
            bound[:, begun:last] = unset
            pages = torch.arange(start, stop, device=k.device) // page - first
            index = pages.view(1, -1, 1).expand_as(k)
            bound[:, first:last].scatter_reduce_(1, index, k.to(bound.dtype), reduce, include_self=True)

    def select(self, layer: int, q: torch.Tensor, visible: VisibleTokens) -> Selection:
        """Select the tokens of the highest-ranked pages within the budget, and the first tokens of the last such page.

        The bound of a page for a query head is the sum over channels of max(q * low, q * high). The rank of a page is
        its largest softmax weight (over the pages of the candidates) in the query group. A page with tokens that are
        not candidates is ranked by all its keys.
        """
        policy, candidates = self._policy, visible.candidates
        n = budget_tokens(policy.budget, visible)
        if n == 0:
            return Selection(torch.empty(policy.geometry.kv_heads, 0, dtype=torch.int64, device=q.device))
        first, last = candidates.start // policy.page, -(-candidates.stop // policy.page)
        compute = torch.promote_types(q.dtype, torch.float32)
        low, high = self._bounds.data(layer)[:, :, first:last].to(compute).transpose(2, 3).unbind(0)
        query = q.to(compute).view(policy.geometry.kv_heads, policy.geometry.group, -1) * policy.geometry.scales[layer]
        bounds = torch.baddbmm(torch.bmm(query.clamp(max=0), low), query.clamp(min=0), high)
        pages = group_scores(bounds, group_lse(bounds))
        begin = candidates.start - first * policy.page
        values = pages.repeat_interleave(policy.page, 1)[:, begin : begin + len(candidates)]
        return Selection(top_tokens(values, n) + candidates.start)

    def fork(self, keys: KeyReader) -> QuestState:
        """Return a copy that shares the bounds until either side writes."""
        twin = QuestState(self._policy)
        twin._bounds = self._bounds.fork()
        return twin

    def check_integrity(self) -> None:
        """Assert that min <= max in every page with tokens."""
        self._bounds.check_integrity()
        for layer in self._bounds.layers:
            low, high = self._bounds.data(layer)[:, :, : -(-self._bounds.length(layer) // self._policy.page)]
            assert bool((low <= high).all())


class Quest(BudgetPolicy[QuestOptions]):
    """Policy "quest". It selects with the true query, as published."""

    name = "quest"
    query_source: QuerySource = "query"

    def __init__(
        self, options: QuestOptions, geometry: ModelGeometry, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(options, geometry)
        self.page, self.device, self.dtype = options.page, device, dtype

    @classmethod
    def build(cls, options: QuestOptions, context: PolicyContext) -> Self:
        """Build the policy for a model. Raises ConfigError if an option does not fit the model."""
        return cls(options, context.geometry, context.device, context.dtype)

    @classmethod
    def memory_demand(cls, options: QuestOptions, geometry: ModelGeometry, dtype: torch.dtype) -> MemoryDemand:
        """Return the demand: two bounds in the model's dtype for each key channel of a page."""
        keys = 2.0 * geometry.head_dim * dtype.itemsize * geometry.kv_heads / options.page
        return replace(super().memory_demand(options, geometry, dtype), key_bytes=keys)

    def new_state(self, keys: KeyReader) -> QuestState:
        """Return an empty state. `keys` is not used."""
        return QuestState(self)
