"""One tensor per sequence of a batch, found by its address.

Sequences join and leave, and their tensors grow, are copied on write after a fork, and are freed. For all of this, only
a small table on the device changes. Tensors are not concatenated, and launch arguments stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FIELDS = 3
"""Fields per tensor in the table: its address, and the strides of its first two dimensions in elements."""

ALIGNED = 16
"""Width of the widest load in bytes."""


@dataclass(frozen=True)
class PointerTable:
    """One tensor `[X, a, c]` of one layer per sequence, with contiguous last dimension: X * B lists, sequence-major.

    The caller must keep both attributes consistent: Triton kernels read the table, torch functions read the tensors.

    Attributes:
        tensors: Tensors with equal dtype, device and X.
        table: int64 `[B, FIELDS]` on this device.
    """

    tensors: tuple[torch.Tensor, ...]
    table: torch.Tensor

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> PointerTable:
        """Create an instance with a new table."""
        table = torch.tensor([entry(tensor) for tensor in tensors], dtype=torch.int64)
        return cls(tuple(tensors), table.to(tensors[0].device))

    @property
    def heads(self) -> int:
        """Lists per sequence, X."""
        return self.tensors[0].shape[0]

    @property
    def lists(self) -> int:
        """Number of lists, P."""
        return self.heads * len(self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the tensors."""
        return self.tensors[0].dtype

    @property
    def aligned(self) -> bool:
        """Whether every row of every list is aligned for the widest load."""
        size = self.tensors[0].itemsize
        starts = (x for tensor in self.tensors for x in (tensor.data_ptr(), *(size * s for s in tensor.stride()[:2])))
        return all(x % ALIGNED == 0 for x in starts)


def entry(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the table fields of `tensor`."""
    assert tensor.dim() == 3 and tensor.stride(2) == 1
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1)
