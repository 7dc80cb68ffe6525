"""Pages of low-bit KV. A page is a tensor that stores this KV for a fixed number of tokens of one sequence.

A page stores all layers that have low-bit KV: uint8 `[L, Hkv, PAGE_BLOCKS, block_bytes]`, with blocks in the format of
`low_bit.Layout`. Sequences can share pages. Kernels receive the addresses of the pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..utils import native_libraries
from .h2d_copy import to_device
from .pointer_table import ALIGNED

BLOCK = 64

PAGE_BLOCKS = native_libraries.PAGE_BLOCKS

PAGE_TOKENS = PAGE_BLOCKS * BLOCK


@dataclass(frozen=True, eq=False)
class Pages:
    """The pages of one sequence, as seen by one layer."""

    tensors: tuple[torch.Tensor, ...]  # the pages in order
    addresses: torch.Tensor  # addresses of the pages, int64 `[pages]` in host memory
    layer: int  # index of the layer within a page
    # `Pages` of the first layer, which keeps the device copy of `addresses` for all layers. None in the first layer.
    origin: Pages | None = None

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], layer: int = 0) -> Pages:
        return cls(tuple(tensors), addresses_of(tensors), layer)

    def of_layer(self, layer: int) -> Pages:
        return Pages(self.tensors, self.addresses, layer, self.origin or self)

    @property
    def table(self) -> torch.Tensor:
        """Device tensor with the addresses of the pages, int64 `[pages]`. All layers of a sequence share it."""
        return (self.origin or self)._table

    @cached_property
    def _table(self) -> torch.Tensor:
        return to_device(self.addresses, self.tensors[0].device)

    @property
    def heads(self) -> int:
        return self.tensors[0].shape[1]

    @cached_property
    def offset(self) -> int:
        """Offset in bytes of the layer within a page."""
        return self.layer * self.tensors[0].stride(0)

    def parts(self, tokens: range) -> Iterator[tuple[torch.Tensor, slice, slice]]:
        """Split a range of tokens at page boundaries.

        Yields:
            For each page, its blocks `[Hkv, PAGE_BLOCKS, block_bytes]` and two slices for the same tokens: their
            positions in the page, and their positions in `tokens`.
        """
        token = tokens.start
        while token < tokens.stop:
            page = token // PAGE_TOKENS
            first, stop = page * PAGE_TOKENS, min(tokens.stop, (page + 1) * PAGE_TOKENS)
            valid = slice(token - first, stop - first)
            yield self.tensors[page][self.layer], valid, slice(token - tokens.start, stop - tokens.start)
            token = stop


@dataclass(frozen=True, eq=False)
class PageTable:
    """Page addresses of B sequences, as seen by one layer with P = B * Hkv lists (one per sequence and KV head).

    Triton kernels read `table`, and torch functions read `pages`. The caller must keep the two consistent.
    """

    pages: tuple[Pages, ...]  # pages of each sequence, all of one layer and on one device
    # Addresses of the first M pages of each sequence, int64 `[B, M]` on the same device. Entries after a sequence's
    # last page are undefined.
    table: torch.Tensor

    @property
    def heads(self) -> int:
        return self.pages[0].heads

    @property
    def lists(self) -> int:
        return self.heads * len(self.pages)

    @property
    def offset(self) -> int:
        return self.pages[0].offset


def addresses_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the addresses of page tensors, int64 in host memory. The tensors must be aligned to `ALIGNED` bytes."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert all(address % ALIGNED == 0 for address in addresses)
    return torch.tensor(addresses, dtype=torch.int64)


def page_table(pages: Sequence[Pages], max_pages: int) -> torch.Tensor:
    """Return the addresses of the first `max_pages` pages of each sequence, int64 `[B, max_pages]`, padded with 0."""
    table = torch.zeros(len(pages), max_pages, dtype=torch.int64)
    for row, sequence_pages in zip(table, pages, strict=True):
        addresses = sequence_pages.addresses[:max_pages]
        row[: len(addresses)] = addresses
    return table
