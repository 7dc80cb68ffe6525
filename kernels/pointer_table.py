"""Table on the device that contains the addresses of a batch's tensors, one tensor per sequence.

Kernels read the table, so tensors of different sequences need not be concatenated. If a sequence joins or leaves the
batch, or a tensor is reallocated, only the table changes, not the launch arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

FIELDS = 3
"""Number of fields per tensor in the table: its address, and the strides of its first two dimensions in elements."""

ALIGNED = 16
"""Width in bytes of the widest memory load of a kernel."""


@dataclass(frozen=True)
class PointerTable:
    """Addresses and strides of one tensor `[X, a, c]` per sequence. The last dimension is contiguous.

    The X slices `[a, c]` of a sequence are its lists, for example one per KV head. Triton kernels read `table`, and
    torch functions read `tensors`. The caller must keep the two consistent.
    """

    tensors: tuple[torch.Tensor, ...]  # tensors with equal dtype, device and X
    table: torch.Tensor  # address and strides of each tensor (`entry`), int64 `[B, FIELDS]` on the same device

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> PointerTable:
        table = torch.tensor([entry(tensor) for tensor in tensors], dtype=torch.int64)
        return cls(tuple(tensors), table.to(tensors[0].device))

    @property
    def heads(self) -> int:
        return self.tensors[0].shape[0]

    @property
    def lists(self) -> int:
        return self.heads * len(self.tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def aligned(self) -> bool:
        size = self.tensors[0].itemsize
        starts = (x for tensor in self.tensors for x in (tensor.data_ptr(), *(size * s for s in tensor.stride()[:2])))
        return all(x % ALIGNED == 0 for x in starts)


def entry(tensor: torch.Tensor) -> tuple[int, int, int]:
    assert tensor.dim() == 3 and tensor.stride(2) == 1
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1)
