"""Numbers that the host knows, on the device, without waiting for it."""

from __future__ import annotations

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values`, which are on the host, on the device: on CUDA through page-locked memory, which is not used again
    before it has been read."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def copy_into(values: torch.Tensor, into: torch.Tensor) -> None:
    """`values`, which are on the host, into a tensor of their shape on its device; page-locked as in `to_device`."""
    into.copy_(values.pin_memory() if into.is_cuda else values, non_blocking=True)
