"""Base class of policies that score tokens. The engine selects the tokens with the highest scores within the budget.

A policy must define `score`. It may also define `entry`, which compresses new keys for storage, and `on_queries` and
`on_attended`, which update the stored entries.

These methods work on P lists, one for each KV head of each sequence, so that the same code serves a single sequence and
a batch. CUDA graphs capture all of these methods except `on_queries`. The captured methods must not copy tensor values
to the host.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import torch

from ..core import ModelGeometry, Selection, VisibleTokens
from ..kernels import dispatch
from ..kernels.h2d_copy import to_device
from ..kernels.lists import Scores
from ..kernels.pointer_table import PointerTable
from ..kernels.selection import group_scores, top_tokens
from .base import KeyReader, Policy, PolicyState
from .demand import MemoryDemand
from .growing import LayerTensors
from .options import BudgetOptions
from .registry import PolicyContext
from .rule import ANY_SCORE, CandidateSpans, Rule, budget_tokens, dense_layers


@dataclass(frozen=True)
class EntryShape:
    """Shape of an entry, the data that a policy stores per KV head to score a page of `page` adjacent tokens.

    An entry has `width` elements of type `dtype`. If `page` > 1, it is the element-wise minimum over the tokens of the
    page.
    """

    width: int
    dtype: torch.dtype
    page: int = 1


@dataclass(frozen=True)
class TokenLists:
    """Entries and candidates of P lists, one for each KV head of each sequence.

    `starts`, `stops`, `limits` and `contexts` are the fields of `spans` with the shape `[P, 1]`.

    Attributes:
        entries: Stored entries `[P, m, w]`. Entry j is for `page` tokens, beginning with token `first + j * page`.
        first: First token of entry 0.
        page: Number of tokens per entry.
        spans: The candidates.
    """

    entries: torch.Tensor
    first: int
    page: int
    spans: CandidateSpans

    @property
    def starts(self) -> torch.Tensor:
        return self.spans.starts.unsqueeze(1)

    @property
    def stops(self) -> torch.Tensor:
        return self.spans.stops.unsqueeze(1)

    @property
    def limits(self) -> torch.Tensor:
        return self._each(self.spans.limits)

    @property
    def contexts(self) -> torch.Tensor:
        return self._each(self.spans.contexts)

    def _each(self, numbers: torch.Tensor) -> torch.Tensor:
        heads = len(self.entries) // len(numbers)
        return numbers.unsqueeze(1).expand(-1, heads).reshape(-1, 1)

    @property
    def tokens(self) -> torch.Tensor:
        """Indices of the n = m * page tokens that the entries are for, int64 `[n]`."""
        stop = self.first + self.entries.shape[1] * self.page
        return torch.arange(self.first, stop, device=self.entries.device)

    @property
    def inside(self) -> torch.Tensor:
        """For each of P lists, a mask of the n tokens that are candidates, bool `[P, n]`."""
        return (self.tokens >= self.starts) & (self.tokens < self.stops)

    def combine_heads(self, scores: torch.Tensor) -> torch.Tensor:
        """Combine the scores `[P, G, m]` of G query heads into one score per entry, `[P, m]`.

        The result is the maximum of the log-softmax over the query heads. The softmax covers all entries that have
        candidates. If G = 1, no softmax is computed, because it would not change the order of the scores.
        """
        if scores.shape[1] == 1:
            return scores[:, 0]
        starts, stops = self.spans.starts, self.spans.stops
        if self.first:
            starts, stops = starts - self.first, stops - self.first
        masked = dispatch.mask_scores(scores.contiguous(), starts, stops, self.page)
        return group_scores(masked.scores, masked.lse.unsqueeze(2))


Chosen = TypeVar("Chosen", bound=BudgetOptions)


class ScorerPolicy(Policy, Generic[Chosen]):
    """Base class of policies that define `score`. Subclasses must set `name`, and may set `query_source`.

    In each sparse layer, a policy attends to the fraction `budget` of the visible context, including resident tokens.
    With the same budget, all policies read the same number of bytes of KV.
    """

    can_exclude = False
    """Whether `score` may return -inf, which excludes a candidate from the selection.

    The number of excluded candidates must be the same in all KV heads of a sequence.
    """

    def __init__(self, options: Chosen, geometry: ModelGeometry, device: torch.device, dtype: torch.dtype) -> None:
        self.geometry, self.budget = geometry, options.budget
        self.sinks, self.recent = options.sinks, options.recent
        self.dense_layers = dense_layers(options.dense_layers, geometry)
        digest = hashlib.sha256(options.provenance_text().encode()).hexdigest()[:16]
        self.provenance_key = f"{self.name}-{digest}"
        self.device, self.entries = device, self.entry_shape(options, geometry, dtype)
        self.rule = Rule(ANY_SCORE, budget=options.budget) if device.type == "cuda" else None

    @classmethod
    def build(cls, options: Chosen, context: PolicyContext) -> Self:
        return cls(options, context.geometry, context.device, context.dtype)

    @classmethod
    def entry_shape(cls, options: Chosen, geometry: ModelGeometry, dtype: torch.dtype) -> EntryShape:
        """Return the shape of stored entries. By default, an entry is a key."""
        return EntryShape(geometry.head_dim, dtype)

    @classmethod
    def memory_demand(cls, options: Chosen, geometry: ModelGeometry, dtype: torch.dtype) -> MemoryDemand:
        shape = cls.entry_shape(options, geometry, dtype)
        keys = float(shape.width * shape.dtype.itemsize * geometry.kv_heads) / shape.page
        # For a batch, the entries are copied into one tensor, and `score` may convert them to a wider dtype.
        copied = keys + keys / shape.dtype.itemsize * torch.promote_types(dtype, torch.float32).itemsize
        dense = tuple(sorted(dense_layers(options.dense_layers, geometry)))
        resident = options.sinks + options.recent
        return MemoryDemand(
            dense, resident, options.budget, key_bytes=keys, slot_tokens=shape.page, scratch_bytes=copied
        )

    def entry(self, layer: int, k: torch.Tensor) -> torch.Tensor:
        """Return the entries `[P, m, w]` for new keys k `[P, m, d]`, by default the keys themselves. P = B * Hkv."""
        return k

    def score(self, layer: int, queries: torch.Tensor, keys: TokenLists) -> torch.Tensor:
        """Return a score `[P, n]` for each token in `keys.tokens`. P = B * Hkv.

        Args:
            queries: Queries `[P, G, d]`, multiplied by the attention scale, in float32 (float64 for a float64 model).
            keys: The stored entries. Entries that have no tokens are 0. Scores of tokens that are not candidates are
                ignored.
        """
        raise NotImplementedError

    def on_queries(self, layer: int, q: torch.Tensor, k: torch.Tensor, start: int, entries: torch.Tensor) -> None:
        """Update the stored `entries` `[Hkv, m, w]` with the queries q `[H, m, d]` of a prompt.

        This is called if `wants_queries` is True. For the other parameters, see `PolicyState.on_queries`.
        """

    def on_attended(self, layer: int, keys: TokenLists, weights: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the updated entries `[P, m, w]` after a decode step. P = B * Hkv.

        This is called if `wants_weights` is True.

        Args:
            keys: The entries of all tokens.
            weights: Softmax weights `[P, n]`, summed over the query heads of a KV head; 0 for tokens that were not
                attended to.
            attended: Mask of the tokens that were attended to, bool `[P, n]`.
        """
        return keys.entries

    def new_state(self, keys: KeyReader) -> ScorerState:
        return ScorerState(self, keys)

    def scaled(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Multiply the queries q `[H, B, d]` by the attention scale. The result is `[P, G, d]`, float32 or wider."""
        wide = q.to(torch.promote_types(q.dtype, torch.float32)) * self.geometry.scales[layer]
        _, batch, d = wide.shape
        return wide.view(self.geometry.kv_heads, -1, batch, d).permute(2, 0, 1, 3).flatten(0, 1)

    def lists(self, storages: PointerTable, spans: CandidateSpans) -> TokenLists:
        """Return the stored entries for the first `spans.tokens` tokens of each sequence in a batch."""
        page = self.entries.page
        entries = dispatch.read_lists(storages, -(-spans.tokens // page), spans.contexts, page)
        return TokenLists(entries, 0, page, spans)


class ScorerState(PolicyState):
    """`PolicyState` of a `ScorerPolicy`, with entries `[Hkv, slots, w]` per layer. It implements `BatchedKeys`."""

    def __init__(self, policy: ScorerPolicy[Any], keys: KeyReader) -> None:
        self._policy, self._keys = policy, keys
        self._entries = LayerTensors(1, policy.entries.dtype, policy.device, tokens_per_slot=policy.entries.page)

    @property
    def device_bytes(self) -> int:
        return self._entries.nbytes

    @property
    def scoring_keys(self) -> ScorerState:
        return self

    def on_queries(self, layer: int, q: torch.Tensor, k: torch.Tensor, start: int) -> None:
        if self._policy.wants_queries and layer not in self._policy.dense_layers:
            stored, stop = self._entries.length(layer), start + q.shape[1]
            self._store(layer, k[:, stored:stop], stored)
            self._policy.on_queries(layer, q, k, start, self._entries.reserve(layer, stop)[:, :stop])

    def on_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        if layer not in self._policy.dense_layers:
            self._store(layer, k, start)

    def _store(self, layer: int, k: torch.Tensor, start: int) -> None:
        page, stop = self._policy.entries.page, start + k.shape[1]
        self._entries.open(layer, k.shape[0], 0, self._policy.entries.width)
        stored = self._entries.length(layer)
        assert start <= stored, f"layer {layer} has {stored} keys, not {start}"
        # If the policy does not use `on_queries`, entries from `start` on belong to rejected draft tokens and are
        # replaced. In a page that also has earlier tokens, rejected tokens stay part of the minimum.
        first = stored if self._policy.wants_queries else start
        entries = self._policy.entry(layer, k[:, first - start :])
        data = self._entries.reserve(layer, stop)
        if page == 1:
            data[:, first:stop] = entries
            return
        data[:, -(-first // page) : -(-stop // page)] = torch.inf
        pages = torch.arange(first, stop, device=k.device) // page
        data.scatter_reduce_(1, pages.view(1, -1, 1).expand_as(entries), entries.to(data.dtype), "amin")

    def select(self, layer: int, q: torch.Tensor, visible: VisibleTokens) -> Selection:
        policy, candidates = self._policy, visible.candidates
        n = budget_tokens(policy.budget, visible)
        if n == 0:
            return Selection(torch.empty(policy.geometry.kv_heads, 0, dtype=torch.int64, device=q.device))
        keys = self._lists(layer, visible, candidates, n)
        scores = policy.score(layer, policy.scaled(layer, q.unsqueeze(1)), keys)
        first = candidates.start - keys.first
        scores = scores[:, first : first + len(candidates)]
        if policy.can_exclude:
            n = min(n, int((scores > -torch.inf).sum(1).min()))
        return Selection(top_tokens(scores, n) + candidates.start)

    def on_attended(self, layer: int, visible: VisibleTokens, tokens: torch.Tensor, weights: torch.Tensor) -> None:
        limit = budget_tokens(self._policy.budget, visible)
        keys = self._lists(layer, visible, range(self._entries.length(layer)), limit)
        shape = len(tokens), len(keys.tokens)
        dense = weights.new_zeros(shape).scatter_(1, tokens, weights)
        attended = torch.zeros(shape, dtype=torch.bool, device=tokens.device).scatter_(1, tokens, True)
        data = self._entries.reserve(layer, self._entries.length(layer))
        data[:, : keys.entries.shape[1]] = self._policy.on_attended(layer, keys, dense, attended)

    def _lists(self, layer: int, visible: VisibleTokens, tokens: range, limit: int) -> TokenLists:
        policy, heads, candidates = self._policy, self._policy.geometry.kv_heads, visible.candidates
        page = policy.entries.page
        pages = range(tokens.start // page, -(-tokens.stop // page))
        bounds = torch.tensor([*[candidates.start] * heads, *[candidates.stop] * heads, limit, visible.all.stop])
        starts, stops, limits, contexts = to_device(bounds, policy.device).split([heads, heads, 1, 1])
        spans = CandidateSpans(starts, stops, limits, contexts, visible.all.stop, limit)
        return TokenLists(self._entries_of_pages(layer, pages), pages.start * page, page, spans)

    def _entries_of_pages(self, layer: int, pages: range) -> torch.Tensor:
        return self._entries.data(layer)[:, pages.start : pages.stop]

    def basis(self, layer: int) -> None: ...

    def storage(self, layer: int, slots: range) -> torch.Tensor:
        return self._entries.reserve(layer, slots.stop)

    def append_batch(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, basis: None, storages: PointerTable, slots: torch.Tensor
    ) -> None:
        entries = self._policy.entry(layer, k.unsqueeze(1)).squeeze(1).to(storages.dtype)
        dispatch.append_entries(entries, storages, slots, self._policy.entries.page)

    def score_batch(
        self, layer: int, q: torch.Tensor, basis: None, storages: PointerTable, spans: CandidateSpans
    ) -> Scores:
        policy = self._policy
        scores = policy.score(layer, policy.scaled(layer, q), policy.lists(storages, spans))
        wide = scores[:, : spans.tokens].to(torch.promote_types(scores.dtype, torch.float32))
        return dispatch.mask_scores(wide.unsqueeze(1).contiguous(), spans.starts, spans.stops)

    def on_attended_batch(
        self, layer: int, storages: PointerTable, spans: CandidateSpans, weights: torch.Tensor, attended: torch.Tensor
    ) -> None:
        keys = self._policy.lists(storages, spans)
        entries = self._policy.on_attended(layer, keys, weights, attended)
        dispatch.write_lists(entries.contiguous(), storages, spans.contexts, keys.page)

    def fork(self, keys: KeyReader) -> Self:
        copy = type(self)(self._policy, keys)
        copy._entries = self._entries.fork()
        return copy

    def check_integrity(self) -> None:
        self._entries.check_integrity()
