"""Pages: low-bit rows of a sequence lie in tensors of a fixed number of tokens, which sequences can share one by one,
and which kernels find by their addresses.

A page holds its tokens' rows of all layers that have any: uint8 `[L, Hkv, PAGE_BLOCKS, block_bytes]`, blocks as
`low_bit.Layout` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..utils import native_libraries
from .pointer_table import ALIGNED

BLOCK = 64
"""Tokens of a block."""

PAGE_BLOCKS = native_libraries.PAGE_BLOCKS
"""Blocks of a page."""

PAGE_TOKENS = PAGE_BLOCKS * BLOCK
"""Tokens of a page."""


@dataclass(frozen=True, eq=False)
class Pages:
    """The low-bit rows of one layer of one sequence.

    tensors: the sequence's pages, in order. layer: which of their L is meant. addresses: int64 `[pages]` in host
    memory, where the tensors begin.
    """

    tensors: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    layer: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], layer: int = 0) -> Pages:
        """With the addresses of `tensors`."""
        return cls(tuple(tensors), addresses_of(tensors), layer)

    def of_layer(self, layer: int) -> Pages:
        """The same sequence's rows of another layer."""
        return Pages(self.tensors, self.addresses, layer)

    @property
    def heads(self) -> int:
        """Hkv."""
        return self.tensors[0].shape[1]

    @property
    def offset(self) -> int:
        """Bytes of a page before those of the layer."""
        return self.layer * self.tensors[0].stride(0)

    def parts(self, tokens: range) -> Iterator[tuple[torch.Tensor, slice, slice]]:
        """The pages of `tokens`, which there must be: each one's blocks `[Hkv, PAGE_BLOCKS, block_bytes]`, which of its
        512 tokens are meant, and where these are among `tokens`."""
        at = tokens.start
        while at < tokens.stop:
            page = at // PAGE_TOKENS
            first, stop = page * PAGE_TOKENS, min(tokens.stop, (page + 1) * PAGE_TOKENS)
            meant = slice(at - first, stop - first)
            yield self.tensors[page][self.layer], meant, slice(at - tokens.start, stop - tokens.start)
            at = stop


@dataclass(frozen=True, eq=False)
class PageTable:
    """The low-bit rows of one layer of each of B sequences: Hkv * B lists, sequence-major.

    pages: all of one layer, on one device. table: int64 `[B, M]` there, the addresses of each one's first M pages, and
    anything behind the last. Whoever makes it says the truth: kernels read the table, the torch definitions the pages.
    """

    pages: tuple[Pages, ...]
    table: torch.Tensor

    @classmethod
    def of(cls, pages: Sequence[Pages]) -> PageTable:
        """With a table of its own."""
        device = pages[0].tensors[0].device
        return cls(tuple(pages), table_of(pages, max(len(own.tensors) for own in pages)).to(device))

    @property
    def heads(self) -> int:
        """Lists of a sequence."""
        return self.pages[0].heads

    @property
    def lists(self) -> int:
        """P."""
        return self.heads * len(self.pages)

    @property
    def offset(self) -> int:
        """Bytes of a page before those of the layer."""
        return self.pages[0].offset


def addresses_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where they begin, int64 in host memory: at places where a load can be wide, and so do all blocks in them."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert all(address % ALIGNED == 0 for address in addresses)
    return torch.tensor(addresses, dtype=torch.int64)


def table_of(pages: Sequence[Pages], most: int) -> torch.Tensor:
    """The table int64 `[B, most]` of sequences' pages, in host memory: of each the first `most`, 0 behind its last."""
    table = torch.zeros(len(pages), most, dtype=torch.int64)
    for row, own in zip(table, pages, strict=True):
        known = own.addresses[:most]
        row[: len(known)] = known
    return table
