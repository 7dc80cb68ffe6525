"""A tensor that grows along one dimension as tokens arrive, and that forks share until one of them writes."""

from __future__ import annotations

import torch

_ROUND = 64


def _capacity(slots: int, multiple: int) -> int:
    return -(-(slots + slots // 16) // multiple) * multiple


def most_slots(tokens: int, per_slot: int = 1) -> int:
    """An upper bound of the tokens that a `GrowingTensor` of `tokens` tokens has room for, where at most `per_slot` of
    them share a slot."""
    return tokens + tokens // 16 + _ROUND * per_slot


class GrowingTensor:
    """`data` has room for more than is written; `reserve` makes room and privacy before every write.

    Capacity grows by a sixteenth, not by doubling: it is device memory, the more so the longer the context, and a
    copied slot costs each new token only 16 copied slots. A fork shares the storage, and whichever side writes first
    copies it.
    """

    def __init__(
        self, shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: torch.device, multiple: int = _ROUND
    ) -> None:
        """No slots yet: `shape` with 0 in dimension `dim`. Capacity is a multiple of `multiple`."""
        self.dim, self._multiple = dim, multiple
        self.data = torch.empty(*shape[:dim], 0, *shape[dim + 1 :], dtype=dtype, device=device)
        self._shared = False

    @property
    def nbytes(self) -> int:
        """Bytes allocated; storage that forks share counts for each of them."""
        return self.data.nbytes

    def reserve(self, slots: int) -> torch.Tensor:
        """`data`, private and with at least `slots` slots; new slots hold anything."""
        capacity = self.data.shape[self.dim]
        if slots > capacity:
            shape = list(self.data.shape)
            shape[self.dim] = _capacity(slots, self._multiple)
            data = self.data.new_empty(shape)
            data.narrow(self.dim, 0, capacity).copy_(self.data)
            self.data, self._shared = data, False
        elif self._shared:
            self.data, self._shared = self.data.clone(), False
        return self.data

    def fork(self) -> GrowingTensor:
        """A second owner of the same contents."""
        twin = object.__new__(GrowingTensor)
        twin.dim, twin._multiple, twin.data = self.dim, self._multiple, self.data
        self._shared = twin._shared = True
        return twin
