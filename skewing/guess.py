"""Correction of guessed attention inputs, fitted in calibration.

InfiniGen guesses what layer l projects its query from by what layer l-1 knows, since the inputs of neighbouring layers
are alike (§4.3, Table 1). Where a layer's MLP writes a large vector into the residual, the same for every token
("massive activations"), they are not; the first layer of both reference models does. What is missing is nearly
constant, so a slope and an offset for each channel, the least-squares fit over the calibration text, bring it back for
one multiply-add of `[B, D]`. On the OPT sibling that is the difference between 65 % and 4.5 % of perplexity at 10 %
attended (`eval/results/reference-opt/ablation.md`, parts "source").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, get_args

import torch

from ..config import Source

SOURCES: Final[tuple[Source, ...]] = get_args(Source)
"""The order of a correction's first axis."""


@dataclass(frozen=True, eq=False)
class Correction:
    """slope, offset: float32 `[S, L, D]`: a guess g `[.., D]` of layer l's attention input from source s is corrected
    to slope[s, l] * g + offset[s, l]. Layer 0, which nothing comes before, is left as it is."""

    slope: torch.Tensor
    offset: torch.Tensor

    @classmethod
    def none(cls, layers: int) -> Correction:
        """Leaves every guess as it is; the channel axis has size 1."""
        shape = (len(SOURCES), layers, 1)
        return cls(torch.ones(shape), torch.zeros(shape))


class GuessSums:
    """Sums over a text of guesses g and the truth t for each source, layer and channel, in float64 on the CPU."""

    def __init__(self, layers: int, hidden: int) -> None:
        self._sums = torch.zeros(5, len(SOURCES), layers, hidden, dtype=torch.float64)  # g, t, g g, g t, tokens
        self._sums[4] = torch.finfo(torch.float64).tiny  # no token yet: no division by zero

    def add(self, layer: int, guesses: Mapping[Source, torch.Tensor], truth: torch.Tensor) -> None:
        """Guesses `[m, D]` of each source, and `truth` `[m, D]`."""
        t = truth.double()
        for s, source in enumerate(SOURCES):
            g = guesses[source].double()
            found = torch.stack((g.sum(0), t.sum(0), (g * g).sum(0), (g * t).sum(0), torch.full_like(g[0], len(g))))
            self._sums[:, s, layer] += found.cpu()

    def fit(self) -> Correction:
        """Least squares, channel by channel; a channel whose guess never varies keeps its slope of 1."""
        g, t, square, product, count = self._sums
        mean, truth = g / count, t / count
        variance, covariance = square / count - mean**2, product / count - mean * truth
        varies = variance > 1e-9 * (square / count).clamp_min(torch.finfo(torch.float64).tiny)
        slope = torch.where(varies, covariance / variance.where(varies, torch.ones(())), torch.ones(()))
        return Correction(slope.float(), (truth - slope * mean).float())
