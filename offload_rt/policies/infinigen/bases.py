"""Bases for skewing queries and keys (InfiniGen eq. 2), and the choice of columns for scoring keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...kernels import dispatch
from ...kernels.selection import floor_fraction, skew


@dataclass(frozen=True, eq=False)
class Basis:
    """Matrices that skew the queries and keys of one layer, and the attention scale of the layer.

    `query` and `key` are `[Hkv, d, r]`. The product of a skewed query and a skewed key approximates q·k. If r = d, the
    product is exact.
    """

    query: torch.Tensor
    key: torch.Tensor
    scale: float

    @property
    def nbytes(self) -> int:
        return self.query.nbytes + (0 if self.key is self.query else self.key.nbytes)

    def columns(self, columns: torch.Tensor) -> Basis:
        """Return a basis that contains only the given columns of each KV head. `columns` is int64 `[Hkv, r]`."""
        index = columns.unsqueeze(1).expand(-1, self.query.shape[1], -1)
        return Basis(self.query.gather(2, index), self.key.gather(2, index), self.scale)

    def skew_query(self, q: torch.Tensor) -> torch.Tensor:
        """Skew the query q `[H, d]` and multiply it by the attention scale. The result is `[Hkv, G, r]`."""
        return skew(q.view(self.query.shape[0], -1, self.query.shape[1]), self.query).mul_(self.scale)

    @classmethod
    def stacked(cls, bases: Sequence[Basis | None]) -> Basis | None:
        """Combine the bases of all sequences in a batch. Return None if their keys are not skewed.

        If all sequences share one basis, this basis is returned. Otherwise, the matrices are concatenated to
        `[P, d, r]`, with one matrix for each of the P = B * Hkv lists.
        """
        present = [basis for basis in bases if basis is not None]
        if all(basis is bases[0] for basis in bases):
            return bases[0]
        return cls(torch.cat([b.query for b in present]), torch.cat([b.key for b in present]), present[0].scale)

    def skew_queries(self, q: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Skew the queries q `[H, B, d]` and multiply them by the attention scale.

        The result is `[P, G, r]`, with P = B * Hkv.
        """
        return dispatch.skew_queries(q, self.query, kv_heads, self.scale)


class ColumnChoice(Protocol):
    """Chooses which columns of the skewed keys are stored as a sequence's scoring keys."""

    @property
    def nbytes(self) -> int:
        """Size in bytes of the matrices that are not shared with other sequences."""
        ...

    def observe(self, layer: int, q: torch.Tensor) -> None: ...

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        """Return the layer's basis, limited to the chosen columns. `k` `[Hkv, m, d]` contains new keys of the layer.

        Once the columns of a layer have been chosen, its basis never changes.
        """
        ...

    def fork(self) -> ColumnChoice: ...


class CalibratedColumns:
    """Columns that are chosen at calibration. All sequences use the same columns, so they can share prefixes."""

    nbytes = 0

    def __init__(self, bases: dict[int, Basis]) -> None:
        self._bases = bases

    def observe(self, layer: int, q: torch.Tensor) -> None: ...

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        return self._bases[layer]

    def fork(self) -> CalibratedColumns:
        return self


class PromptColumns:
    """Columns that are chosen from the prompt (paper §4.3), namely those with the largest sums of absolute values.

    The sums are over the skewed keys of the prompt, and over its skewed queries in all query heads of the group. The
    columns of a layer are chosen for each KV head when the layer's first keys arrive, and do not change afterwards.
    """

    def __init__(self, bases: dict[int, Basis], columns: int) -> None:
        self._bases = bases
        self._kept = columns
        self._sums: dict[int, torch.Tensor] = {}
        self._chosen: dict[int, Basis] = {}

    @property
    def nbytes(self) -> int:
        return sum(basis.nbytes for basis in self._chosen.values())

    def observe(self, layer: int, q: torch.Tensor) -> None:
        if layer not in self._chosen:
            basis = self._bases[layer].query
            grouped = q.reshape(basis.shape[0], -1, q.shape[-1])
            self._sums[layer] = self._sums.get(layer, 0) + skew(grouped, basis).abs().sum(1)

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        """Return the layer's basis, limited to the chosen columns and sorted by descending column sum.

        Ties keep the order from calibration.
        """
        if layer not in self._chosen:
            full = self._bases[layer]
            sums = self._sums.pop(layer, 0) + skew(k, full.key).abs().sum(1)
            order = sums.sort(dim=1, descending=True, stable=True).indices
            self._chosen[layer] = full.columns(order[:, : self._kept])
        return self._chosen[layer]

    def fork(self) -> PromptColumns:
        copy = PromptColumns(self._bases, self._kept)
        copy._sums, copy._chosen = dict(self._sums), dict(self._chosen)
        return copy


def stored_columns(partial_ratio: float, head_dim: int) -> int:
    """Return the number of stored columns: `partial_ratio` times the head dimension, rounded down, but at least 1."""
    return max(1, floor_fraction(partial_ratio, head_dim))
