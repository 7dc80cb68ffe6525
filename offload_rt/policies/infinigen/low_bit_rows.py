"""Low-bit copies of a sequence's rows on the compute device: keys of 4 bits to score with, values of 4 or 2 bits beside
them, so that attention over everything that was not selected can be estimated (the tail).

Keys are stored in a basis in which their rounding costs scores least for its bytes: the calibrated one, its mean taken
away, every column scaled by the square root of its deviation, and mixed. Values are mixed too; what is mixed is turned
back once, in the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core import ModelGeometry
from ...errors import ConfigError
from ...kernels import dispatch
from ...kernels.lists import Scores
from ...kernels.low_bit import Layout, LowBitQuery, mixing, packs
from ...kernels.pages import BLOCK, Pages, PageTable
from ...kernels.selection import skew
from ...skewing.artifact import SkewArtifact
from .bases import Basis
from .layer_pages import LayerPages
from .scoring import LEARNED_AT_ONCE

WAITING = 32
"""Newest rows that wait on a processor to be turned and rounded together, which takes about as long as one by one row.
They lie in the recent window, where nothing reads them yet; whoever does finds them rounded."""

VALUE_BITS = {"int4": 4, "int2": 2}
"""Bits of a number of a value, by the name of the option."""


def row_bytes(tail: str, geometry: ModelGeometry) -> float:
    """Bytes of the low-bit rows of one token of one layer. Raises ConfigError like `row_layout`."""
    return geometry.kv_heads * row_layout(tail, geometry).block_bytes / BLOCK


def row_layout(tail: str, geometry: ModelGeometry) -> Layout:
    """Return the block layout. Raises ConfigError if a token's packed numbers do not fill whole bytes."""
    if not packs(geometry.head_dim, VALUE_BITS[tail]):
        other = "" if tail == "int4" or not packs(geometry.head_dim, 4) else "tail='int4', "
        raise ConfigError(
            f"tail={tail!r} cannot pack the model's head_dim={geometry.head_dim} into whole bytes; use {other}"
            "tail='off' or preset='rows'"
        )
    return Layout(geometry.head_dim, VALUE_BITS[tail])


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
    """The rows of one sequence, layer by layer, in pages that forks share until one of them writes to them."""

    def __init__(self, bases: dict[int, RowBasis], layout: Layout, device: torch.device) -> None:
        """bases: of every sparse layer."""
        self._bases, self._layout = bases, layout
        heads = next((own.mean.shape[0] for own in bases.values()), 0)
        self._rows = LayerPages(bases, heads, layout.block_bytes, device)
        self._wait = device.type == "cpu"
        self._keys: dict[int, list[torch.Tensor]] = {}
        self._values: dict[int, list[torch.Tensor]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of this sequence's pages; of those that others have too, its part."""
        return self._rows.nbytes

    def length(self, layer: int) -> int:
        """Tokens whose keys the layer has."""
        return self._rows.length(layer) + len(self._keys.get(layer, ()))

    def write(self, layer: int, k: torch.Tensor, start: int) -> None:
        """Keys k `[Hkv, m, d]` enter the slots from `start` on."""
        if self._wait and k.shape[1] == 1 and start == self.length(layer):
            self._keys.setdefault(layer, []).append(k)
            return
        self._round(layer)
        self._write(layer, k, start)

    def write_values(self, layer: int, v: torch.Tensor, start: int) -> None:
        """Values v `[Hkv, m, d]` enter the slots from `start` on, whose keys came before."""
        assert start + v.shape[1] <= self.length(layer), "keys come before values"
        if start < self._rows.length(layer):
            self._write_values(layer, v, start)
            return
        values = self._values.setdefault(layer, [])
        assert start == self._rows.length(layer) + len(values)
        values.append(v)
        if len(values) >= WAITING:
            self._round(layer)

    def _round(self, layer: int) -> None:
        """Rounds what waits."""
        if keys := self._keys.pop(layer, None):
            start, values = self._rows.length(layer), self._values.pop(layer, None)
            self._write(layer, torch.cat(keys, dim=1), start)
            if values:
                self._write_values(layer, torch.cat(values, dim=1), start)

    def _rounded(self, layer: int, tokens: range) -> Pages:
        """The pages of the layer's rows, only to read, those of `tokens` rounded."""
        if tokens.stop > self._rows.length(layer):
            self._round(layer)
        return self._rows.pages(layer)

    def _write(self, layer: int, k: torch.Tensor, start: int) -> None:
        own = self._bases[layer]
        pages = self.storage(layer, range(start, start + k.shape[1]))
        for at, rows in _pieces(k, start):
            turned = skew(rows, own.basis.key).sub_(own.mean.unsqueeze(1))
            dispatch.store_low_bit(pages, self._layout, turned, at, values=False)

    def _write_values(self, layer: int, v: torch.Tensor, start: int) -> None:
        own = self._bases[layer]
        pages = self.storage(layer, range(start, start + v.shape[1]))
        for at, rows in _pieces(v, start):
            dispatch.store_low_bit(pages, self._layout, rows.to(own.mixing.dtype) @ own.mixing, at, values=True)

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Queries `[H, m, d]` of the prompt change nothing: the basis is calibrated."""

    def move(self, layer: int, source: int, target: int) -> None:
        """The row in slot `source` also takes slot `target`."""
        self._round(layer)
        pages = self.storage(layer, range(target, target + 1))
        [(read, here, _)] = pages.parts(range(source, source + 1))
        [(written, there, _)] = pages.parts(range(target, target + 1))
        (block, row), (into, place) = divmod(here.start, BLOCK), divmod(there.start, BLOCK)
        for parts in (self._layout.keys, self._layout.values):
            for old, new in zip(parts(read), parts(written), strict=True):
                new[:, into, place] = old[:, block, row]

    def ask(self, layer: int, q: torch.Tensor, tokens: range) -> LowBitQuery:
        """What q `[H, d]` asks the rows of `tokens`, before they change."""
        queries, pages = self._bases[layer].queries(q), self._rounded(layer, tokens)
        return dispatch.ask_low_bit(*queries, pages, self._layout, tokens)

    def basis(self, layer: int) -> Basis:
        """What keys and queries are multiplied with, all columns."""
        return self._bases[layer].basis

    def attend(
        self, layer: int, asked: LowBitQuery, skip: torch.Tensor, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of what `ask` returned, without the tokens skip int64 `[Hkv, n]`, scores capped where the model's
        are: out `[H, d]`, lse `[H]`."""
        out, lse = asked.tail(skip, softcap)
        return out.flatten(0, 1) @ self._bases[layer].mixing.T, lse.flatten()

    def storage(self, layer: int, slots: range) -> Pages:
        """The pages of the layer's rows; those of `slots`, which count as written from now on, are private."""
        self._round(layer)
        return self._rows.reserve(layer, slots)

    def enter(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        basis: Basis,
        table: PageTable,
        slots: torch.Tensor,
    ) -> None:
        """Rounds the newest rows k, v `[P, d]` of a batch into slot `slots[p]` of their table."""
        own = self._bases[layer]
        dispatch.append_low_bit(k, v, basis.key, own.mean, own.mixing, self._layout, table, slots)

    def found(
        self,
        layer: int,
        q: torch.Tensor,
        table: PageTable,
        starts: torch.Tensor,
        stops: torch.Tensor,
        tokens: int,
    ) -> Scores:
        """Scores of queries q `[P, G, d]` of a batch with its low-bit keys."""
        return dispatch.score_low_bit(q, self._bases[layer].mean, self._layout, table, starts, stops, tokens)

    def join_tail(
        self,
        layer: int,
        q: torch.Tensor,
        table: PageTable,
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
        return dispatch.join_tail(q, own.mean, own.mixing, self._layout, table, starts, stops, *chosen, tokens, *exact)

    def fork(self, tokens: int | None = None) -> LowBitRows:
        """The rows of the first `tokens` tokens (None: all); a page is copied when either side writes to it."""
        for layer in list(self._keys):
            self._round(layer)
        twin = object.__new__(LowBitRows)
        twin._bases, twin._layout, twin._rows = self._bases, self._layout, self._rows.fork(tokens)
        twin._wait, twin._keys, twin._values = self._wait, {}, {}
        return twin

    def check_integrity(self) -> None:
        """Asserts that the pages hold the tokens of every layer, and know whose they are."""
        self._rows.check_integrity()
        for layer, keys in self._keys.items():
            assert len(self._values.get(layer, ())) in (len(keys), len(keys) - 1) and len(keys) <= WAITING


def _pieces(rows: torch.Tensor, start: int) -> list[tuple[int, torch.Tensor]]:
    """`rows` `[Hkv, m, d]` in pieces of so many as are rounded together, each with the slot of its first."""
    firsts = range(0, rows.shape[1], LEARNED_AT_ONCE)
    return [(start + first, rows[:, first : first + LEARNED_AT_ONCE]) for first in firsts]
