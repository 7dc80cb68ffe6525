"""Bases of skewed queries and keys (InfiniGen eq. 2), and the choice of the columns that scoring keys keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...kernels.selection import floor_share, skew


@dataclass(frozen=True, eq=False)
class Basis:
    """Matrices that skew the queries and keys of a layer, `[Hkv, d, r]` each, and the model's `scale` of q·k."""

    query: torch.Tensor
    key: torch.Tensor
    scale: float

    @property
    def nbytes(self) -> int:
        """Size in bytes of both matrices."""
        return self.query.nbytes + (0 if self.key is self.query else self.key.nbytes)

    def columns(self, kept: torch.Tensor) -> Basis:
        """Return the basis of the columns `kept` (int64 `[Hkv, r]`) of each KV head."""
        index = kept.unsqueeze(1).expand(-1, self.query.shape[1], -1)
        return Basis(self.query.gather(2, index), self.key.gather(2, index), self.scale)

    def skew_query(self, q: torch.Tensor) -> torch.Tensor:
        """Skew and scale q `[H, d]` to `[Hkv, G, r]`."""
        return skew(q.view(self.query.shape[0], -1, self.query.shape[1]), self.query).mul_(self.scale)

    @classmethod
    def stacked(cls, bases: Sequence[Basis | None]) -> Basis | None:
        """Return the common basis if all sequences share it.

        Otherwise concatenate their bases to `[P, d, r]`, one matrix per list.
        """
        each = [basis for basis in bases if basis is not None]
        if all(basis is bases[0] for basis in bases):
            return bases[0]
        return cls(torch.cat([b.query for b in each]), torch.cat([b.key for b in each]), each[0].scale)

    def skew_queries(self, q: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Skew and scale q `[H, B, d]` of a batch to contiguous `[P, G, r]`, by a shared or `stacked` basis."""
        (bases, d, r), batch = self.query.shape, q.shape[1]
        grouped = q.reshape(kv_heads, -1, batch, d).permute(2, 0, 1, 3)
        if bases > kv_heads:
            return skew(grouped.flatten(0, 1), self.query).mul_(self.scale)
        skewed = skew(grouped.transpose(0, 1).flatten(1, 2), self.query).mul_(self.scale)
        return skewed.view(kv_heads, batch, -1, r).transpose(0, 1).flatten(0, 1)


class Columns(Protocol):
    """Chooses the basis of the partial keys of a sequence in each layer."""

    @property
    def nbytes(self) -> int:
        """Size in bytes of the matrices of this sequence."""
        ...

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Observe queries `[H, m, d]` of the prompt."""
        ...

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        """Return the basis for new keys k `[Hkv, m, d]`. It is fixed by the first call for a layer."""
        ...

    def fork(self) -> Columns:
        """Return an independent copy."""
        ...


class CalibratedColumns:
    """Columns fixed at calibration. They are the same for every sequence, so prefixes can be shared."""

    nbytes = 0
    """0, because the bases belong to the policy."""

    def __init__(self, bases: dict[int, Basis]) -> None:
        """Create the columns from the basis of each sparse layer, reduced to the stored columns."""
        self._bases = bases

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """No-op, because the columns are fixed."""

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        return self._bases[layer]

    def fork(self) -> CalibratedColumns:
        """Return this object, which is immutable."""
        return self


class PromptColumns:
    """The rule of the paper (§4.3): the columns with the largest sum of |Q~| + |K~| over the prompt.

    Columns are chosen per layer and KV head, with Q~ of all query heads of the group, when the layer gets its first
    keys. They are then fixed for the sequence.
    """

    def __init__(self, bases: dict[int, Basis], kept: int) -> None:
        """Create the columns from the full basis of each sparse layer. `kept` columns are chosen."""
        self._bases = bases
        self._kept = kept
        self._sums: dict[int, torch.Tensor] = {}
        self._chosen: dict[int, Basis] = {}

    @property
    def nbytes(self) -> int:
        """Size in bytes of the bases chosen for this sequence."""
        return sum(basis.nbytes for basis in self._chosen.values())

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Add |Q~| per column. Later prompts of the sequence have no effect."""
        if layer not in self._chosen:
            basis = self._bases[layer].query
            grouped = q.reshape(basis.shape[0], -1, q.shape[-1])
            self._sums[layer] = self._sums.get(layer, 0) + skew(grouped, basis).abs().sum(1)

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        """Return the basis of the columns with the largest sums, in descending order.

        Ties go to the more important column in calibration.
        """
        if layer not in self._chosen:
            full = self._bases[layer]
            sums = self._sums.pop(layer, 0) + skew(k, full.key).abs().sum(1)
            order = sums.sort(dim=1, descending=True, stable=True).indices
            self._chosen[layer] = full.columns(order[:, : self._kept])
        return self._chosen[layer]

    def fork(self) -> PromptColumns:
        """Return a copy that shares the chosen matrices, which never change."""
        twin = PromptColumns(self._bases, self._kept)
        twin._sums, twin._chosen = dict(self._sums), dict(self._chosen)
        return twin


def kept_columns(partial_ratio: float, head_dim: int) -> int:
    """Return r, the fraction `partial_ratio` of the head dimension, rounded down but at least 1."""
    return max(1, floor_share(partial_ratio, head_dim))
