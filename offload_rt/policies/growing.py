"""Tensors that grow along one dimension as tokens arrive, and that forks share until one of them writes."""

from __future__ import annotations

from collections.abc import Set

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


class LayerTensors:
    """What a sequence keeps of its tokens in every layer: a `GrowingTensor` along dimension `dim` for each open layer,
    with `per_slot` tokens to a slot, and how many tokens it has."""

    def __init__(
        self, dim: int, dtype: torch.dtype, device: torch.device, per_slot: int = 1, multiple: int = _ROUND
    ) -> None:
        """No layer is open. dim, multiple: as `GrowingTensor` takes them."""
        self._dim, self._dtype, self._device = dim, dtype, device
        self._per_slot, self._multiple = per_slot, multiple
        self._tensors: dict[int, GrowingTensor] = {}
        self._lengths: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated; storage that forks share counts for each of them."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def layers(self) -> Set[int]:
        """Layers that are open."""
        return self._tensors.keys()

    def length(self, layer: int) -> int:
        """Tokens that the layer has; 0 of one that is not open."""
        return self._lengths.get(layer, 0)

    def data(self, layer: int) -> torch.Tensor:
        """All that the layer has room for, only to read."""
        return self._tensors[layer].data

    def open(self, layer: int, *shape: int) -> None:
        """Opens a layer whose tensor has `shape`, 0 in dimension `dim`; nothing where it is open."""
        if layer not in self._tensors:
            self._tensors[layer] = GrowingTensor(shape, self._dim, self._dtype, self._device, self._multiple)
            self._lengths[layer] = 0

    def reserve(self, layer: int, tokens: int) -> torch.Tensor:
        """`data`, private and with room for `tokens` tokens, which count as written from now on; no length shrinks."""
        self._lengths[layer] = max(self._lengths[layer], tokens)
        return self._tensors[layer].reserve(-(-self._lengths[layer] // self._per_slot))

    def fork(self) -> LayerTensors:
        """A second owner of the same contents."""
        twin = LayerTensors(self._dim, self._dtype, self._device, self._per_slot, self._multiple)
        twin._tensors = {layer: tensor.fork() for layer, tensor in self._tensors.items()}
        twin._lengths = dict(self._lengths)
        return twin

    def check_integrity(self) -> None:
        """Asserts that every open layer has room for its tokens."""
        assert self._tensors.keys() == self._lengths.keys()
        for layer, tensor in self._tensors.items():
            assert self._lengths[layer] <= tensor.data.shape[self._dim] * self._per_slot
