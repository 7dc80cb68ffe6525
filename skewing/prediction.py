"""Correct predicted attention inputs with a linear function per channel, which calibration fits.

InfiniGen predicts the query of layer l from the hidden states of layer l-1, because the inputs of adjacent layers are
similar (§4.3, Table 1). The prediction is wrong after an MLP that adds nearly the same large vector to every token
("massive activations"). A slope and an offset per channel remove this nearly constant error. Measurements:
`eval/results/reference-opt/ablation.md`, parts "source".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, get_args

import torch

from ..config import Source
from ..models.adapter import ModelAdapter

SOURCES: Final[tuple[Source, ...]] = get_args(Source)
"""Tensors of the previous layer that can be used to predict a layer's attention input."""


def source_index(source: Source | int) -> int:
    """Return the index of a source of predictions on the first axis of `Correction.slope`.

    In hybrid models, the source n (an integer) is the input of the n-th decoder layer before the predicted layer.
    """
    return len(SOURCES) + source - 1 if isinstance(source, int) else SOURCES.index(source)


@dataclass(frozen=True, eq=False)
class Correction:
    """Linear correction for predicted attention inputs, from which predicted queries are computed.

    `slope` and `offset` are float32 `[S, L, D]` for S sources (`source_index`). The input g `[..., D]` of layer l,
    predicted from source s, is corrected to slope[s, l] * g + offset[s, l]. Layers without predictions, such as layer
    0, have slope 1 and offset 0.
    """

    slope: torch.Tensor
    offset: torch.Tensor

    @classmethod
    def none(cls, layers: int) -> Correction:
        shape = (len(SOURCES), layers, 1)
        return cls(torch.ones(shape), torch.zeros(shape))


class CorrectionSums:
    """Accumulates, for each source, layer and channel, the sums over tokens to which a `Correction` is fitted."""

    def __init__(self, layers: int, hidden: int, between: int = 0) -> None:
        # Sums of g, t, g^2 and g t, and the number of tokens.
        self._sums = torch.zeros(5, len(SOURCES) + between, layers, hidden, dtype=torch.float64)
        self._sums[4] = torch.finfo(torch.float64).tiny  # avoids a division by zero before the first token

    def add(self, layer: int, predictions: Mapping[Source | int, torch.Tensor], true_input: torch.Tensor) -> None:
        """Add a layer's predicted inputs (by source) and true inputs, `[m, D]` each."""
        t = true_input.double()
        for source, predicted in predictions.items():
            g = predicted.double()
            sums = torch.stack((g.sum(0), t.sum(0), (g * g).sum(0), (g * t).sum(0), torch.full_like(g[0], len(g))))
            self._sums[:, source_index(source), layer] += sums.cpu()

    def fit(self) -> Correction:
        """Fit a line from predicted to true inputs in each channel, by least squares.

        Channels with constant predictions get slope 1.
        """
        g, t, square, product, count = self._sums
        mean, true_mean = g / count, t / count
        variance, covariance = square / count - mean**2, product / count - mean * true_mean
        varies = variance > 1e-9 * (square / count).clamp_min(torch.finfo(torch.float64).tiny)
        slope = torch.where(varies, covariance / variance.where(varies, torch.ones(())), torch.ones(()))
        return Correction(slope.float(), (true_mean - slope * mean).float())


def predicted_input(
    adapter: ModelAdapter,
    layer: int,
    source: Source,
    hidden: torch.Tensor,
    attention_input: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    """Predict the attention input `[T, D]` of `layer` from the previous layer (InfiniGen §4.3), without correction.

    Args:
        source: Selects one of the following three tensors.
        hidden: Input of the previous layer, `[T, D]`.
        attention_input: Attention input of the previous layer, `[T, D]`.
        residual: Residual stream after the attention of the previous layer, `[T, D]`.
    """
    if source == "attention_input":
        return attention_input
    return adapter.attention_input(layer, hidden if source == "normed_input" else residual)
