"""Embedding lookup in host memory. Only the results are copied to the device."""

from __future__ import annotations

import torch
from torch import nn


class HostEmbedding(nn.Module):
    """Replacement of a model's embedding that looks up tokens in host memory."""

    def __init__(self, embedding: nn.Module, device: torch.device) -> None:
        """device: the model's device, with token ids and results."""
        super().__init__()
        self.inner = embedding
        self.bytes = 0
        """Bytes copied to the device so far."""
        own = next(embedding.parameters())
        self.weight = own.new_empty((0, *own.shape[1:]), device=device)
        """Empty tensor `[0, D]` with the model's device and dtype, which adapters read from the embedding."""

    @property
    def host_bytes(self) -> int:
        """Bytes of the embedding in host memory."""
        return sum(weight.nbytes for weight in self.inner.parameters())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return embeddings `[..., D]` of token ids `[...]`."""
        rows: torch.Tensor = self.inner(tokens.cpu())
        self.bytes += rows.nbytes
        return rows.to(tokens.device)
