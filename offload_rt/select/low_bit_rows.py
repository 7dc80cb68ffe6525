"""Low-bit copies of a sequence's rows on the compute device: keys of 4 bits to score with, values of 4 or 2 bits beside
them, so that attention over everything that was not selected can be estimated (the tail).

Keys are stored in a basis in which their rounding costs scores least for its bytes: the calibrated one, its mean taken
away, every column scaled by the square root of its deviation, and mixed. Values are mixed too; what is mixed is turned
back once, in the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core import ModelGeometry
from ..kernels import dispatch
from ..kernels.lists import Scores
from ..kernels.low_bit import BLOCK, Layout, mixing
from ..kernels.pointer_table import PointerTable
from ..kernels.selection import skew
from ..skewing.artifact import SkewArtifact
from .bases import Basis
from .growing import LayerTensors
from .scoring import LEARNED_AT_ONCE

VALUE_BITS = {"int4": 4, "int2": 2}
"""Bits of a number of a value, by the name of the option."""


def row_bytes(tail: str, geometry: ModelGeometry) -> float:
    """Bytes of the low-bit rows of one token of one layer."""
    return geometry.kv_heads * Layout(geometry.head_dim, VALUE_BITS[tail]).block_bytes / BLOCK


def basis_bytes(geometry: ModelGeometry, compute: torch.dtype) -> int:
    """Bytes of one layer's `RowBasis` in `compute`."""
    d = geometry.head_dim
    return (geometry.kv_heads * (2 * d + 1) * d + d * d) * compute.itemsize


@dataclass(frozen=True, eq=False)
class RowBasis:
    """What one layer's keys, queries and values are multiplied with before they are rounded, all columns: `basis` of
    queries and keys, `mean` `[Hkv, d]` of the keys in it, and the values' `mixing` `[d, d]`."""

    basis: Basis
    mean: torch.Tensor
    mixing: torch.Tensor

    @classmethod
    def of(cls, artifact: SkewArtifact, layer: int, scale: float, dtype: torch.dtype) -> RowBasis:
        """Of a layer whose q·k is multiplied with `scale`, in `dtype`, where the artifact lies."""
        mixed = mixing(artifact.query.shape[-1]).to(artifact.query.device)
        std = artifact.key_std[layer].double()
        stretch = std.clamp_min(1e-3 * std.amax().clamp_min(1e-30)).sqrt().unsqueeze(1)
        query = (artifact.query[layer].double() / stretch) @ mixed
        key = (artifact.key[layer].double() * stretch) @ mixed
        mean = (artifact.key_mean[layer].double() * stretch.squeeze(1)) @ mixed
        basis = Basis(query.to(dtype).contiguous(), key.to(dtype).contiguous(), scale)
        return cls(basis, mean.to(dtype), mixed.to(dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return self.basis.nbytes + self.mean.nbytes + self.mixing.nbytes

    def queries(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q `[H, d]` as `[Hkv, G, d]` in the keys' basis and scaled, and the mean of the keys."""
        return self.basis.skew_query(q), self.mean


class LowBitRows:
    """The rows of one sequence, layer by layer: `[Hkv, blocks, block_bytes]` of each (`kernels.low_bit.Layout`)."""

    def __init__(self, bases: dict[int, RowBasis], layout: Layout, device: torch.device) -> None:
        """bases: of every sparse layer."""
        self._bases, self._layout = bases, layout
        self._blocks = LayerTensors(1, torch.uint8, device, per_slot=BLOCK, multiple=1)

    @property
    def bytes(self) -> int:
        """Bytes allocated for this sequence."""
        return self._blocks.nbytes

    def length(self, layer: int) -> int:
        """Tokens whose keys the layer has."""
        return self._blocks.length(layer)

    def write(self, layer: int, k: torch.Tensor, start: int) -> None:
        """Keys k `[Hkv, m, d]` enter the slots from `start` on."""
        own = self._bases[layer]
        storage = self.storage(layer, start + k.shape[1])
        for at, rows in _pieces(k, start):
            turned = skew(rows, own.basis.key).sub_(own.mean.unsqueeze(1))
            dispatch.store_low_bit(storage, self._layout, turned, at, values=False)

    def write_values(self, layer: int, v: torch.Tensor, start: int) -> None:
        """Values v `[Hkv, m, d]` enter the slots from `start` on, whose keys came before."""
        assert start + v.shape[1] <= self.length(layer), "keys come before values"
        own = self._bases[layer]
        storage = self.storage(layer, start + v.shape[1])
        for at, rows in _pieces(v, start):
            dispatch.store_low_bit(storage, self._layout, rows.to(own.mixing.dtype) @ own.mixing, at, values=True)

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Queries `[H, m, d]` of the prompt change nothing: the basis is calibrated."""

    def move(self, layer: int, source: int, target: int) -> None:
        """The row in slot `source` also takes slot `target`."""
        storage = self.storage(layer, self.length(layer))
        (block, row), (into, place) = divmod(source, BLOCK), divmod(target, BLOCK)
        for part in (*self._layout.keys(storage), *self._layout.values(storage)):
            part[:, into, place] = part[:, block, row]

    def scores(self, layer: int, q: torch.Tensor, tokens: range) -> torch.Tensor:
        """Estimated attention scores `[Hkv, G, n]` of q `[H, d]` with `tokens`."""
        queries, storage = self._bases[layer].queries(q), self._blocks.data(layer)
        return dispatch.low_bit_scores(*queries, storage, self._layout, tokens)

    def select(self, layer: int, q: torch.Tensor, tokens: range, alpha: float, max_fraction: float) -> torch.Tensor:
        """Threshold and best score, from the scores: int64 `[Hkv, n]`, counted from the first of `tokens`."""
        queries, storage = self._bases[layer].queries(q), self._blocks.data(layer)
        return dispatch.select_low_bit(*queries, storage, self._layout, tokens, alpha, max_fraction)

    def top(self, layer: int, q: torch.Tensor, tokens: range, n: int) -> torch.Tensor:
        """The n of `tokens` that score highest: int64 `[Hkv, n]`, counted from the first of `tokens`."""
        queries, storage = self._bases[layer].queries(q), self._blocks.data(layer)
        return dispatch.top_low_bit(*queries, storage, self._layout, tokens, n)

    def basis(self, layer: int) -> Basis:
        """What keys and queries are multiplied with, all columns."""
        return self._bases[layer].basis

    def attend(
        self, layer: int, q: torch.Tensor, tokens: range, skip: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of q `[H, d]` over `tokens` without `skip` int64 `[Hkv, n]`: out `[H, d]`, lse `[H]`."""
        own, heads = self._bases[layer], q.shape[0]
        out, lse = dispatch.tail_attention(*own.queries(q), self._blocks.data(layer), self._layout, tokens, skip)
        return out.reshape(heads, -1) @ own.mixing.T, lse.reshape(heads)

    def storage(self, layer: int, slots: int) -> torch.Tensor:
        """Where the layer's rows lie, private and with room for `slots` slots, which count as written from now on."""
        self._blocks.open(layer, self._bases[layer].mean.shape[0], 0, self._layout.block_bytes)
        return self._blocks.reserve(layer, slots)

    def enter(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        basis: Basis,
        storages: PointerTable,
        slots: torch.Tensor,
    ) -> None:
        """Rounds the newest rows k, v `[P, d]` of a batch into slot `slots[p]` of their storages."""
        own = self._bases[layer]
        dispatch.append_low_bit(k, v, basis.key, own.mean, own.mixing, self._layout, storages, slots)

    def found(
        self,
        layer: int,
        q: torch.Tensor,
        storages: PointerTable,
        starts: torch.Tensor,
        stops: torch.Tensor,
        tokens: int,
    ) -> Scores:
        """Scores of queries q `[P, G, d]` of a batch with its low-bit keys."""
        return dispatch.score_low_bit(q, self._bases[layer].mean, self._layout, storages, starts, stops, tokens)

    def join_tail(
        self,
        layer: int,
        q: torch.Tensor,
        storages: PointerTable,
        starts: torch.Tensor,
        stops: torch.Tensor,
        tokens: int,
        chosen: tuple[torch.Tensor, torch.Tensor],
        exact: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`attend` for a batch, with the true queries q `[P, G, d]` in the basis, in one softmax with the exact rows:
        out `[P, G, d]` and lse `[P, G]`, given and returned. What was chosen, and how many of each list are meant, is
        left out."""
        own = self._bases[layer]
        return dispatch.join_tail(
            q, own.mean, own.mixing, self._layout, storages, starts, stops, *chosen, tokens, *exact
        )

    def fork(self) -> LowBitRows:
        """Copies on the first write of either side."""
        twin = object.__new__(LowBitRows)
        twin._bases, twin._layout, twin._blocks = self._bases, self._layout, self._blocks.fork()
        return twin

    def check_integrity(self) -> None:
        """Asserts that every layer's storage holds its tokens."""
        self._blocks.check_integrity()
        assert self._blocks.layers <= self._bases.keys()


def _pieces(rows: torch.Tensor, start: int) -> list[tuple[int, torch.Tensor]]:
    """`rows` `[Hkv, m, d]` in pieces of so many as are rounded together, each with the slot of its first."""
    firsts = range(0, rows.shape[1], LEARNED_AT_ONCE)
    return [(start + first, rows[:, first : first + LEARNED_AT_ONCE]) for first in firsts]
