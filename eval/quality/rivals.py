"""Baseline policies with the selection rules of published systems.

Only the selection rule is reproduced. Keys and values are exact here, so the quality may be better than in the original
systems.
"""

from __future__ import annotations

import math
from typing import Self

import torch
from torch.nn.functional import max_pool1d, pad

from ...core import ModelGeometry
from ...kernels.reference import capped
from ...policies.base import KeyReader, QuerySource
from ...policies.scorer import EntryShape, ScorerPolicy, ScorerState, TokenLists
from ..core.rival_options import LandmarkOptions, SnapKVOptions

NEWEST = 1e30
"""Score of generated tokens, higher than any sum of votes."""


class Landmarks(ScorerPolicy[LandmarkOptions]):
    """Policy that ranks blocks of adjacent tokens by the score of each block's mean key (ShadowKV, arXiv
    2410.21465).
    """

    name = "landmarks"

    def __init__(
        self, options: LandmarkOptions, geometry: ModelGeometry, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(options, geometry, device, dtype)
        self._block = options.block

    def score(self, layer: int, queries: torch.Tensor, keys: TokenLists) -> torch.Tensor:
        """Return each token's score: the product of the query and the mean key of the token's block, after a
        log-softmax over blocks.

        Only candidates contribute to a mean key. The score for a KV head is the maximum over its query heads.
        """
        lists, tokens, _ = keys.entries.shape
        before = keys.first % self._block
        after = -(before + tokens) % self._block
        inside = pad(keys.inside.unsqueeze(2).to(queries.dtype), (0, 0, before, after))
        entries = pad(keys.entries.to(queries.dtype), (0, 0, before, after)) * inside
        sums, counts = (each.view(lists, -1, self._block, each.shape[2]).sum(2) for each in (entries, inside))
        scores = torch.bmm(queries, (sums / counts.clamp(min=1)).transpose(1, 2))
        ranks = scores.masked_fill(counts.transpose(1, 2) == 0, -math.inf).log_softmax(-1).amax(1)
        return ranks.repeat_interleave(self._block, 1)[:, before : before + tokens]


class SnapKVState(ScorerState):
    """State of `SnapKV`. It keeps the latest queries, because the last chunk of a prompt may be short."""

    def __init__(self, policy: SnapKV, keys: KeyReader) -> None:
        super().__init__(policy, keys)
        self._observed, self._dense_layers = policy.observed, policy.dense_layers
        self._latest: dict[int, tuple[int, torch.Tensor]] = {}
        """For each layer, the end of the latest chunk and its last queries `[H, m, d]`."""

    def on_queries(self, layer: int, q: torch.Tensor, k: torch.Tensor, start: int) -> None:
        if layer in self._dense_layers:
            return
        stop = start + q.shape[1]
        before, latest = self._latest.get(layer, (-1, q))
        observed = (torch.cat((latest, q), 1) if before == start else q)[:, -self._observed :]
        self._latest[layer] = stop, observed.clone()
        super().on_queries(layer, observed, k, stop - observed.shape[1])

    def fork(self, keys: KeyReader) -> Self:
        copy = super().fork(keys)
        copy._latest = dict(self._latest)
        return copy


class SnapKV(ScorerPolicy[SnapKVOptions]):
    """Policy that selects the tokens to which the prompt's last queries attend most (SnapKV, arXiv 2404.14469).

    A token's vote is its attention weight, summed over these queries and the query heads of a KV head. SnapKV always
    keeps generated tokens, so these tokens get the highest score.
    """

    name = "snapkv"
    query_source: QuerySource = "attention_input"
    wants_queries = True

    def __init__(
        self, options: SnapKVOptions, geometry: ModelGeometry, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(options, geometry, device, dtype)
        self.observed, self._pooled = options.observed, options.pooled

    @classmethod
    def entry_shape(cls, options: SnapKVOptions, geometry: ModelGeometry, dtype: torch.dtype) -> EntryShape:
        return EntryShape(1, torch.float32)

    def entry(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """Give each new token the highest score.

        For prompt tokens, `on_queries` later replaces the scores with votes.
        """
        return k.new_full((*k.shape[:2], 1), NEWEST, dtype=torch.float32)

    def score(self, layer: int, queries: torch.Tensor, keys: TokenLists) -> torch.Tensor:
        """Return each token's score: the largest vote among the neighbouring tokens."""
        return max_pool1d(keys.entries.transpose(1, 2), self._pooled, stride=1, padding=self._pooled // 2)[:, 0]

    def on_queries(self, layer: int, q: torch.Tensor, k: torch.Tensor, start: int, entries: torch.Tensor) -> None:
        """Write the votes of the prompt's last queries to `entries`.

        `q` `[H, m, d]` contains the queries of the tokens [start, start + m).
        """
        stop = start + q.shape[1]
        observed = q[:, -self.observed :].view(len(entries), -1, min(self.observed, q.shape[1]), q.shape[2])
        wide = torch.promote_types(q.dtype, torch.float32)
        token = torch.arange(stop, device=k.device)
        ago = torch.arange(stop - observed.shape[2], stop, device=k.device).unsqueeze(1) - token
        for head, row in enumerate(entries[:, :stop, 0]):
            scores = observed[head].to(wide) * self.geometry.scales[layer] @ k[head, :stop].to(wide).T
            scores = capped(scores, self.geometry.softcap).masked_fill(ago < 0, -math.inf)
            row.copy_(scores.softmax(-1).sum((0, 1)))

    def new_state(self, keys: KeyReader) -> SnapKVState:
        return SnapKVState(self, keys)
