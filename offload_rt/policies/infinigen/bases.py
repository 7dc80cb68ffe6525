"""What queries and keys are multiplied with before scoring keys are compared (InfiniGen eq. 2), and which columns of it
a sequence keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...kernels.selection import floor_share, skew


@dataclass(frozen=True, eq=False)
class Basis:
    """What one layer's queries and keys are multiplied with before they are compared: query and key `[Hkv, d, r]`,
    and the model's own `scale` of q·k."""

    query: torch.Tensor
    key: torch.Tensor
    scale: float

    @property
    def nbytes(self) -> int:
        """Bytes of both matrices."""
        return self.query.nbytes + (0 if self.key is self.query else self.key.nbytes)

    def columns(self, kept: torch.Tensor) -> Basis:
        """The columns `kept` (int64 `[Hkv, r]`) of each KV head."""
        index = kept.unsqueeze(1).expand(-1, self.query.shape[1], -1)
        return Basis(self.query.gather(2, index), self.key.gather(2, index), self.scale)

    def skew_query(self, q: torch.Tensor) -> torch.Tensor:
        """q `[H, d]` as `[Hkv, G, r]`: skewed and scaled."""
        return skew(q.view(self.query.shape[0], -1, self.query.shape[1]), self.query).mul_(self.scale)

    @classmethod
    def stacked(cls, bases: Sequence[Basis]) -> Basis:
        """One basis for the lists of several sequences: the one they share, else `[P, d, r]`, each list its own."""
        first = bases[0]
        if all(basis is first for basis in bases):
            return first
        return cls(torch.cat([b.query for b in bases]), torch.cat([b.key for b in bases]), first.scale)

    def skew_queries(self, q: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """q `[H, B, d]` of a batch as `[P, G, r]`, contiguous: skewed and scaled, with a basis that they share or one
        that is `stacked`."""
        (bases, d, r), batch = self.query.shape, q.shape[1]
        grouped = q.reshape(kv_heads, -1, batch, d).permute(2, 0, 1, 3)
        if bases > kv_heads:
            return skew(grouped.flatten(0, 1), self.query).mul_(self.scale)
        skewed = skew(grouped.transpose(0, 1).flatten(1, 2), self.query).mul_(self.scale)
        return skewed.view(kv_heads, batch, -1, r).transpose(0, 1).flatten(0, 1)


class Columns(Protocol):
    """Which basis a sequence's partial keys of each layer are in."""

    @property
    def nbytes(self) -> int:
        """Bytes of matrices that belong to this sequence alone."""
        ...

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Queries `[H, m, d]` of the prompt went by."""
        ...

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        """The basis for keys k `[Hkv, m, d]` that enter now; the same ever after its first call for a layer."""
        ...

    def fork(self) -> Columns:
        """An independent copy."""
        ...


class CalibratedColumns:
    """Columns fixed at calibration: the same for every sequence, so prefixes may be shared."""

    nbytes = 0
    """The bases belong to the policy, not to a sequence."""

    def __init__(self, bases: dict[int, Basis]) -> None:
        """bases: of every sparse layer, cut to the kept columns."""
        self._bases = bases

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Nothing left to choose."""

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        """As calibrated."""
        return self._bases[layer]

    def fork(self) -> CalibratedColumns:
        """Immutable, so the same."""
        return self


class PromptColumns:
    """The paper's rule (§4.3): of each layer and KV head the columns with the largest sum of |Q~| + |K~| over the
    prompt, Q~ of all the group's query heads. Chosen at the layer's first keys, then fixed for the sequence."""

    def __init__(self, bases: dict[int, Basis], kept: int) -> None:
        """bases: of every sparse layer, with all d columns; `kept` of them are chosen."""
        self._bases = bases
        self._kept = kept
        self._sums: dict[int, torch.Tensor] = {}
        self._chosen: dict[int, Basis] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the chosen columns' matrices, this sequence's own."""
        return sum(basis.nbytes for basis in self._chosen.values())

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Adds |Q~| per column; a later prompt of the same sequence changes nothing."""
        if layer not in self._chosen:
            basis = self._bases[layer].query
            grouped = q.reshape(basis.shape[0], -1, q.shape[-1])
            self._sums[layer] = self._sums.get(layer, 0) + skew(grouped, basis).abs().sum(1)

    def basis(self, layer: int, k: torch.Tensor) -> Basis:
        """The chosen columns, by falling sum; of equal sums the column of larger importance in calibration."""
        if layer not in self._chosen:
            full = self._bases[layer]
            sums = self._sums.pop(layer, 0) + skew(k, full.key).abs().sum(1)
            order = sums.sort(dim=1, descending=True, stable=True).indices
            self._chosen[layer] = full.columns(order[:, : self._kept])
        return self._chosen[layer]

    def fork(self) -> PromptColumns:
        """Shares the chosen matrices, which never change."""
        twin = PromptColumns(self._bases, self._kept)
        twin._sums, twin._chosen = dict(self._sums), dict(self._chosen)
        return twin


def kept_columns(partial_ratio: float, head_dim: int) -> int:
    """r: the share `partial_ratio` of the head dimension, rounded down, at least 1."""
    return max(1, floor_share(partial_ratio, head_dim))
