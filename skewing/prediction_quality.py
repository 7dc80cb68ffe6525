"""Measure the quality of predicted queries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from ..config import Source
from ..kernels.reference import capped
from ..models.adapter import ModelAdapter
from .prediction import Correction, source_index

SINKS, RECENT, FRACTION = 4, 64, 0.02
"""Defaults of the policy "infinigen": numbers of sinks and recent tokens, and selected fraction of the other tokens."""

STRIDE = 16
"""Every STRIDE-th query of a text is measured."""


class PredictionQuality:
    """Measures predicted queries by the attention mass of the tokens that they select.

    The mass is divided by the mass of the tokens that the true queries select. In both cases, the tokens with the
    largest attention weights are selected. As in the policy, the query heads of a KV head select tokens together, and
    resident tokens do not count.
    """

    def __init__(self, adapter: ModelAdapter, correction: Correction) -> None:
        self._adapter, self._correction = adapter, correction
        self._layer, self._keys = -1, torch.empty(0)
        self._mass: defaultdict[Source | int, list[float]] = defaultdict(list)
        self._ideal_mass: defaultdict[Source | int, list[float]] = defaultdict(list)

    def add(self, layer: int, predictions: Mapping[Source | int, torch.Tensor], true_input: torch.Tensor) -> None:
        """Measure a slice of a text, given a layer's predicted inputs (by source) and true inputs, `[m, D]` each.

        The slices of a layer must be passed in order. Layers that do not select tokens, or that use the keys of an
        earlier layer, are skipped.
        """
        geometry = self._adapter.geometry
        if geometry.windows[layer] is not None or geometry.kv_layer(layer) != layer:
            return
        start = self._keys.shape[1] if layer == self._layer else 0
        positions = torch.arange(start, start + len(true_input), device=true_input.device)
        keys = self._adapter.key_value(layer, true_input, positions)[0]
        self._keys, self._layer = torch.cat((self._keys, keys), 1) if start else keys, layer
        rows = positions[_selected(positions) >= 1][::STRIDE] - start
        if not len(rows):
            return
        weights = self._weights(layer, true_input[rows], rows + start)
        ideal_mass = float(_selected_mass(weights, weights, rows + start).mean())
        for source, predicted in predictions.items():
            s = source_index(source)
            slope, offset = (x[s, layer].to(predicted) for x in (self._correction.slope, self._correction.offset))
            predicted_weights = self._weights(layer, torch.addcmul(offset, slope, predicted[rows]), rows + start)
            self._mass[source].append(float(_selected_mass(weights, predicted_weights, rows + start).mean()))
            self._ideal_mass[source].append(ideal_mass)

    def relative_mass(self) -> dict[Source | int, float]:
        """Return the relative attention mass for each source of predictions, averaged over layers."""
        return {source: sum(mass) / sum(self._ideal_mass[source]) for source, mass in self._mass.items()}

    def _weights(self, layer: int, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the attention weights `[Hkv, G, P, N]` of the queries of `inputs` `[P, D]` at `positions` `[P]`.

        Resident tokens have the weight 0, so the weights of all other tokens sum to 1.
        """
        geometry = self._adapter.geometry
        q = self._adapter.query(layer, inputs, positions).float().unflatten(0, (geometry.kv_heads, -1))
        scores = capped(q @ self._keys.float().mT.unsqueeze(1) * geometry.scales[layer], geometry.softcap)
        tokens = torch.arange(self._keys.shape[1], device=positions.device)
        skipped = (tokens < SINKS) | (tokens > positions[:, None] - RECENT)
        return scores.masked_fill(skipped, -torch.inf).softmax(-1)


def _selected(positions: torch.Tensor) -> torch.Tensor:
    return ((positions + 1 - SINKS - RECENT) * FRACTION).long()


def _selected_mass(weights: torch.Tensor, ranking_weights: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the sum of `weights` over the tokens with the largest `ranking_weights`, `[Hkv, G, P]`.

    Both are `[Hkv, G, P, N]`, for queries at `positions` `[P]`.
    """
    order = ranking_weights.amax(1, keepdim=True).argsort(-1, descending=True).expand_as(weights)
    mass, last = weights.gather(-1, order).cumsum(-1), _selected(positions) - 1
    return mass.gather(-1, last.view(1, 1, -1, 1).expand(*mass.shape[:3], 1)).squeeze(-1)
