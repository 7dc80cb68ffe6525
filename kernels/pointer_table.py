"""Tensors that belong to the sequences of a batch, one each, found by their addresses.

Sequences come and go, their tensors grow, are copied when a fork writes, and are freed: none of that copies anything
together or changes an argument of a launch. Only the numbers in a small table on the device change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FIELDS = 3
"""Of a tensor in the table: its address, and the strides of its first two dimensions, in numbers."""

ALIGNED = 16
"""Bytes that a load can be wide."""


@dataclass(frozen=True)
class PointerTable:
    """What each of B sequences has of one layer in a tensor of its own, `[X, a, c]`, the numbers of a row side by side:
    X * B lists, sequence-major.

    tensors: of one dtype and one X, on one device. table: int64 `[B, FIELDS]` there. Whoever makes it says the truth:
    kernels read the table, the torch definitions the tensors.
    """

    tensors: tuple[torch.Tensor, ...]
    table: torch.Tensor

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> PointerTable:
        """With a table of its own."""
        table = torch.tensor([entry(tensor) for tensor in tensors], dtype=torch.int64)
        return cls(tuple(tensors), table.to(tensors[0].device))

    @property
    def heads(self) -> int:
        """X, lists of a sequence."""
        return self.tensors[0].shape[0]

    @property
    def lists(self) -> int:
        """P."""
        return self.heads * len(self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """Of all numbers."""
        return self.tensors[0].dtype

    @property
    def aligned(self) -> bool:
        """Whether every row of every list begins where a load can be wide: known to the compiler, it is."""
        size = self.tensors[0].itemsize
        starts = (x for tensor in self.tensors for x in (tensor.data_ptr(), *(size * s for s in tensor.stride()[:2])))
        return all(x % ALIGNED == 0 for x in starts)


def entry(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The fields of `tensor` in a table."""
    assert tensor.dim() == 3 and tensor.stride(2) == 1
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1)
