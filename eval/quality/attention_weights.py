"""Attention metrics of one layer, as used in Figures 4, 5, 11 and 13 of the paper."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ..core.teacher_forced import LayerView


def weights(view: LayerView, positions: torch.Tensor) -> torch.Tensor:
    """Return exact attention weights `[H, P, N]` (float32) of the decoded positions `positions` `[P]`, 0 the first."""
    q = view.query[:, positions]
    grouped = q.reshape(len(view.k), -1, *q.shape[1:]) * view.scale
    scores = (grouped @ view.k.transpose(1, 2).unsqueeze(1)).float()
    return scores.masked_fill_(~view.causal[positions], -math.inf).softmax(-1).flatten(0, 1)


def tokens_for_mass(attention: torch.Tensor, share: float) -> torch.Tensor:
    """Count the heaviest tokens that hold `share` of the attention: `[...]` from attention `[..., N]` (Figure 5)."""
    caught = attention.sort(dim=-1, descending=True).values.cumsum(-1)
    return (caught < share).sum(-1) + 1


def kept_similarity(attention: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return the cosine similarity `[H, P]` with attention renormalized over the `kept` tokens `[Hkv, P, N]`."""
    mask = kept.repeat_interleave(len(attention) // len(kept), 0)
    reduced = attention * mask
    return torch.cosine_similarity(attention, reduced / reduced.sum(-1, keepdim=True).clamp_min(1e-30), dim=-1)


def top_recall(scores: torch.Tensor, truth: torch.Tensor, n: int) -> torch.Tensor:
    """Return the recall `[...]` of the n heaviest tokens among the n tokens with the largest score (Figure 13).

    `scores` and `truth` are `[..., N]`.
    """
    n = min(n, truth.shape[-1])
    guessed = torch.zeros_like(truth, dtype=torch.bool).scatter_(-1, scores.topk(n, -1).indices, True)
    return guessed.gather(-1, truth.topk(n, -1).indices).float().mean(-1)


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return mean and quartiles."""
    data = torch.tensor(list(values), dtype=torch.float64)
    low, middle, high = torch.quantile(data, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return {"mean": float(data.mean()), "low": low, "median": middle, "high": high}
