"""Approximate KV of a sequence on the compute device: quantised keys and values of all its tokens, in pages.

The 4-bit keys are used to score all tokens. Together with the 4-bit or 2-bit values, they are also used to estimate the
attention to tokens that were not selected.

Before quantisation, keys and values are transformed to reduce the quantisation error. Keys are skewed and centred, each
column is scaled by the square root of its standard deviation, and a rotation is applied. Values are only rotated, and
the attention output is rotated back.

With latent attention, the value is the first part of the key (`ModelGeometry.value_dim`). It is rotated and quantised
separately, because the transformation of keys enlarges errors that do not affect scores. With random weights, values
that were taken from the quantised keys had 1.7 to 60 times the output error of 4-bit values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakSet

import torch

from ...core import ModelGeometry
from ...errors import ConfigError
from ...kernels import dispatch
from ...kernels.lists import Scores
from ...kernels.low_bit import Layout, mixing, packs
from ...kernels.low_bit_sequence import LowBitQuery, NativeQuery, low_bit_query, store_rows
from ...kernels.pages import BLOCK, PAGE_BLOCKS, PAGE_TOKENS, Pages, PageTable
from ...kernels.selection import skew
from ...skewing.artifact import SkewArtifact
from ..rule import CandidateSpans
from .bases import Basis
from .scoring import PROMPT_KEYS_AT_ONCE

MAX_PENDING_TOKENS = 32
"""Number of new tokens that are quantised together on a CPU. This takes about as long as quantising a single token.

Tokens that have not been quantised yet are in the recent window, so they are not candidates.
"""

VALUE_BITS = {"int4": 4, "int2": 2}
"""Number of bits per element of approximate values, by the value of the option `approximate_kv`."""


def token_bytes(approximate_kv: str, geometry: ModelGeometry) -> float:
    """Return the size in bytes of one token's approximate KV in one layer. Raises like `approximate_layout`."""
    return geometry.kv_heads * approximate_layout(approximate_kv, geometry).block_bytes / BLOCK


def approximate_layout(approximate_kv: str, geometry: ModelGeometry) -> Layout:
    """Return the block layout of approximate KV. Raises ConfigError if keys or values do not fill whole bytes."""
    if not packs(geometry.head_dim, VALUE_BITS[approximate_kv]):
        alternative = "" if approximate_kv == "int4" or not packs(geometry.head_dim, 4) else "approximate_kv='int4', "
        raise ConfigError(
            f"approximate_kv={approximate_kv!r} cannot pack the model's head_dim={geometry.head_dim} into whole bytes; "
            f"use {alternative}approximate_kv='off' or preset='rows'"
        )
    return Layout(geometry.head_dim, VALUE_BITS[approximate_kv])


def basis_bytes(geometry: ModelGeometry, compute: torch.dtype) -> int:
    """Return the size in bytes of one layer's `ApproximateBasis` with the dtype `compute`."""
    d = geometry.head_dim
    return (geometry.kv_heads * (2 * d + 1) * d + 2 * d * d) * compute.itemsize


@dataclass(frozen=True, eq=False)
class ApproximateBasis:
    """Matrices of one layer that transform queries, keys and values before quantisation."""

    basis: Basis  # basis of queries and keys, with all columns
    mean: torch.Tensor  # mean of the transformed keys, `[Hkv, d]`
    mixing: torch.Tensor  # rotation of the values, `[d, d]`; its rows from `ModelGeometry.value_dim` on are 0
    unmixing: torch.Tensor  # the transpose of `mixing`, which rotates the attention output back

    @classmethod
    def of(cls, artifact: SkewArtifact, layer: int, geometry: ModelGeometry, dtype: torch.dtype) -> ApproximateBasis:
        rotation = mixing(artifact.query.shape[-1]).to(artifact.query.device)
        std = artifact.key_std[layer].double()
        scale = std.clamp_min(1e-3 * std.amax().clamp_min(1e-30)).sqrt().unsqueeze(1)
        query = (artifact.query[layer].double() / scale) @ rotation
        key = (artifact.key[layer].double() * scale) @ rotation
        mean = (artifact.key_mean[layer].double() * scale.squeeze(1)) @ rotation
        basis = Basis(query.to(dtype).contiguous(), key.to(dtype).contiguous(), geometry.scales[layer])
        # With latent attention, values are the first elements of keys. Other elements would only increase the error.
        rotation[geometry.value_dim or geometry.head_dim :] = 0
        return cls(basis, mean.to(dtype), rotation.to(dtype), rotation.T.to(dtype).contiguous())


class Page:
    """A page `[L, Hkv, PAGE_BLOCKS, block_bytes]`, and weak references to the `LayerPages` objects that share it."""

    def __init__(self, rows: torch.Tensor, holder: LayerPages) -> None:
        self.rows = rows
        self.users: WeakSet[LayerPages] = WeakSet((holder,))


class LayerPages:
    """The pages of one sequence. A page has space for `PAGE_TOKENS` tokens in all layers that select tokens.

    Forks share pages. A shared page is copied before it is written.
    """

    def __init__(self, layers: Iterable[int], heads: int, block_bytes: int, device: torch.device) -> None:
        self._index = {layer: i for i, layer in enumerate(layers)}
        self._shape, self._device = (len(self._index), heads, PAGE_BLOCKS, block_bytes), device
        self.lengths = dict.fromkeys(self._index, 0)
        self._pages: list[Page] = []
        self._views: dict[int, Pages] = {}

    @property
    def nbytes(self) -> int:
        """Size in bytes of the pages. The size of a shared page is divided by the number of sequences that share it."""
        return round(sum(page.rows.nbytes / len(page.users) for page in self._pages))

    def pages(self, layer: int) -> Pages:
        """Return the pages of the layer for reading. When a page is added or copied, a new object is returned."""
        if layer not in self._views:
            tensors = tuple(page.rows for page in self._pages)
            first = next(iter(self._views.values()), None)
            self._views[layer] = (
                Pages.of(tensors, self._index[layer]) if first is None else first.of_layer(self._index[layer])
            )
        return self._views[layer]

    def reserve(self, layer: int, tokens: range) -> Pages:
        """Return the pages of the layer for writing. They have space for `tokens` and are not shared with a fork.

        `tokens` must not leave a gap after the last token of the layer.
        """
        assert tokens.start <= self.lengths[layer], "tokens must be contiguous"
        for index in range(tokens.start // PAGE_TOKENS, -(-tokens.stop // PAGE_TOKENS)):
            if index == len(self._pages):
                self._pages.append(Page(torch.empty(self._shape, dtype=torch.uint8, device=self._device), self))
                self._views = {}
            elif len(self._pages[index].users) > 1:
                self._copy(index)
        self.lengths[layer] = max(self.lengths[layer], tokens.stop)
        return self.pages(layer)

    def _copy(self, index: int) -> None:
        shared = self._pages[index]
        blocks = min(PAGE_BLOCKS, -(-max(self.lengths.values()) // BLOCK) - index * PAGE_BLOCKS)
        private = Page(torch.empty_like(shared.rows), self)
        private.rows[:, :, :blocks] = shared.rows[:, :, :blocks]
        shared.users.discard(self)
        self._pages[index], self._views = private, {}

    def fork(self, tokens: int | None = None) -> LayerPages:
        """Return a fork that contains the first `tokens` tokens, or all tokens if `tokens` is None."""
        copy = object.__new__(LayerPages)
        copy._index, copy._shape, copy._device, copy._views = self._index, self._shape, self._device, {}
        count = max(self.lengths.values(), default=0) if tokens is None else tokens
        copy.lengths = {layer: min(length, count) for layer, length in self.lengths.items()}
        copy._pages = self._pages[: -(-count // PAGE_TOKENS)]
        for page in copy._pages:
            page.users.add(copy)
        return copy

    def check_integrity(self) -> None:
        assert max(self.lengths.values(), default=0) <= len(self._pages) * PAGE_TOKENS
        for index, page in enumerate(self._pages):
            assert self in page.users and page.rows.shape == self._shape
            assert all(other._pages[index] is page for other in page.users)
        for layer, view in self._views.items():
            assert view.layer == self._index[layer]
            assert [tensor.data_ptr() for tensor in view.tensors] == view.addresses.tolist()
            assert all(tensor is page.rows for tensor, page in zip(view.tensors, self._pages, strict=True))


class ApproximateKV:
    """Implementation of `ScoringKeys` that stores the approximate KV of one sequence in pages.

    Forks share pages until one of them writes to a page.
    """

    def __init__(self, bases: dict[int, ApproximateBasis], layout: Layout, device: torch.device) -> None:
        self.bases, self._layout = bases, layout
        heads = next((basis.mean.shape[0] for basis in bases.values()), 0)
        self._pages_of_layers = LayerPages(bases, heads, layout.block_bytes, device)
        self._delays_quantisation = device.type == "cpu"
        self._pending: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {layer: [] for layer in bases}
        """For each layer, K and V of the newest tokens, which have not been quantised yet."""

    @property
    def bytes(self) -> int:
        return self._pages_of_layers.nbytes

    def length(self, layer: int) -> int:
        return self._pages_of_layers.lengths[layer] + len(self._pending[layer]) if layer in self.bases else 0

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        pending = self._pending[layer]
        stored = self._pages_of_layers.lengths[layer] + len(pending)
        assert start <= stored, f"layer {layer} has {stored} tokens, not {start}"
        if not self._delays_quantisation or k.shape[1] > 1 or start < stored:
            self._quantise_pending(layer)
            self._quantise(layer, k, v, start)
            return
        pending.append((k, v))
        if len(pending) == MAX_PENDING_TOKENS:
            self._quantise_pending(layer)

    def _quantise_pending(self, layer: int) -> None:
        if pending := self._pending[layer]:
            self._pending[layer] = []
            k, v = (torch.cat(rows, dim=1) for rows in zip(*pending, strict=True))
            self._quantise(layer, k, v, self._pages_of_layers.lengths[layer])

    def _quantise(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        matrices, stop = self.bases[layer], start + k.shape[1]
        pages = self._pages_of_layers.reserve(layer, range(start, stop))
        for first in range(start, stop, PROMPT_KEYS_AT_ONCE):
            part = slice(first - start, first - start + PROMPT_KEYS_AT_ONCE)
            keys = skew(k[:, part], matrices.basis.key).sub_(matrices.mean.unsqueeze(1))
            store_rows(pages, self._layout, keys, first, values=False)
            values = v[:, part].to(matrices.mixing) @ matrices.mixing
            store_rows(pages, self._layout, values, first, values=True)

    def observe(self, layer: int, q: torch.Tensor) -> None: ...

    def move(self, layer: int, source: int, target: int) -> None:
        pages = self.storage(layer, range(target, target + 1))
        [(source_blocks, source_slots, _)] = pages.parts(range(source, source + 1))
        [(target_blocks, target_slots, _)] = pages.parts(range(target, target + 1))
        source_block, source_row = divmod(source_slots.start, BLOCK)
        target_block, target_row = divmod(target_slots.start, BLOCK)
        for parts in (self._layout.keys, self._layout.values):
            for old, new in zip(parts(source_blocks), parts(target_blocks), strict=True):
                new[:, target_block, target_row] = old[:, source_block, source_row]

    def scores(self, layer: int, q: torch.Tensor, tokens: range) -> torch.Tensor:
        return self.query(layer, q, tokens).scores

    def query(self, layer: int, q: torch.Tensor, tokens: range) -> LowBitQuery | NativeQuery:
        """Prepare the query q `[H, d]` for scoring `tokens`. The result is valid until the stored keys change."""
        if tokens.stop > self._pages_of_layers.lengths[layer]:
            self._quantise_pending(layer)
        matrices, pages = self.bases[layer], self._pages_of_layers.pages(layer)
        return low_bit_query(matrices.basis.skew_query(q), matrices.mean, pages, self._layout, tokens)

    def basis(self, layer: int) -> Basis:
        return self.bases[layer].basis

    def storage(self, layer: int, slots: range) -> Pages:
        self._quantise_pending(layer)
        return self._pages_of_layers.reserve(layer, slots)

    def append_batch(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        basis: Basis,
        table: PageTable,
        slots: torch.Tensor,
    ) -> None:
        matrices = self.bases[layer]
        dispatch.append_low_bit(k, v, basis.key, matrices.mean, matrices.mixing, self._layout, table, slots)

    def score_batch(self, layer: int, q: torch.Tensor, basis: Basis, table: PageTable, spans: CandidateSpans) -> Scores:
        skewed, mean = basis.skew_queries(q, table.heads), self.bases[layer].mean
        return dispatch.score_low_bit(skewed, mean, self._layout, table, spans.starts, spans.stops, spans.tokens)

    def merge_approximate(
        self,
        layer: int,
        q: torch.Tensor,
        table: PageTable,
        spans: CandidateSpans,
        selected: tuple[torch.Tensor, torch.Tensor],
        exact: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute `KeyLists.merge_approximate` for the sequences whose pages are in `table`."""
        matrices, skewed = self.bases[layer], self.bases[layer].basis.skew_queries(q, table.heads)
        return dispatch.merge_approximate(
            skewed,
            matrices.mean,
            matrices.mixing,
            self._layout,
            table,
            spans.starts,
            spans.stops,
            *selected,
            spans.tokens,
            *exact,
        )

    def fork(self, tokens: int | None = None) -> ApproximateKV:
        for layer in self.bases:
            self._quantise_pending(layer)
        copy = object.__new__(ApproximateKV)
        copy.bases, copy._layout, copy._pages_of_layers = self.bases, self._layout, self._pages_of_layers.fork(tokens)
        copy._delays_quantisation, copy._pending = self._delays_quantisation, {layer: [] for layer in self.bases}
        return copy

    def check_integrity(self) -> None:
        self._pages_of_layers.check_integrity()
        assert all(len(pending) < MAX_PENDING_TOKENS for pending in self._pending.values())
