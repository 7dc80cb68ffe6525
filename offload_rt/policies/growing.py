"""Tensors that grow along one dimension as tokens arrive, with copy-on-write forks."""

from __future__ import annotations

from collections.abc import Set

import torch

_ROUND = 64
"""Capacities are multiples of this number of slots."""


def max_capacity(tokens: int, tokens_per_slot: int = 1) -> int:
    """Return the largest capacity, in tokens, that a `GrowingTensor` allocates for `tokens` tokens."""
    return tokens + tokens // 16 + _ROUND * tokens_per_slot


class GrowingTensor:
    """A tensor `data` that grows along one dimension. Call `reserve` before every write.

    An index in this dimension is called a *slot*. A fork shares the storage until one of the two tensors is written.
    """

    def __init__(self, shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Create a tensor that has size 0 in dimension `dim`. `shape` contains the sizes of all other dimensions."""
        self.dim = dim
        self.data = torch.empty(*shape[:dim], 0, *shape[dim + 1 :], dtype=dtype, device=device)
        self._shared = False

    @property
    def nbytes(self) -> int:
        """Number of allocated bytes, including storage that is shared with forks."""
        return self.data.nbytes

    def reserve(self, slots: int) -> torch.Tensor:
        """Return `data` with at least `slots` slots and not shared with a fork. New slots are uninitialised."""
        capacity = self.data.shape[self.dim]
        if slots > capacity:
            # To save device memory, grow by a sixteenth instead of doubling. Each slot is copied about 16 times.
            shape = list(self.data.shape)
            shape[self.dim] = -(-(slots + slots // 16) // _ROUND) * _ROUND
            data = self.data.new_empty(shape)
            data.narrow(self.dim, 0, capacity).copy_(self.data)
            self.data, self._shared = data, False
        elif self._shared:
            self.data, self._shared = self.data.clone(), False
        return self.data

    def fork(self) -> GrowingTensor:
        copy = object.__new__(GrowingTensor)
        copy.dim, copy.data = self.dim, self.data
        self._shared = copy._shared = True
        return copy


class LayerTensors:
    """One `GrowingTensor` per layer, with data about the tokens of one sequence.

    A slot contains the data of `tokens_per_slot` adjacent tokens.
    """

    def __init__(self, dim: int, dtype: torch.dtype, device: torch.device, tokens_per_slot: int = 1) -> None:
        self._dim, self._dtype, self._device, self._per_slot = dim, dtype, device, tokens_per_slot
        self._tensors: dict[int, GrowingTensor] = {}
        self._lengths: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def layers(self) -> Set[int]:
        return self._tensors.keys()

    def length(self, layer: int) -> int:
        """Return the number of tokens in the layer, or 0 before `open`."""
        return self._lengths.get(layer, 0)

    def data(self, layer: int) -> torch.Tensor:
        """Return the layer's tensor for reading. It includes unused slots at the end."""
        return self._tensors[layer].data

    def open(self, layer: int, *shape: int) -> None:
        """Create an empty tensor for the layer if there is none. The size of the growing dimension is ignored."""
        if layer not in self._tensors:
            self._tensors[layer] = GrowingTensor(shape, self._dim, self._dtype, self._device)
            self._lengths[layer] = 0

    def reserve(self, layer: int, tokens: int) -> torch.Tensor:
        """Return the layer's tensor for writing. It has space for `tokens` tokens and is not shared with a fork."""
        self._lengths[layer] = max(self._lengths[layer], tokens)
        return self._tensors[layer].reserve(-(-self._lengths[layer] // self._per_slot))

    def fork(self) -> LayerTensors:
        copy = LayerTensors(self._dim, self._dtype, self._device, self._per_slot)
        copy._tensors = {layer: tensor.fork() for layer, tensor in self._tensors.items()}
        copy._lengths = dict(self._lengths)
        return copy

    def check_integrity(self) -> None:
        assert self._tensors.keys() == self._lengths.keys()
        for layer, tensor in self._tensors.items():
            assert self._lengths[layer] <= tensor.data.shape[self._dim] * self._per_slot
