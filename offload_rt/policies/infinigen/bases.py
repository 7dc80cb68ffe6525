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
    """Matrices that skew the queries and keys of one layer, each `[Hkv, d, r]`, and the attention scale of the model.

    The product of a skewed query and a skewed key approximates q·k; with r = d it is exact.
    """

    query: torch.Tensor
    key: torch.Tensor
    scale: float

    @property
    def nbytes(self) -> int:
        return self.query.nbytes + (0 if self.key is self.query else self.key.nbytes)

    def columns(self, columns: torch.Tensor) -> Basis:
        """Return a basis with only some columns of each KV head, with the indices `columns`, int64 `[Hkv, r]`."""
        index = columns.unsqueeze(1).expand(-1, self.query.shape[1], -1)
        return Basis(self.query.gather(2, index), self.key.gather(2, index), self.scale)

    def skew_query(self, q: torch.Tensor) -> torch.Tensor:
        """Skew a query `[H, d]` and multiply it by the attention scale: `[Hkv, G, r]`."""
        return skew(q.view(self.query.shape[0], -1, self.query.shape[1]), self.query).mul_(self.scale)

    @classmethod
    def stacked(cls, bases: Sequence[Basis | None]) -> Basis | None:
        """Combine the bases of the sequences in a batch. Return None if they have none.

        A basis that all sequences share is returned unchanged. Otherwise, the matrices are concatenated to `[P, d, r]`,
        one per sequence and KV head.
        """
        present = [basis for basis in bases if basis is not None]
        if all(basis is bases[0] for basis in bases):
            return bases[0]
        return cls(torch.cat([b.query for b in present]), torch.cat([b.key for b in present]), present[0].scale)

    def skew_queries(self, q: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Skew and scale queries `[H, B, d]` of a batch: contiguous `[P, G, r]`, with P = B * Hkv."""
        return dispatch.skew_queries(q, self.query, kv_heads, self.scale)


class Columns(Protocol):
    """Chooses which columns of the skewed keys the scoring keys of a sequence contain."""

    @property
    def nbytes(self) -> int:
        """Size in bytes of matrices that only this sequence uses."""
        ...

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Observe the queries `[H, m, d]` of a prefill chunk."""
        ...

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        """Return the basis for new keys k `[Hkv, m, d]` of a layer. The first call fixes it."""
        ...

    def fork(self) -> Columns: ...


class CalibratedColumns:
    """Columns fixed at calibration, the same for all sequences, so that prefixes can be shared."""

    nbytes = 0

    def __init__(self, bases: dict[int, Basis]) -> None:
        """Set the basis of each layer that selects tokens. Each contains only the stored columns."""
        self._bases = bases

    def observe(self, layer: int, q: torch.Tensor) -> None: ...

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        return self._bases[layer]

    def fork(self) -> CalibratedColumns:
        return self


class PromptColumns:
    """Columns chosen from the prompt (paper §4.3): those with the largest sum of |Q~| + |K~| over its tokens.

    Q~ and K~ are the skewed queries and keys. The columns of a layer and KV head are chosen when its first keys arrive,
    and do not change. The sum includes Q~ of all query heads in the group.
    """

    def __init__(self, bases: dict[int, Basis], columns: int) -> None:
        """Set the full basis of each layer that selects tokens, and the number of columns to choose per KV head."""
        self._bases = bases
        self._kept = columns
        self._sums: dict[int, torch.Tensor] = {}
        self._chosen: dict[int, Basis] = {}

    @property
    def nbytes(self) -> int:
        return sum(basis.nbytes for basis in self._chosen.values())

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Add |Q~| of the queries to the sum of each column, until the columns are chosen."""
        if layer not in self._chosen:
            basis = self._bases[layer].query
            grouped = q.reshape(basis.shape[0], -1, q.shape[-1])
            self._sums[layer] = self._sums.get(layer, 0) + skew(grouped, basis).abs().sum(1)

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        """Return the layer's basis with the columns chosen for this prompt, in descending order of their sums.

        If sums are equal, the column with the larger weight in calibration comes first.
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
