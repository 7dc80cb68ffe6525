"""Approximate KV of a sequence on the compute device, in pages: quantised keys and values of all its tokens.

The 4-bit keys score all tokens. With the 4-bit or 2-bit values, they estimate attention to tokens that were not
selected.

Keys are transformed to the calibrated basis and centred. Then each column is scaled by the square root of its standard
deviation, and a rotation is applied, which minimises the effect of quantisation on the scores. Values are rotated
before quantisation, and the attention output is rotated back once.

In models with latent attention, the elements of a key after its value (`ModelGeometry.value_dim`) are left out of the
rotation of values. They would increase the quantisation error.
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
from ..rule import Spans
from .bases import Basis
from .scoring import PROMPT_KEYS_AT_ONCE

WAITING = 32
"""Number of new tokens that wait until they are quantised together on a CPU.

A group takes about as long as a single token. Waiting tokens are in the recent window, so they are not candidates.
"""

VALUE_BITS = {"int4": 4, "int2": 2}
"""Number of bits per element of approximate values, by the value of option `approximate_kv`."""


def row_bytes(approximate_kv: str, geometry: ModelGeometry) -> float:
    """Return the size in bytes of a token's approximate KV in one layer. Raise ConfigError like `row_layout`."""
    return geometry.kv_heads * row_layout(approximate_kv, geometry).block_bytes / BLOCK


def row_layout(approximate_kv: str, geometry: ModelGeometry) -> Layout:
    """Return the block layout of approximate KV. Raise ConfigError if a token does not fill whole bytes."""
    if not packs(geometry.head_dim, VALUE_BITS[approximate_kv]):
        other = "" if approximate_kv == "int4" or not packs(geometry.head_dim, 4) else "approximate_kv='int4', "
        raise ConfigError(
            f"approximate_kv={approximate_kv!r} cannot pack the model's head_dim={geometry.head_dim} into whole bytes; "
            f"use {other}approximate_kv='off' or preset='rows'"
        )
    return Layout(geometry.head_dim, VALUE_BITS[approximate_kv])


def basis_bytes(geometry: ModelGeometry, compute: torch.dtype) -> int:
    """Return the size in bytes of a layer's `RowBasis` in dtype `compute`."""
    d = geometry.head_dim
    return (geometry.kv_heads * (2 * d + 1) * d + 2 * d * d) * compute.itemsize


@dataclass(frozen=True, eq=False)
class RowBasis:
    """Matrices of one layer that are applied to keys, queries and values before quantisation.

    Attributes:
        basis: Basis of queries and keys, with all columns.
        mean: Mean of the keys in this basis, `[Hkv, d]`.
        mixing: Rotation of the values, `[d, d]`. Its rows after `value_dim` are 0.
        unmixing: Transposed `mixing`, its inverse for values.
    """

    basis: Basis
    mean: torch.Tensor
    mixing: torch.Tensor
    unmixing: torch.Tensor

    @classmethod
    def of(cls, artifact: SkewArtifact, layer: int, geometry: ModelGeometry, dtype: torch.dtype) -> RowBasis:
        """Compute the matrices of a layer from its calibration."""
        mixed = mixing(artifact.query.shape[-1]).to(artifact.query.device)
        std = artifact.key_std[layer].double()
        stretch = std.clamp_min(1e-3 * std.amax().clamp_min(1e-30)).sqrt().unsqueeze(1)
        query = (artifact.query[layer].double() / stretch) @ mixed
        key = (artifact.key[layer].double() * stretch) @ mixed
        mean = (artifact.key_mean[layer].double() * stretch.squeeze(1)) @ mixed
        basis = Basis(query.to(dtype).contiguous(), key.to(dtype).contiguous(), geometry.scales[layer])
        mixed[geometry.value_dim or geometry.head_dim :] = 0
        return cls(basis, mean.to(dtype), mixed.to(dtype), mixed.T.to(dtype).contiguous())

    @property
    def nbytes(self) -> int:
        return self.basis.nbytes + self.mean.nbytes + self.mixing.nbytes + self.unmixing.nbytes


class Page:
    """A page `[L, Hkv, PAGE_BLOCKS, block_bytes]`, with weak references to the `LayerPages` that use it (`holders`)."""

    def __init__(self, rows: torch.Tensor, holder: LayerPages) -> None:
        self.rows = rows
        self.holders: WeakSet[LayerPages] = WeakSet((holder,))


class LayerPages:
    """Pages of one sequence, and the token count of each layer. A page stores `PAGE_TOKENS` tokens of all layers.

    A page that is shared with a fork is read-only, and copied before a write.
    """

    def __init__(self, layers: Iterable[int], heads: int, block_bytes: int, device: torch.device) -> None:
        self._at = {layer: i for i, layer in enumerate(layers)}
        self._shape, self._device = (len(self._at), heads, PAGE_BLOCKS, block_bytes), device
        self.lengths = dict.fromkeys(self._at, 0)
        self._pages: list[Page] = []
        self._shown: dict[int, Pages] = {}

    @property
    def nbytes(self) -> int:
        """Size in bytes of the pages. The size of a shared page is divided among its sequences."""
        return round(sum(page.rows.nbytes / len(page.holders) for page in self._pages))

    def pages(self, layer: int) -> Pages:
        """Return the pages of the layer for reading, the same object until a page is added or copied."""
        if layer not in self._shown:
            tensors = tuple(page.rows for page in self._pages)
            first = next(iter(self._shown.values()), None)
            self._shown[layer] = (
                Pages.of(tensors, self._at[layer]) if first is None else first.of_layer(self._at[layer])
            )
        return self._shown[layer]

    def reserve(self, layer: int, tokens: range) -> Pages:
        """Return the pages of the layer for writing `tokens`, which extend its length.

        Pages are added, or copied if they are shared. `tokens` must not start after the end of the layer.
        """
        assert tokens.start <= self.lengths[layer], "tokens must be contiguous"
        for at in range(tokens.start // PAGE_TOKENS, -(-tokens.stop // PAGE_TOKENS)):
            if at == len(self._pages):
                self._pages.append(Page(torch.empty(self._shape, dtype=torch.uint8, device=self._device), self))
                self._shown = {}
            elif len(self._pages[at].holders) > 1:
                self._copy(at)
        self.lengths[layer] = max(self.lengths[layer], tokens.stop)
        return self.pages(layer)

    def _copy(self, at: int) -> None:
        """Replace a shared page by a private copy of the blocks with tokens of this sequence."""
        shared = self._pages[at]
        blocks = min(PAGE_BLOCKS, -(-max(self.lengths.values()) // BLOCK) - at * PAGE_BLOCKS)
        own = Page(torch.empty_like(shared.rows), self)
        own.rows[:, :, :blocks] = shared.rows[:, :, :blocks]
        shared.holders.discard(self)
        self._pages[at], self._shown = own, {}

    def fork(self, tokens: int | None = None) -> LayerPages:
        """Return a copy of the first `tokens` tokens (None: all) that shares their pages."""
        twin = object.__new__(LayerPages)
        twin._at, twin._shape, twin._device, twin._shown = self._at, self._shape, self._device, {}
        most = max(self.lengths.values(), default=0) if tokens is None else tokens
        twin.lengths = {layer: min(length, most) for layer, length in self.lengths.items()}
        twin._pages = self._pages[: -(-most // PAGE_TOKENS)]
        for page in twin._pages:
            page.holders.add(twin)
        return twin

    def check_integrity(self) -> None:
        assert max(self.lengths.values(), default=0) <= len(self._pages) * PAGE_TOKENS
        for at, page in enumerate(self._pages):
            assert self in page.holders and page.rows.shape == self._shape
            assert all(other._pages[at] is page for other in page.holders)
        for layer, shown in self._shown.items():
            assert shown.layer == self._at[layer]
            assert [own.data_ptr() for own in shown.tensors] == shown.addresses.tolist()
            assert all(own is page.rows for own, page in zip(shown.tensors, self._pages, strict=True))


class LowBitRows:
    """Approximate KV of one sequence in pages. Forks share the pages with copy-on-write."""

    def __init__(self, bases: dict[int, RowBasis], layout: Layout, device: torch.device) -> None:
        """Create empty approximate KV. `bases` has the matrices of each layer that selects tokens."""
        self.bases, self._layout = bases, layout
        heads = next((own.mean.shape[0] for own in bases.values()), 0)
        self._rows = LayerPages(bases, heads, layout.block_bytes, device)
        self._waits = device.type == "cpu"
        self._waiting: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {layer: [] for layer in bases}
        """K and V of the newest tokens of each layer, which are not quantised yet."""

    @property
    def bytes(self) -> int:
        """Size in bytes of the pages. The size of a shared page is divided among its sequences."""
        return self._rows.nbytes

    def length(self, layer: int) -> int:
        """Return the number of tokens, including those that wait to be quantised."""
        return self._rows.lengths[layer] + len(self._waiting[layer]) if layer in self.bases else 0

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        waiting = self._waiting[layer]
        known = self._rows.lengths[layer] + len(waiting)
        assert start <= known, f"layer {layer} has {known} tokens, not {start}"
        if not self._waits or k.shape[1] > 1 or start < known:
            self._quantise_waiting(layer)
            self._quantise(layer, k, v, start)
            return
        waiting.append((k, v))
        if len(waiting) == WAITING:
            self._quantise_waiting(layer)

    def _quantise_waiting(self, layer: int) -> None:
        if waiting := self._waiting[layer]:
            self._waiting[layer] = []
            k, v = (torch.cat(rows, dim=1) for rows in zip(*waiting, strict=True))
            self._quantise(layer, k, v, self._rows.lengths[layer])

    def _quantise(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        """Quantise k and v `[Hkv, m, d]`, `PROMPT_KEYS_AT_ONCE` tokens at a time, and write them to the pages."""
        own, stop = self.bases[layer], start + k.shape[1]
        pages = self._rows.reserve(layer, range(start, stop))
        for first in range(start, stop, PROMPT_KEYS_AT_ONCE):
            piece = slice(first - start, first - start + PROMPT_KEYS_AT_ONCE)
            keys = skew(k[:, piece], own.basis.key).sub_(own.mean.unsqueeze(1))
            store_rows(pages, self._layout, keys, first, values=False)
            values = v[:, piece].to(own.mixing) @ own.mixing
            store_rows(pages, self._layout, values, first, values=True)

    def observe(self, layer: int, q: torch.Tensor) -> None: ...

    def move(self, layer: int, source: int, target: int) -> None:
        """Copy the KV entry in slot `source` to slot `target`."""
        pages = self.storage(layer, range(target, target + 1))
        [(read, here, _)] = pages.parts(range(source, source + 1))
        [(written, there, _)] = pages.parts(range(target, target + 1))
        (block, row), (into, place) = divmod(here.start, BLOCK), divmod(there.start, BLOCK)
        for parts in (self._layout.keys, self._layout.values):
            for old, new in zip(parts(read), parts(written), strict=True):
                new[:, into, place] = old[:, block, row]

    def scores(self, layer: int, q: torch.Tensor, tokens: range) -> torch.Tensor:
        return self.query(layer, q, tokens).scores

    def query(self, layer: int, q: torch.Tensor, tokens: range) -> LowBitQuery | NativeQuery:
        """Return an object that scores `tokens` for query q `[H, d]`, valid until the stored keys change."""
        if tokens.stop > self._rows.lengths[layer]:
            self._quantise_waiting(layer)
        own, pages = self.bases[layer], self._rows.pages(layer)
        return low_bit_query(own.basis.skew_query(q), own.mean, pages, self._layout, tokens)

    def basis(self, layer: int) -> Basis:
        return self.bases[layer].basis

    def storage(self, layer: int, slots: range) -> Pages:
        self._quantise_waiting(layer)
        return self._rows.reserve(layer, slots)

    def append_batch(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        basis: Basis,
        table: PageTable,
        slots: torch.Tensor,
    ) -> None:
        own = self.bases[layer]
        dispatch.append_low_bit(k, v, basis.key, own.mean, own.mixing, self._layout, table, slots)

    def score_batch(self, layer: int, q: torch.Tensor, basis: Basis, table: PageTable, spans: Spans) -> Scores:
        skewed, mean = basis.skew_queries(q, table.heads), self.bases[layer].mean
        return dispatch.score_low_bit(skewed, mean, self._layout, table, spans.starts, spans.stops, spans.tokens)

    def merge_approximate(
        self,
        layer: int,
        q: torch.Tensor,
        table: PageTable,
        spans: Spans,
        chosen: tuple[torch.Tensor, torch.Tensor],
        exact: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge exact attention of a batch with approximate attention to the candidates that were not selected.

        Args:
            layer: The layer index.
            q: True queries `[H, B, d]`.
            table: The pages of all sequences of the batch.
            spans: The candidates.
            chosen: Selected token indices and their counts. Approximate attention skips these tokens.
            exact: Exact attention: out `[P, G, d]` and lse `[P, G]`, with P = B * Hkv.

        Returns:
            Merged out `[P, G, d]` and lse `[P, G]`.
        """
        own, skewed = self.bases[layer], self.bases[layer].basis.skew_queries(q, table.heads)
        return dispatch.merge_approximate(
            skewed, own.mean, own.mixing, self._layout, table, spans.starts, spans.stops, *chosen, spans.tokens, *exact
        )

    def fork(self, tokens: int | None = None) -> LowBitRows:
        """Return a copy-on-write copy of the first `tokens` tokens (None: all)."""
        for layer in self.bases:
            self._quantise_waiting(layer)
        twin = object.__new__(LowBitRows)
        twin.bases, twin._layout, twin._rows = self.bases, self._layout, self._rows.fork(tokens)
        twin._waits, twin._waiting = self._waits, {layer: [] for layer in self.bases}
        return twin

    def check_integrity(self) -> None:
        self._rows.check_integrity()
        assert all(len(waiting) < WAITING for waiting in self._waiting.values())
