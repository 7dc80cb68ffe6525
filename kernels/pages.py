"""Pages of low-bit KV: tensors for a fixed number of tokens of a sequence.

Sequences can share individual pages. Kernels find pages by their addresses. A page holds the KV of all layers with
low-bit KV: uint8 `[L, Hkv, PAGE_BLOCKS, block_bytes]`, with blocks in the format of `low_bit.Layout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..utils import native_libraries
from .pointer_table import ALIGNED

BLOCK = 64
"""Tokens per block."""

PAGE_BLOCKS = native_libraries.PAGE_BLOCKS
"""Blocks per page."""

PAGE_TOKENS = PAGE_BLOCKS * BLOCK
"""Tokens per page."""


@dataclass(frozen=True, eq=False)
class Pages:
    """Low-bit KV of one layer of one sequence.

    Attributes:
        tensors: The pages of the sequence, in order.
        addresses: Addresses of the pages, int64 `[pages]` in host memory.
        layer: Index of the layer within a page.
    """

    tensors: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    layer: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], layer: int = 0) -> Pages:
        """Create an instance with the addresses of `tensors`."""
        return cls(tuple(tensors), addresses_of(tensors), layer)

    def of_layer(self, layer: int) -> Pages:
        """Return the KV of another layer of the same sequence."""
        return Pages(self.tensors, self.addresses, layer)

    @property
    def heads(self) -> int:
        """Number of KV heads, Hkv."""
        return self.tensors[0].shape[1]

    @property
    def offset(self) -> int:
        """Offset of the layer within a page in bytes."""
        return self.layer * self.tensors[0].stride(0)

    def parts(self, tokens: range) -> Iterator[tuple[torch.Tensor, slice, slice]]:
        """Iterate over the pages that contain `tokens`.

        Yields the blocks `[Hkv, PAGE_BLOCKS, block_bytes]` of each page, the slice of valid tokens within the page, and
        the slice of these tokens within `tokens`. All pages must exist.
        """
        at = tokens.start
        while at < tokens.stop:
            page = at // PAGE_TOKENS
            first, stop = page * PAGE_TOKENS, min(tokens.stop, (page + 1) * PAGE_TOKENS)
            valid = slice(at - first, stop - first)
            yield self.tensors[page][self.layer], valid, slice(at - tokens.start, stop - tokens.start)
            at = stop


@dataclass(frozen=True, eq=False)
class PageTable:
    """Low-bit KV of one layer of B sequences: Hkv * B lists, sequence-major.

    The caller must keep both attributes consistent: Triton kernels read the table, torch functions read the pages.

    Attributes:
        pages: Pages of each sequence, all of one layer and on one device.
        table: Addresses of the first M pages of each sequence, int64 `[B, M]` on this device. Entries after the last
            page are undefined.
    """

    pages: tuple[Pages, ...]
    table: torch.Tensor

    @classmethod
    def of(cls, pages: Sequence[Pages]) -> PageTable:
        """Create an instance with a new table."""
        device = pages[0].tensors[0].device
        return cls(tuple(pages), table_of(pages, max(len(own.tensors) for own in pages)).to(device))

    @property
    def heads(self) -> int:
        """Lists per sequence, Hkv."""
        return self.pages[0].heads

    @property
    def lists(self) -> int:
        """Number of lists, P."""
        return self.heads * len(self.pages)

    @property
    def offset(self) -> int:
        """Offset of the layer within a page in bytes."""
        return self.pages[0].offset


def addresses_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the addresses of tensors as int64 in host memory.

    The tensors, and all blocks in them, must be aligned for wide loads.
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert all(address % ALIGNED == 0 for address in addresses)
    return torch.tensor(addresses, dtype=torch.int64)


def table_of(pages: Sequence[Pages], most: int) -> torch.Tensor:
    """Return the addresses of the first `most` pages of each sequence: int64 `[B, most]` on the host, 0-padded."""
    table = torch.zeros(len(pages), most, dtype=torch.int64)
    for row, own in zip(table, pages, strict=True):
        known = own.addresses[:most]
        row[: len(known)] = known
    return table
