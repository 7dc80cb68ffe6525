"""Scoring keys: compressed keys of a sequence, with which its tokens are scored.

A scoring key contains either some columns of the skewed key, in the model's dtype or as int8, or all columns as int4 or
int2.
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
    skew,
    unpack,
)
from ..growing import LayerTensors
from ..rule import CandidateSpans
from .bases import Basis, ColumnChoice, stored_columns

PROMPT_KEYS_AT_ONCE = 4096
"""Number of prompt keys that are skewed and quantised at a time, to limit temporary memory."""


BITS = {"int8": 8, "int4": 4, "int2": 2}
"""Number of bits per element of `QuantisedKeys`, by the name of the scorer."""


ROW_BYTES = 16
"""Rows of `QuantisedKeys` are padded to a multiple of this number of bytes, the size of one vector load."""


TOKENS_PER_BYTE = 4
"""Maximum number of tokens whose codes are packed into one byte (int2)."""


def key_bytes(scorer: str, partial_ratio: float, geometry: ModelGeometry, dtype: torch.dtype) -> int:
    """Return the size in bytes of one token's scoring key in one layer."""
    if scorer == "partial":
        head = stored_columns(partial_ratio, geometry.head_dim) * dtype.itemsize
    else:
        columns = stored_columns(partial_ratio, geometry.head_dim) if scorer == "int8" else geometry.head_dim
        head = row_width(columns) * BITS[scorer] // 8
    return geometry.kv_heads * head


def row_width(columns: int) -> int:
    """Return the number of bytes of a row with `columns` columns, padded to a multiple of `ROW_BYTES`."""
    return -(-columns // ROW_BYTES) * ROW_BYTES


class PartialKeys:
    """Scoring keys of the scorer "partial": r columns of each skewed key in the model's dtype, `[Hkv, r, capacity]`.

    Tokens are on the last axis, so scoring is a single batched matrix product that reads r contiguous rows per head.
    """

    def __init__(self, columns: ColumnChoice, dtype: torch.dtype, device: torch.device) -> None:
        self._columns = columns
        self._keys = LayerTensors(2, dtype, device)
        self._bases: dict[int, Basis] = {}

    @property
    def bytes(self) -> int:
        return self._keys.nbytes + self._columns.nbytes

    def length(self, layer: int) -> int:
        return self._keys.length(layer)

    def observe(self, layer: int, q: torch.Tensor) -> None:
        self._columns.observe(layer, q)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        assert start <= self.length(layer), f"layer {layer} has {self.length(layer)} keys, not {start}"
        if layer not in self._bases:
            self._bases[layer] = self._columns.basis(layer, k)
            kv_heads, _, r = self._bases[layer].key.shape
            self._keys.open(layer, kv_heads, r, 0)
        basis, data = self._bases[layer].key, self.storage(layer, range(start, start + k.shape[1]))
        for rows in k.split(PROMPT_KEYS_AT_ONCE, dim=1):
            stop = start + rows.shape[1]
            data[:, :, start:stop] = torch.bmm(basis.transpose(1, 2), rows.to(basis.dtype).transpose(1, 2))
            start = stop

    def move(self, layer: int, source: int, target: int) -> None:
        data = self._keys.reserve(layer, self.length(layer))
        data[:, :, target] = data[:, :, source]

    def scores(self, layer: int, q: torch.Tensor, tokens: range) -> torch.Tensor:
        columns = self._keys.data(layer)[:, :, tokens.start : tokens.stop]
        return dot_scores(self._bases[layer].skew_query(q), columns)

    def basis(self, layer: int) -> Basis:
        return self._bases[layer]

    def storage(self, layer: int, slots: range) -> torch.Tensor:
        return self._keys.reserve(layer, slots.stop)

    def append_batch(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        basis: Basis,
        storages: PointerTable,
        slots: torch.Tensor,
    ) -> None:
        dispatch.append_partial(k, basis.key, storages, slots)

    def score_batch(
        self, layer: int, q: torch.Tensor, basis: Basis, storages: PointerTable, spans: CandidateSpans
    ) -> Scores:
        skewed = basis.skew_queries(q, storages.heads)
        return dispatch.partial_scores(skewed, storages, spans.starts, spans.stops, spans.tokens)

    def fork(self) -> PartialKeys:
        copy = object.__new__(PartialKeys)
        copy._columns, copy._keys, copy._bases = self._columns.fork(), self._keys.fork(), dict(self._bases)
        return copy

    def check_integrity(self) -> None:
        self._keys.check_integrity()
        assert self._keys.layers == self._bases.keys()
        for layer, basis in self._bases.items():
            assert self._keys.data(layer).shape[:2] == (basis.key.shape[0], basis.key.shape[2])


@dataclass(frozen=True, eq=False)
class Quantiser:
    """Quantiser for the skewed keys of one layer. Its parameters are fixed at calibration.

    For each column, `mean` is the centre of the quantisation levels, and `step` is the distance between adjacent
    levels. Both are `[Hkv, d]`.
    """

    basis: Basis
    mean: torch.Tensor
    step: torch.Tensor

    @classmethod
    def fit(cls, basis: Basis, mean: torch.Tensor, std: torch.Tensor, bits: int) -> Quantiser:
        """Return the best quantiser for normally distributed columns with the given `mean` and `std` (`[Hkv, d]`)."""
        # If a column was constant in calibration, use a thousandth of the largest standard deviation of its head.
        floor = std.amax(-1, keepdim=True).clamp_min(1e-6) / 1000
        return cls(basis, mean.contiguous(), std.maximum(floor) * GAUSSIAN_STEP[bits])


class QuantisedKeys:
    """Scoring keys of the scorers "int8" (some columns), "int4" and "int2" (all columns).

    The keys of a layer are stored in a tensor `[Hkv, capacity / f, w]`. Each byte contains the codes of f = 8 / bits
    adjacent tokens for one column. The columns of a token are contiguous, as int8 matrix products require, and are
    padded to w = `row_width(columns)` bytes.
    """

    def __init__(self, quantisers: dict[int, Quantiser], bits: int, device: torch.device) -> None:
        """Create empty keys. All sequences share the `quantisers`, so `bytes` does not include their size."""
        self._quantisers = quantisers
        self._bits, self._fields = bits, 8 // bits
        self._packed = LayerTensors(1, torch.int8, device, tokens_per_slot=self._fields)

    @property
    def bytes(self) -> int:
        return self._packed.nbytes

    def length(self, layer: int) -> int:
        return self._packed.length(layer)

    def observe(self, layer: int, q: torch.Tensor) -> None: ...

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        self._packed.open(layer, k.shape[0], 0, row_width(self._quantisers[layer].mean.shape[1]))
        stored = self.length(layer)
        assert start <= stored, f"layer {layer} has {stored} keys, not {start}"
        data = self.storage(layer, range(start, start + k.shape[1]))
        # The newest keys do not need full precision, because resident tokens are not candidates. Only repairs score
        # resident tokens too.
        for rows in k.split(PROMPT_KEYS_AT_ONCE, dim=1):
            self._write(layer, data, rows, start, max(stored, start))
            start += rows.shape[1]

    def _write(self, layer: int, data: torch.Tensor, k: torch.Tensor, start: int, stored: int) -> None:
        """Write the codes of keys k into `data`, beginning with token `start`. Codes of other tokens do not change.

        The first `stored` tokens in `data` already have valid codes.
        """
        quantiser = self._quantisers[layer]
        (kv_heads, added, _), d = k.shape, quantiser.mean.shape[1]
        first, last = start // self._fields, -(-(start + added) // self._fields)
        offset = start - first * self._fields
        new_codes = quantise(skew(k, quantiser.basis.key), quantiser.mean, quantiser.step, self._bits)
        data = data[:, :, :d]
        if self._fields == 1:
            data[:, first:last] = pack(new_codes, self._bits)
            return
        codes = torch.zeros(kv_heads, (last - first) * self._fields, d, dtype=torch.uint8, device=k.device)
        if stored > first * self._fields:
            valid_bytes = min(last, -(-stored // self._fields)) - first
            codes[:, : valid_bytes * self._fields] = unpack(data[:, first : first + valid_bytes], self._bits)
        codes[:, offset : offset + added] = new_codes
        data[:, first:last] = pack(codes, self._bits)

    def move(self, layer: int, source: int, target: int) -> None:
        data = self.storage(layer, range(target, target + 1))
        source_byte, source_field = divmod(source, self._fields)
        target_byte, target_field = divmod(target, self._fields)
        codes = unpack(data[:, target_byte : target_byte + 1], self._bits)
        codes[:, target_field] = unpack(data[:, source_byte : source_byte + 1], self._bits)[:, source_field]
        data[:, target_byte : target_byte + 1] = pack(codes, self._bits)

    def scores(self, layer: int, q: torch.Tensor, tokens: range) -> torch.Tensor:
        first, last = tokens.start // self._fields, -(-tokens.stop // self._fields)
        offset = tokens.start - first * self._fields
        quantiser = self._quantisers[layer]
        packed = self._packed.data(layer)[:, first:last, : quantiser.mean.shape[1]]
        scores = quantised_scores(quantiser.basis.skew_query(q), packed, quantiser.mean, quantiser.step, self._bits)
        return scores[:, :, offset : offset + len(tokens)]

    def basis(self, layer: int) -> Basis:
        return self._quantisers[layer].basis

    def storage(self, layer: int, slots: range) -> torch.Tensor:
        return self._packed.reserve(layer, slots.stop)

    def append_batch(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        basis: Basis,
        storages: PointerTable,
        slots: torch.Tensor,
    ) -> None:
        quantiser = self._quantisers[layer]
        dispatch.append_quantised(k, basis.key, quantiser.mean, quantiser.step, self._bits, storages, slots)

    def score_batch(
        self, layer: int, q: torch.Tensor, basis: Basis, storages: PointerTable, spans: CandidateSpans
    ) -> Scores:
        quantiser, skewed = self._quantisers[layer], basis.skew_queries(q, storages.heads)
        return dispatch.quantised_scores(
            skewed, storages, quantiser.mean, quantiser.step, self._bits, spans.starts, spans.stops, spans.tokens
        )

    def fork(self) -> QuantisedKeys:
        copy = object.__new__(QuantisedKeys)
        copy._quantisers, copy._bits, copy._fields = self._quantisers, self._bits, self._fields
        copy._packed = self._packed.fork()
        return copy

    def check_integrity(self) -> None:
        self._packed.check_integrity()
