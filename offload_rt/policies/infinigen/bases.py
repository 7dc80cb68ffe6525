"""Bases of skewed queries and keys (InfiniGen eq. 2), and the choice of columns that scoring keys store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...kernels import dispatch
from ...kernels.selection import floor_share, skew


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
        """Size in bytes of both matrices."""
        return self.query.nbytes + (0 if self.key is self.query else self.key.nbytes)

    def columns(self, kept: torch.Tensor) -> Basis:
        """Return the basis with only the columns `kept`, int64 `[Hkv, r]`, of each KV head."""
        index = kept.unsqueeze(1).expand(-1, self.query.shape[1], -1)
        return Basis(self.query.gather(2, index), self.key.gather(2, index), self.scale)

    def skew_query(self, q: torch.Tensor) -> torch.Tensor:
        """Skew a query q `[H, d]` and multiply it by the attention scale: `[Hkv, G, r]`."""
        return skew(q.view(self.query.shape[0], -1, self.query.shape[1]), self.query).mul_(self.scale)

    @classmethod
    def stacked(cls, bases: Sequence[Basis | None]) -> Basis | None:
        """Combine the bases of the sequences in a batch. Return None if they have none.

        If all sequences share one basis, return it. Otherwise concatenate their matrices to `[P, d, r]`, one per
        sequence and KV head.
        """
        each = [basis for basis in bases if basis is not None]
        if all(basis is bases[0] for basis in bases):
            return bases[0]
        return cls(torch.cat([b.query for b in each]), torch.cat([b.key for b in each]), each[0].scale)

    def skew_queries(self, q: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Skew and scale queries q `[H, B, d]` of a batch: contiguous `[P, G, r]`, with P = B * Hkv.

        This basis is shared by all sequences or was made by `stacked`.
        """
        return dispatch.skew_queries(q, self.query, kv_heads, self.scale)


class Columns(Protocol):
    """Chooses which columns of the skewed keys the scoring keys of a sequence contain, layer by layer."""

    @property
    def nbytes(self) -> int:
        """Size in bytes of the matrices that belong to this sequence only."""
        ...

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Observe the queries `[H, m, d]` of a prefill chunk."""
        ...

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        """Return the layer's basis for new keys k `[Hkv, m, d]`. The first call for a layer fixes the basis."""
        ...

    def fork(self) -> Columns:
        """Return an independent copy."""
        ...


class CalibratedColumns:
    """Columns fixed at calibration. All sequences use the same columns, so prefixes can be shared."""

    nbytes = 0
    """Always 0, because the matrices belong to the policy and not to the sequence."""

    def __init__(self, bases: dict[int, Basis]) -> None:
        """Create the object from the basis of each layer that selects tokens, already reduced to the stored columns."""
        self._bases = bases

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """No-op, because the columns are fixed."""

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        return self._bases[layer]

    def fork(self) -> CalibratedColumns:
        """Return this object, which is immutable."""
        return self


class PromptColumns:
    """Columns chosen from the prompt (paper §4.3): those with the largest sum of |Q~| + |K~| over its tokens.

    Q~ and K~ are the skewed queries and keys. Columns are chosen for each layer and KV head when the first keys of the
    layer arrive. The sum includes Q~ of all query heads in the group. Afterwards, the columns of the sequence do not
    change.
    """

    def __init__(self, bases: dict[int, Basis], kept: int) -> None:
        """Create the object from the full basis of each layer that selects tokens.

        `kept` is the number of columns to choose per KV head.
        """
        self._bases = bases
        self._kept = kept
        self._sums: dict[int, torch.Tensor] = {}
        self._chosen: dict[int, Basis] = {}

    @property
    def nbytes(self) -> int:
        """Size in bytes of the matrices chosen for this sequence."""
        return sum(basis.nbytes for basis in self._chosen.values())

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Add |Q~| of the queries to the sum of each column. Has no effect after the columns have been chosen."""
        if layer not in self._chosen:
            basis = self._bases[layer].query
            grouped = q.reshape(basis.shape[0], -1, q.shape[-1])
            self._sums[layer] = self._sums.get(layer, 0) + skew(grouped, basis).abs().sum(1)

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        """Return the basis with the columns chosen for this prompt: those in which the keys have the largest sums.

        The sums are of absolute values over all tokens. If sums are equal, the column with the larger weight in
        calibration comes first.
        """
        if layer not in self._chosen:
            full = self._bases[layer]
            sums = self._sums.pop(layer, 0) + skew(k, full.key).abs().sum(1)
            order = sums.sort(dim=1, descending=True, stable=True).indices
            self._chosen[layer] = full.columns(order[:, : self._kept])
        return self._chosen[layer]

    def fork(self) -> PromptColumns:
        """Return an independent copy. It shares the chosen matrices, which never change."""
        twin = PromptColumns(self._bases, self._kept)
        twin._sums, twin._chosen = dict(self._sums), dict(self._chosen)
        return twin


def kept_columns(partial_ratio: float, head_dim: int) -> int:
    """Return r, the number of stored columns: `partial_ratio` times `head_dim`, rounded down, at least 1."""
    return max(1, floor_share(partial_ratio, head_dim))
