"""Limits of token selection: how many tokens a layer may select, and from which candidates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from ..core import ModelGeometry, VisibleTokens
from ..errors import ConfigError
from ..kernels.selection import floor_fraction, selection_limit

ANY_SCORE = torch.finfo(torch.float32).max / 2
"""Value of `alpha` with which every finite score is accepted, but not -inf."""


def dense_layers(layers: Collection[int], geometry: ModelGeometry) -> frozenset[int]:
    """Return all dense layers: `layers`, the layers that reuse the KV of these layers, and sliding-window layers.

    Raises ConfigError if a layer does not exist.
    """
    for layer in layers:
        if layer >= geometry.layers:
            raise ConfigError(f"dense_layers names layer {layer}, but the model has layers 0 to {geometry.layers - 1}")
    # A dense layer has no scoring keys, so layers that reuse its KV cannot select tokens.
    users = (layer for layer in range(geometry.layers) if geometry.kv_layer(layer) in layers)
    return frozenset(layers) | frozenset(users) | frozenset(geometry.sliding)


def budget_tokens(budget: float, visible: VisibleTokens) -> int:
    """Return how many candidates a layer may select if it attends to the fraction `budget` of the visible tokens.

    Resident tokens count towards the budget, so the result may be 0.
    """
    return max(0, min(len(visible.candidates), floor_fraction(budget, len(visible.all)) - visible.resident))


@dataclass(frozen=True)
class Rule:
    """Selection rule. Each KV head selects up to `limit` candidates, those with the largest scores."""

    alpha: float  # maximum difference between the largest score of a head and the score of a selected token
    max_fraction: float = 1.0  # maximum fraction of the candidates to select
    # Fraction of the visible context to attend to, including resident tokens. If set, it replaces `max_fraction`.
    budget: float | None = None
    # Whether each sequence has its own skewing matrices. If True, decode steps cannot be captured as CUDA graphs.
    per_sequence_bases: bool = False

    def limit(self, visible: VisibleTokens) -> int:
        if self.budget is not None:
            return budget_tokens(self.budget, visible)
        return selection_limit(len(visible.candidates), self.max_fraction)

    def max_limit(self, tokens: int) -> int:
        """Return an upper bound of `limit` for contexts of up to `tokens` tokens."""
        return selection_limit(tokens, self.max_fraction if self.budget is None else self.budget)


@dataclass(frozen=True)
class CandidateSpans:
    """The candidates of a batch, and limits on how many of them are selected.

    There are P = B * Hkv lists, one for each KV head of each sequence.
    """

    starts: torch.Tensor  # first candidate in each list, int32 `[P]` on the device
    stops: torch.Tensor  # end (exclusive) of the candidates in each list, int32 `[P]` on the device
    limits: torch.Tensor  # for each sequence, maximum number of tokens to select per list, int32 `[B]` on the device
    contexts: torch.Tensor  # number of tokens in each sequence, int32 `[B]` on the device
    tokens: int  # upper bound on the number of stored tokens of each sequence, known on the host
    cap: int  # upper bound on `limits`, known on the host

    @staticmethod
    def bounds(visible: Sequence[VisibleTokens], kv_heads: int, rule: Rule) -> list[list[int]]:
        """Return the values of `starts`, `stops`, `limits` and `contexts`. `visible` has one element per sequence."""
        limits, contexts = [rule.limit(tokens) for tokens in visible], [tokens.all.stop for tokens in visible]
        return [*candidate_ranges(visible, kv_heads), limits, contexts]


def candidate_ranges(visible: Sequence[VisibleTokens], kv_heads: int) -> list[list[int]]:
    """Return the first candidate of each list, and the end (exclusive) of its candidates."""
    candidates = [tokens.candidates for tokens in visible for _ in range(kv_heads)]
    return [[c.start for c in candidates], [c.stop for c in candidates]]
