"""Scoring keys: the compressed copy of a sequence's keys that stays on the device, only to score tokens with
(DESIGN section 6: partial columns in the model's dtype or as int8, or every column as int4 or int2).

The int8, int4 and int2 keys are quantised the moment they enter. That equals keeping the newest ones in full precision
until they leave the resident window, because a selection reads only candidates, all older than the window: no score
that chooses a token is ever computed from a younger key. (A repair also estimates the resident tokens' mass from them.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..kernels import dispatch
from ..kernels.lists import Scores
from ..kernels.selection import (
    GAUSSIAN_STEP,
    dot_scores,
    floor_share,
    pack,
    quantise,
    quantised_scores,
    select_quantised,
    select_tokens,
    skew,
    unpack,
)
from .counted import bounds
from .growing import GrowingTensor

LEARNED_AT_ONCE = 4096
"""Keys that are skewed and rounded together: a prompt's would take several times the room of the layer's own."""


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


class ScoringKeys(Protocol):
    """Scoring keys of one sequence, layer by layer."""

    @property
    def bytes(self) -> int:
        """Bytes allocated for this sequence."""
        ...

    def length(self, layer: int) -> int:
        """Tokens whose keys the layer has."""
        ...

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Queries `[H, m, d]` of the prompt went by."""
        ...

    def write(self, layer: int, k: torch.Tensor, start: int) -> None:
        """Keys k `[Hkv, m, d]` enter the slots from `start` on, at most where those that the layer has end."""
        ...

    def move(self, layer: int, source: int, target: int) -> None:
        """The key in slot `source` also takes slot `target`."""
        ...

    def scores(self, layer: int, q: torch.Tensor, tokens: range) -> torch.Tensor:
        """Estimated attention scores `[Hkv, G, n]` of q `[H, d]` with `tokens`, model's scale included; float32
        (float64 for a float64 model)."""
        ...

    def select(self, layer: int, q: torch.Tensor, tokens: range, alpha: float, max_fraction: float) -> torch.Tensor:
        """`select_tokens` of those scores: int64 `[Hkv, n]`, counted from the first of `tokens`."""
        ...

    def found(self, layer: int, q: torch.Tensor, tokens: range) -> Scores:
        """Those scores of all slots that there are, -inf outside `tokens`, with maximum and lse, by the kernels of the
        decode step."""
        ...

    def fork(self) -> ScoringKeys:
        """An independent copy."""
        ...

    def check_integrity(self) -> None:
        """Asserts that every layer's storage holds its tokens."""
        ...


class PartialKeys:
    """Scorer "partial": r columns in the model's dtype, stored `[Hkv, r, capacity]`, so that scoring is one batched
    product that reads r contiguous rows per head, and a new key is one column."""

    def __init__(self, columns: Columns, dtype: torch.dtype, device: torch.device) -> None:
        self._columns = columns
        self._dtype, self._device = dtype, device
        self._keys: dict[int, GrowingTensor] = {}
        self._bases: dict[int, Basis] = {}
        self._lengths: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """Keys, and the matrices of columns chosen from the prompt."""
        return sum(keys.nbytes for keys in self._keys.values()) + self._columns.nbytes

    def length(self, layer: int) -> int:
        """Tokens whose keys the layer has."""
        return self._lengths.get(layer, 0)

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Queries `[H, m, d]` of the prompt, for columns chosen from it."""
        self._columns.observe(layer, q)

    def write(self, layer: int, k: torch.Tensor, start: int) -> None:
        """Skews keys k `[Hkv, m, d]` and stores them as columns."""
        if layer not in self._bases:
            self._bases[layer] = self._columns.basis(layer, k)
            kv_heads, _, r = self._bases[layer].key.shape
            self._keys[layer] = GrowingTensor((kv_heads, r, 0), 2, self._dtype, self._device)
        basis = self._bases[layer].key
        self._lengths[layer] = max(self.length(layer), start + k.shape[1])
        data = self._keys[layer].reserve(self._lengths[layer])
        for rows in k.split(LEARNED_AT_ONCE, dim=1):
            stop = start + rows.shape[1]
            data[:, :, start:stop] = torch.bmm(basis.transpose(1, 2), rows.to(basis.dtype).transpose(1, 2))
            start = stop

    def move(self, layer: int, source: int, target: int) -> None:
        """Copies a column."""
        data = self._keys[layer].reserve(self.length(layer))
        data[:, :, target] = data[:, :, source]

    def scores(self, layer: int, q: torch.Tensor, tokens: range) -> torch.Tensor:
        """As `ScoringKeys.scores`; reads r numbers per token and KV head."""
        return dot_scores(self._bases[layer].skew_query(q), self._keys[layer].data[:, :, tokens.start : tokens.stop])

    def select(self, layer: int, q: torch.Tensor, tokens: range, alpha: float, max_fraction: float) -> torch.Tensor:
        """As `ScoringKeys.select`."""
        return select_tokens(self.scores(layer, q, tokens), alpha, max_fraction)

    def found(self, layer: int, q: torch.Tensor, tokens: range) -> Scores:
        """As `ScoringKeys.found`."""
        skewed = self._bases[layer].skew_query(q)
        return dispatch.partial_scores(skewed, self._keys[layer].data, *bounds(len(skewed), tokens, q.device))

    def fork(self) -> PartialKeys:
        """Copies on the first write of either side."""
        twin = PartialKeys(self._columns.fork(), self._dtype, self._device)
        twin._keys = {layer: keys.fork() for layer, keys in self._keys.items()}
        twin._bases, twin._lengths = dict(self._bases), dict(self._lengths)
        return twin

    def check_integrity(self) -> None:
        """Asserts that every layer's storage holds its tokens."""
        assert self._keys.keys() == self._bases.keys() == self._lengths.keys()
        for layer, keys in self._keys.items():
            assert keys.data.shape[:2] == (self._bases[layer].key.shape[0], self._bases[layer].key.shape[2])
            assert 0 < self._lengths[layer] <= keys.data.shape[2]


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
    by neighbouring tokens into bytes `[Hkv, capacity / f, d]` (f = 8 / bits), so that one token's columns lie side by
    side for an int8 product."""

    def __init__(self, quantisers: dict[int, Quantiser], bits: int, device: torch.device) -> None:
        """quantisers: of every sparse layer; they belong to the policy, their bytes are not counted here."""
        self._quantisers = quantisers
        self._bits, self._fields = bits, 8 // bits
        self._device = device
        self._packed: dict[int, GrowingTensor] = {}
        self._lengths: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """Packed keys."""
        return sum(packed.nbytes for packed in self._packed.values())

    def length(self, layer: int) -> int:
        """Tokens whose keys the layer has."""
        return self._lengths.get(layer, 0)

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Nothing to choose: all columns are kept."""

    def write(self, layer: int, k: torch.Tensor, start: int) -> None:
        """Skews, quantises and packs keys k `[Hkv, m, d]`; other tokens in the same bytes keep their codes."""
        if layer not in self._packed:
            shape = (k.shape[0], 0, self._quantisers[layer].mean.shape[1])
            self._packed[layer] = GrowingTensor(shape, 1, torch.int8, self._device)
        self._packed[layer].reserve(-(-max(self.length(layer), start + k.shape[1]) // self._fields))
        for rows in k.split(LEARNED_AT_ONCE, dim=1):
            self._write(layer, rows, start)
            start += rows.shape[1]

    def _write(self, layer: int, k: torch.Tensor, start: int) -> None:
        """`write` of as many keys as are rounded together."""
        quantiser = self._quantisers[layer]
        (kv_heads, added, _), d = k.shape, quantiser.mean.shape[1]
        first, last = start // self._fields, -(-(start + added) // self._fields)
        begun, known = start - first * self._fields, self.length(layer)
        self._lengths[layer] = max(known, start + added)
        data = self._packed[layer].reserve(-(-self._lengths[layer] // self._fields))
        entering = quantise(skew(k, quantiser.basis.key), quantiser.mean, quantiser.step, self._bits)
        if self._fields == 1:
            data[:, first:last] = pack(entering, self._bits)
            return
        codes = torch.zeros(kv_heads, (last - first) * self._fields, d, dtype=torch.uint8, device=self._device)
        if known > first * self._fields:
            there = min(last, -(-known // self._fields)) - first
            codes[:, : there * self._fields] = unpack(data[:, first : first + there], self._bits)
        codes[:, begun : begun + added] = entering
        data[:, first:last] = pack(codes, self._bits)

    def move(self, layer: int, source: int, target: int) -> None:
        """Copies one token's codes between bytes."""
        data = self._packed[layer].reserve(-(-self.length(layer) // self._fields))
        (byte, field), (into, place) = divmod(source, self._fields), divmod(target, self._fields)
        codes = unpack(data[:, into : into + 1], self._bits)
        codes[:, place] = unpack(data[:, byte : byte + 1], self._bits)[:, field]
        data[:, into : into + 1] = pack(codes, self._bits)

    def scores(self, layer: int, q: torch.Tensor, tokens: range) -> torch.Tensor:
        """As `ScoringKeys.scores`; reads bits * d / 8 bytes per token and KV head."""
        packed, within = self._bytes_of(layer, tokens)
        quantiser = self._quantisers[layer]
        skewed = quantiser.basis.skew_query(q)
        return quantised_scores(skewed, packed, quantiser.mean, quantiser.step, self._bits)[:, :, within]

    def select(self, layer: int, q: torch.Tensor, tokens: range, alpha: float, max_fraction: float) -> torch.Tensor:
        """As `ScoringKeys.select`."""
        packed, within = self._bytes_of(layer, tokens)
        quantiser = self._quantisers[layer]
        skewed = quantiser.basis.skew_query(q)
        return select_quantised(skewed, packed, quantiser.mean, quantiser.step, self._bits, within, alpha, max_fraction)

    def found(self, layer: int, q: torch.Tensor, tokens: range) -> Scores:
        """As `ScoringKeys.found`."""
        quantiser, packed = self._quantisers[layer], self._packed[layer].data
        skewed, ends = quantiser.basis.skew_query(q), bounds(len(packed), tokens, q.device)
        return dispatch.quantised_scores(skewed, packed, quantiser.mean, quantiser.step, self._bits, *ends)

    def _bytes_of(self, layer: int, tokens: range) -> tuple[torch.Tensor, slice]:
        """The packed keys `[Hkv, m, d]` that hold `tokens`, and where these are among the codes."""
        first, last = tokens.start // self._fields, -(-tokens.stop // self._fields)
        begin = tokens.start - first * self._fields
        return self._packed[layer].data[:, first:last], slice(begin, begin + len(tokens))

    def fork(self) -> QuantisedKeys:
        """Copies on the first write of either side."""
        twin = QuantisedKeys(self._quantisers, self._bits, self._device)
        twin._packed = {layer: packed.fork() for layer, packed in self._packed.items()}
        twin._lengths = dict(self._lengths)
        return twin

    def check_integrity(self) -> None:
        """Asserts that every layer's storage holds its tokens."""
        assert self._packed.keys() == self._lengths.keys()
        for layer, packed in self._packed.items():
            assert 0 < self._lengths[layer] <= packed.data.shape[1] * self._fields
