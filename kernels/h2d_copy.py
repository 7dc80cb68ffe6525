"""Copy tensors from the host to the device without synchronising."""

from __future__ import annotations

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to `device`. On CUDA, copy asynchronously from page-locked memory."""
    if device.type != "cuda":
        return values.to(device)
    # The allocator reuses the page-locked buffer only after the copy has read it.
    return values.pin_memory().to(device, non_blocking=True)


def copy_into(values: torch.Tensor, into: torch.Tensor) -> None:
    """Copy a host tensor into a tensor of the same shape, asynchronously from page-locked memory on CUDA."""
    into.copy_(values.pin_memory() if into.is_cuda else values, non_blocking=True)
