"""Host memory for snapshots of recurrent state."""

from __future__ import annotations

import math
import mmap

import torch

from ..core import ModelGeometry
from .arena import page_lock, reserve

ALIGNED = 64  # alignment in bytes of each tensor
HUGE_PAGE = 1 << 21

_Part = tuple[slice, tuple[int, ...], torch.dtype]
"""A tensor in a slot, as its byte range, shape and dtype. The shape is empty if the layer has no such tensor."""


class StatePool:
    """Host memory for snapshots. Each slot stores one snapshot: the recurrent state of one sequence in all layers.

    The operating system allocates the memory of a slot on first use. `save` and `restore` copy the state of one decoder
    layer on the current stream. If both are called on the same stream, no synchronisation is needed.

    Args:
        device: Device of the model. If it is a CUDA device, each slot is page-locked when it is first used.
    """

    def __init__(self, geometry: ModelGeometry, dtype: torch.dtype, slots: int, device: torch.device) -> None:
        self.slots, self._device, self._pin = slots, device, device.type == "cuda"
        self._parts, self.slot_bytes = _layout(geometry, dtype)
        huge_from = 0 if self.slot_bytes >= HUGE_PAGE else self.limit_bytes
        memory = reserve(self.limit_bytes, "snapshots of recurrent state", huge_from)
        self._rows = torch.frombuffer(memory, dtype=torch.uint8).view(slots, self.slot_bytes)
        self._locked: set[int] = set()

    @property
    def limit_bytes(self) -> int:
        return self.slots * self.slot_bytes

    def save(self, slot: int, layer: int, recurrent: torch.Tensor | None, conv: torch.Tensor) -> None:
        self.lock(slot)
        for target, source in zip(self._views(slot, layer), (recurrent, conv), strict=True):
            if source is not None:
                target.copy_(source, non_blocking=self._pin)

    def restore(self, slot: int, layer: int, recurrent: torch.Tensor | None, conv: torch.Tensor) -> None:
        for source, target in zip(self._views(slot, layer), (recurrent, conv), strict=True):
            if target is not None:
                target.copy_(source, non_blocking=self._pin)

    def read(self, slot: int) -> bytes:
        """Wait for pending copies, then return the bytes of a slot."""
        self._wait_for_copies()
        return self._rows[slot].numpy().tobytes()

    def write(self, slot: int, data: memoryview) -> None:
        """Wait for pending copies, then replace the bytes of a slot."""
        self.lock(slot)
        self._wait_for_copies()  # A queued copy may still read the slot, or might overwrite it later.
        self._rows[slot].copy_(torch.frombuffer(data, dtype=torch.uint8))

    def lock(self, slot: int) -> None:
        """Page-lock a slot on its first use, if the model is on a CUDA device. Raises MemoryLimitError."""
        if self._pin and slot not in self._locked:
            page_lock(self._rows[slot], self, self._device)
            self._locked.add(slot)

    def _wait_for_copies(self) -> None:
        if self._pin:  # The model's device is not necessarily the current CUDA device.
            torch.cuda.current_stream(self._device).synchronize()

    def _views(self, slot: int, layer: int) -> list[torch.Tensor]:
        row = self._rows[slot]
        return [row[where].view(kind).view(shape or (0,)) for where, shape, kind in self._parts[layer]]


def slot_bytes(geometry: ModelGeometry, dtype: torch.dtype) -> int:
    return _layout(geometry, dtype)[1]


def _layout(geometry: ModelGeometry, dtype: torch.dtype) -> tuple[dict[int, list[_Part]], int]:
    """Return which tensors a slot has for each decoder layer, and the size of a slot in bytes (whole pages)."""
    parts, at = dict[int, list[_Part]](), 0
    for shape in geometry.states:
        parts[shape.layer] = []
        for one, kind in ((shape.recurrent, torch.float32), (shape.conv, dtype)):
            size = math.prod(one) * kind.itemsize if one else 0
            parts[shape.layer].append((slice(at, at + size), one, kind))
            at += -(-size // ALIGNED) * ALIGNED
    return parts, -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
