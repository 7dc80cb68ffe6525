"""Quality of predicted queries: the attention mass of the tokens that they select."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from ..config import Source
from ..kernels.reference import capped
from ..models.adapter import ModelAdapter
from .guess import Correction, source_index

SINKS, RECENT, FRACTION = 4, 64, 0.02
"""Defaults of the policy "infinigen": number of sinks and recent tokens, and selected fraction of the other tokens."""

STRIDE = 16
"""Every STRIDE-th query of a text is measured."""


class GuessQuality:
    """Measures how good predicted queries are: the attention mass of the tokens that they select.

    It is relative to the attention mass of the tokens that the true queries select. A query selects the tokens with the
    largest attention weights. As in the policy, the query heads of a KV head select together, and resident tokens do
    not count. Queries that would select no token are not measured.
    """

    def __init__(self, adapter: ModelAdapter, correction: Correction) -> None:
        self._adapter, self._correction = adapter, correction
        self._layer, self._keys = -1, torch.empty(0)
        self._mass: defaultdict[Source | int, list[float]] = defaultdict(list)
        self._most: defaultdict[Source | int, list[float]] = defaultdict(list)

    def add(self, layer: int, guesses: Mapping[Source | int, torch.Tensor], truth: torch.Tensor) -> None:
        """Measure a slice of a text: predicted inputs `[m, D]` of a layer, and its true inputs `truth` `[m, D]`.

        The slices of a layer must follow each other. Sliding-window layers are skipped, because they do not select, and
        layers that use the keys of an earlier layer, because those keys are not at hand.
        """
        geometry = self._adapter.geometry
        if geometry.windows[layer] is not None or geometry.kv_layer(layer) != layer:
            return
        start = self._keys.shape[1] if layer == self._layer else 0
        positions = torch.arange(start, start + len(truth), device=truth.device)
        keys = self._adapter.key_value(layer, truth, positions)[0]
        self._keys, self._layer = torch.cat((self._keys, keys), 1) if start else keys, layer
        rows = positions[_selected(positions) >= 1][::STRIDE] - start
        if not len(rows):
            return
        weights = self._weights(layer, truth[rows], rows + start)
        most = float(_found(weights, weights, rows + start).mean())
        for source, guess in guesses.items():
            s = source_index(source)
            slope, offset = (x[s, layer].to(guess) for x in (self._correction.slope, self._correction.offset))
            guessed = self._weights(layer, torch.addcmul(offset, slope, guess[rows]), rows + start)
            self._mass[source].append(float(_found(weights, guessed, rows + start).mean()))
            self._most[source].append(most)

    def shares(self) -> dict[Source | int, float]:
        """Return the relative attention mass for each tensor that queries are predicted from, mean over layers."""
        return {source: sum(mass) / sum(self._most[source]) for source, mass in self._mass.items()}

    def _weights(self, layer: int, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the attention weights `[Hkv, G, P, N]` of the queries at `positions`, computed from `inputs` `[P, D]`.

        Resident tokens have the weight 0. The weights of all other tokens sum to 1.
        """
        geometry = self._adapter.geometry
        q = self._adapter.query(layer, inputs, positions).float().unflatten(0, (geometry.kv_heads, -1))
        scores = capped(q @ self._keys.float().mT.unsqueeze(1) * geometry.scales[layer], geometry.softcap)
        tokens = torch.arange(self._keys.shape[1], device=positions.device)
        skipped = (tokens < SINKS) | (tokens > positions[:, None] - RECENT)
        return scores.masked_fill(skipped, -torch.inf).softmax(-1)


def _selected(positions: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens that queries at `positions` `[P]` select, int64 `[P]`."""
    return ((positions + 1 - SINKS - RECENT) * FRACTION).long()


def _found(weights: torch.Tensor, scored: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the sum of `weights` over the tokens with the highest scores `scored`, `[Hkv, G, P]`.

    `weights` and `scored` are `[Hkv, G, P, N]`.
    """
    order = scored.amax(1, keepdim=True).argsort(-1, descending=True).expand_as(weights)
    mass, last = weights.gather(-1, order).cumsum(-1), _selected(positions) - 1
    return mass.gather(-1, last.view(1, 1, -1, 1).expand(*mass.shape[:3], 1)).squeeze(-1)
