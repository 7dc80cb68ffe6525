"""Scoring keys: the compressed copy of a sequence's keys that stays on the device, only to score tokens with
(partial columns in the model's dtype or as int8, or every column as int4 or int2).

The int8, int4 and int2 keys are quantised the moment they enter. That equals keeping the newest ones in full precision
until they leave the resident window, because a selection reads only candidates, all older than the window: no score
that chooses a token is ever computed from a younger key. (A repair also estimates the resident tokens' mass from them.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core import ModelGeometry
from ...kernels import dispatch
from ...kernels.lists import Scores
from ...kernels.pointer_table import PointerTable
from ...kernels.selection import (
    GAUSSIAN_STEP,
    dot_scores,
    pack,
    quantise,
    quantised_scores,
    select_quantised,
    select_tokens,
    skew,
    top_scored,
    unpack,
)
from ..growing import LayerTensors
from .bases import Basis, Columns, kept_columns
from .scoring_keys import KeyQuery

LEARNED_AT_ONCE = 4096
"""Keys that are skewed and rounded together: a prompt's would take several times the room of the layer's own."""


BITS = {"int8": 8, "int4": 4, "int2": 2}
"""Bits of a column of `QuantisedKeys`, by the scorer's name."""


ROW_BYTES = 16
"""Rows of `QuantisedKeys` begin at multiples of so many bytes: what a device loads at once."""


TOKENS_PER_BYTE = 4
"""The most tokens whose codes share a byte (int2)."""


def key_bytes(scorer: str, partial_ratio: float, geometry: ModelGeometry, dtype: torch.dtype) -> int:
    """Bytes of the scoring keys of one token of one layer: scorers "partial" and "int8" keep the share `partial_ratio`
    of the columns, "int4" and "int2" pack all of them."""
    if scorer == "partial":
        head = kept_columns(partial_ratio, geometry.head_dim) * dtype.itemsize
    else:
        columns = kept_columns(partial_ratio, geometry.head_dim) if scorer == "int8" else geometry.head_dim
        head = row_width(columns) * BITS[scorer] // 8
    return geometry.kv_heads * head


def row_width(columns: int) -> int:
    """Bytes of a row of `QuantisedKeys` with so many columns."""
    return -(-columns // ROW_BYTES) * ROW_BYTES


class PartialKeys:
    """Scorer "partial": r columns in the model's dtype, stored `[Hkv, r, capacity]`, so that scoring is one batched
    product that reads r contiguous rows per head, and a new key is one column."""

    def __init__(self, columns: Columns, dtype: torch.dtype, device: torch.device) -> None:
        self._columns = columns
        self._keys = LayerTensors(2, dtype, device)
        self._bases: dict[int, Basis] = {}

    @property
    def bytes(self) -> int:
        """Keys, and the matrices of columns chosen from the prompt."""
        return self._keys.nbytes + self._columns.nbytes

    def length(self, layer: int) -> int:
        """Tokens whose keys the layer has."""
        return self._keys.length(layer)

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Queries `[H, m, d]` of the prompt, for columns chosen from it."""
        self._columns.observe(layer, q)

    def write(self, layer: int, k: torch.Tensor, start: int) -> None:
        """Skews keys k `[Hkv, m, d]` and stores them as columns."""
        if layer not in self._bases:
            self._bases[layer] = self._columns.basis(layer, k)
            kv_heads, _, r = self._bases[layer].key.shape
            self._keys.open(layer, kv_heads, r, 0)
        basis, data = self._bases[layer].key, self.storage(layer, range(start, start + k.shape[1]))
        for rows in k.split(LEARNED_AT_ONCE, dim=1):
            stop = start + rows.shape[1]
            data[:, :, start:stop] = torch.bmm(basis.transpose(1, 2), rows.to(basis.dtype).transpose(1, 2))
            start = stop

    def move(self, layer: int, source: int, target: int) -> None:
        """Copies a column."""
        data = self._keys.reserve(layer, self.length(layer))
        data[:, :, target] = data[:, :, source]

    def ask(self, layer: int, q: torch.Tensor, tokens: range) -> KeyQuery:
        """By these columns."""
        return _Asked(self, layer, q, tokens)

    def scores(self, layer: int, q: torch.Tensor, tokens: range) -> torch.Tensor:
        """Products of the skewed query and the columns; reads r numbers per token and KV head."""
        return dot_scores(self._bases[layer].skew_query(q), self._keys.data(layer)[:, :, tokens.start : tokens.stop])

    def select(self, layer: int, q: torch.Tensor, tokens: range, alpha: float, max_fraction: float) -> torch.Tensor:
        """Threshold and best score, from the scores: int64 `[Hkv, n]`, counted from the first of `tokens`."""
        return select_tokens(self.scores(layer, q, tokens), alpha, max_fraction)

    def top(self, layer: int, q: torch.Tensor, tokens: range, n: int) -> torch.Tensor:
        """The n of `tokens` that score highest: int64 `[Hkv, n]`, counted from the first of `tokens`."""
        return top_scored(self.scores(layer, q, tokens), n)

    def basis(self, layer: int) -> Basis:
        """Of the layer's kept columns."""
        return self._bases[layer]

    def storage(self, layer: int, slots: range) -> torch.Tensor:
        """The columns `[Hkv, r, capacity]`, with room for `slots`, which count as written from now on."""
        return self._keys.reserve(layer, slots.stop)

    def enter(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        basis: Basis,
        storages: PointerTable,
        slots: torch.Tensor,
    ) -> None:
        """Skews the newest keys k `[P, d]` of a batch into column `slots[p]` of their storages."""
        dispatch.append_partial(k, basis.key, storages, slots)

    def found(
        self,
        layer: int,
        q: torch.Tensor,
        storages: PointerTable,
        starts: torch.Tensor,
        stops: torch.Tensor,
        tokens: int,
    ) -> Scores:
        """Scores of queries q `[P, G, r]` of a batch with its columns."""
        return dispatch.partial_scores(q, storages, starts, stops, tokens)

    def fork(self) -> PartialKeys:
        """Copies on the first write of either side."""
        twin = object.__new__(PartialKeys)
        twin._columns, twin._keys, twin._bases = self._columns.fork(), self._keys.fork(), dict(self._bases)
        return twin

    def check_integrity(self) -> None:
        """Asserts that every layer's storage holds its tokens."""
        self._keys.check_integrity()
        assert self._keys.layers == self._bases.keys()
        for layer, basis in self._bases.items():
            assert self._keys.data(layer).shape[:2] == (basis.key.shape[0], basis.key.shape[2])


@dataclass(frozen=True, eq=False)
class Quantiser:
    """Static scales of one layer's skewed keys, in all d columns of `basis`: mean and step `[Hkv, d]`."""

    basis: Basis
    mean: torch.Tensor
    step: torch.Tensor

    @classmethod
    def fit(cls, basis: Basis, mean: torch.Tensor, std: torch.Tensor, bits: int) -> Quantiser:
        """Steps for Gaussian columns of `std` `[Hkv, d]` around `mean`. A column that never varied in calibration
        gets a thousandth of its head's widest."""
        floor = std.amax(-1, keepdim=True).clamp_min(1e-6) / 1000
        return cls(basis, mean.contiguous(), std.maximum(floor) * GAUSSIAN_STEP[bits])


class QuantisedKeys:
    """Scorers "int8" (r kept columns, which stand for d in all shapes here), "int4" and "int2" (all d columns), packed
    by neighbouring tokens into bytes `[Hkv, capacity / f, w]` (f = 8 / bits), so that one token's columns lie side by
    side for an int8 product. Of the w = `row_width(d)` bytes of a row the first d count."""

    def __init__(self, quantisers: dict[int, Quantiser], bits: int, device: torch.device) -> None:
        """quantisers: of every sparse layer; they belong to the policy, their bytes are not counted here."""
        self._quantisers = quantisers
        self._bits, self._fields = bits, 8 // bits
        self._packed = LayerTensors(1, torch.int8, device, per_slot=self._fields)

    @property
    def bytes(self) -> int:
        """Packed keys."""
        return self._packed.nbytes

    def length(self, layer: int) -> int:
        """Tokens whose keys the layer has."""
        return self._packed.length(layer)

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Nothing to choose: all columns are kept."""

    def write(self, layer: int, k: torch.Tensor, start: int) -> None:
        """Skews, quantises and packs keys k `[Hkv, m, d]`; other tokens in the same bytes keep their codes."""
        self._packed.open(layer, k.shape[0], 0, row_width(self._quantisers[layer].mean.shape[1]))
        known = self.length(layer)
        data = self.storage(layer, range(start, start + k.shape[1]))
        for rows in k.split(LEARNED_AT_ONCE, dim=1):
            self._write(layer, data, rows, start, max(known, start))
            start += rows.shape[1]

    def _write(self, layer: int, data: torch.Tensor, k: torch.Tensor, start: int, known: int) -> None:
        """`write` of as many keys as are rounded together, into `data`, which has the codes of `known` tokens."""
        quantiser = self._quantisers[layer]
        (kv_heads, added, _), d = k.shape, quantiser.mean.shape[1]
        first, last = start // self._fields, -(-(start + added) // self._fields)
        begun = start - first * self._fields
        entering = quantise(skew(k, quantiser.basis.key), quantiser.mean, quantiser.step, self._bits)
        data = data[:, :, :d]
        if self._fields == 1:
            data[:, first:last] = pack(entering, self._bits)
            return
        codes = torch.zeros(kv_heads, (last - first) * self._fields, d, dtype=torch.uint8, device=k.device)
        if known > first * self._fields:
            there = min(last, -(-known // self._fields)) - first
            codes[:, : there * self._fields] = unpack(data[:, first : first + there], self._bits)
        codes[:, begun : begun + added] = entering
        data[:, first:last] = pack(codes, self._bits)

    def move(self, layer: int, source: int, target: int) -> None:
        """Copies one token's codes between bytes."""
        data = self.storage(layer, range(target, target + 1))
        (byte, field), (into, place) = divmod(source, self._fields), divmod(target, self._fields)
        codes = unpack(data[:, into : into + 1], self._bits)
        codes[:, place] = unpack(data[:, byte : byte + 1], self._bits)[:, field]
        data[:, into : into + 1] = pack(codes, self._bits)

    def ask(self, layer: int, q: torch.Tensor, tokens: range) -> KeyQuery:
        """By these codes."""
        return _Asked(self, layer, q, tokens)

    def scores(self, layer: int, q: torch.Tensor, tokens: range) -> torch.Tensor:
        """Integer products of the rounded query and the codes; reads bits * d / 8 bytes per token and KV head."""
        packed, within = self._bytes_of(layer, tokens)
        quantiser = self._quantisers[layer]
        skewed = quantiser.basis.skew_query(q)
        return quantised_scores(skewed, packed, quantiser.mean, quantiser.step, self._bits)[:, :, within]

    def select(self, layer: int, q: torch.Tensor, tokens: range, alpha: float, max_fraction: float) -> torch.Tensor:
        """Threshold and best score, on integer sums where the group allows it: int64 `[Hkv, n]`, counted from the first
        of `tokens`."""
        packed, within = self._bytes_of(layer, tokens)
        quantiser = self._quantisers[layer]
        skewed = quantiser.basis.skew_query(q)
        return select_quantised(skewed, packed, quantiser.mean, quantiser.step, self._bits, within, alpha, max_fraction)

    def top(self, layer: int, q: torch.Tensor, tokens: range, n: int) -> torch.Tensor:
        """The n of `tokens` that score highest: int64 `[Hkv, n]`, counted from the first of `tokens`."""
        return top_scored(self.scores(layer, q, tokens), n)

    def basis(self, layer: int) -> Basis:
        """Of the layer's quantiser."""
        return self._quantisers[layer].basis

    def storage(self, layer: int, slots: range) -> torch.Tensor:
        """The codes `[Hkv, capacity / f, w]`, with room for `slots`, which count as written from now on."""
        return self._packed.reserve(layer, slots.stop)

    def enter(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        basis: Basis,
        storages: PointerTable,
        slots: torch.Tensor,
    ) -> None:
        """Skews, rounds and packs the newest keys k `[P, d]` of a batch into slot `slots[p]` of their storages."""
        own = self._quantisers[layer]
        dispatch.append_quantised(k, basis.key, own.mean, own.step, self._bits, storages, slots)

    def found(
        self,
        layer: int,
        q: torch.Tensor,
        storages: PointerTable,
        starts: torch.Tensor,
        stops: torch.Tensor,
        tokens: int,
    ) -> Scores:
        """Scores of queries q `[P, G, d]` of a batch with its codes."""
        own = self._quantisers[layer]
        return dispatch.quantised_scores(q, storages, own.mean, own.step, self._bits, starts, stops, tokens)

    def _bytes_of(self, layer: int, tokens: range) -> tuple[torch.Tensor, slice]:
        """The packed keys `[Hkv, m, d]` that hold `tokens`, and where these are among the codes."""
        first, last = tokens.start // self._fields, -(-tokens.stop // self._fields)
        begin = tokens.start - first * self._fields
        columns = self._quantisers[layer].mean.shape[1]
        return self._packed.data(layer)[:, first:last, :columns], slice(begin, begin + len(tokens))

    def fork(self) -> QuantisedKeys:
        """Copies on the first write of either side."""
        twin = object.__new__(QuantisedKeys)
        twin._quantisers, twin._bits, twin._fields = self._quantisers, self._bits, self._fields
        twin._packed = self._packed.fork()
        return twin

    def check_integrity(self) -> None:
        """Asserts that every layer's storage holds its tokens."""
        self._packed.check_integrity()


@dataclass(frozen=True, eq=False)
class _Asked:
    """The `KeyQuery` of keys that are asked once."""

    keys: PartialKeys | QuantisedKeys
    layer: int
    q: torch.Tensor
    tokens: range

    @property
    def scores(self) -> torch.Tensor:
        """`[Hkv, G, n]`."""
        return self.keys.scores(self.layer, self.q, self.tokens)

    def select(self, alpha: float, max_fraction: float) -> torch.Tensor:
        """int64 `[Hkv, n]`."""
        return self.keys.select(self.layer, self.q, self.tokens, alpha, max_fraction)

    def top(self, n: int) -> torch.Tensor:
        """int64 `[Hkv, n]`."""
        return self.keys.top(self.layer, self.q, self.tokens, n)
