"""Copy tensors from the host to the device without synchronising."""

from __future__ import annotations

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to `device`. On CUDA, the copy is asynchronous and goes through page-locked memory."""
    if device.type != "cuda":
        return values.to(device)
    # The page-locked buffer may be released here: the allocator reuses it only after the copy has finished.
    return values.pin_memory().to(device, non_blocking=True)


def copy_into(values: torch.Tensor, into: torch.Tensor) -> None:
    """Copy a host tensor to the tensor `into` of the same shape. On CUDA, the copy is asynchronous."""
    into.copy_(values.pin_memory() if into.is_cuda else values, non_blocking=True)
