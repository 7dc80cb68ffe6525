"""Bases of skewed queries and keys (InfiniGen eq. 2), and the choice of columns for scoring keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...kernels import dispatch
from ...kernels.selection import floor_fraction, skew


@dataclass(frozen=True, eq=False)
class Basis:
    """Matrices `query` and `key`, `[Hkv, d, r]`, that skew the queries and keys of one layer, and its attention scale.

    The product of a skewed query and a skewed key approximates q·k. If r = d, it is exact.
    """

    query: torch.Tensor
    key: torch.Tensor
    scale: float

    @property
    def nbytes(self) -> int:
        return self.query.nbytes + (0 if self.key is self.query else self.key.nbytes)

    def columns(self, columns: torch.Tensor) -> Basis:
        """Return a basis with only some columns of each KV head. `columns` are int64 `[Hkv, r]`."""
        index = columns.unsqueeze(1).expand(-1, self.query.shape[1], -1)
        return Basis(self.query.gather(2, index), self.key.gather(2, index), self.scale)

    def skew_query(self, q: torch.Tensor) -> torch.Tensor:
        """Return the skewed query `[Hkv, G, r]` of q `[H, d]`, multiplied by the attention scale."""
        return skew(q.view(self.query.shape[0], -1, self.query.shape[1]), self.query).mul_(self.scale)

    @classmethod
    def stacked(cls, bases: Sequence[Basis | None]) -> Basis | None:
        """Combine the bases of the sequences of a batch. Return None if their keys are not skewed.

        If all sequences share one basis, it is returned. Otherwise, matrices are concatenated to `[P, d, r]`, one for
        each of P = B * Hkv lists.
        """
        present = [basis for basis in bases if basis is not None]
        if all(basis is bases[0] for basis in bases):
            return bases[0]
        return cls(torch.cat([b.query for b in present]), torch.cat([b.key for b in present]), present[0].scale)

    def skew_queries(self, q: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Return the skewed queries `[P, G, r]` of q `[H, B, d]`, multiplied by the scale. P = B * Hkv."""
        return dispatch.skew_queries(q, self.query, kv_heads, self.scale)


class ColumnChoice(Protocol):
    """Chooses the columns of skewed keys that are stored as scoring keys of a sequence."""

    @property
    def nbytes(self) -> int:
        """Size in bytes of matrices that other sequences do not share."""
        ...

    def observe(self, layer: int, q: torch.Tensor) -> None: ...

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        """Return the basis of a layer with the chosen columns, for its new keys k `[Hkv, m, d]`.

        The basis of a layer never changes.
        """
        ...

    def fork(self) -> ColumnChoice: ...


class CalibratedColumns:
    """Columns chosen at calibration. All sequences have the same columns, so prefixes can be shared."""

    nbytes = 0

    def __init__(self, bases: dict[int, Basis]) -> None:
        self._bases = bases

    def observe(self, layer: int, q: torch.Tensor) -> None: ...

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        return self._bases[layer]

    def fork(self) -> CalibratedColumns:
        return self


class PromptColumns:
    """Columns chosen from the prompt (paper §4.3): those with the largest sum of absolute values.

    The sum covers the skewed keys of the prompt, and its skewed queries in all query heads of the group. The columns of
    a layer and KV head are chosen when its first keys arrive, and do not change later.
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
        """Return the layer's basis with the chosen columns, in descending order of their sums.

        Columns with equal sums are in the order of calibration.
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
    """Return the number of stored columns: `partial_ratio` of the head dimension, rounded down, at least 1."""
    return max(1, floor_fraction(partial_ratio, head_dim))
