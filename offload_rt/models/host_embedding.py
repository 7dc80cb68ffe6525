"""An embedding that is looked up in host memory; only the results are copied to the device."""

from __future__ import annotations

import torch
from torch import nn


class HostEmbedding(nn.Module):
    """Replaces a model's embedding and looks tokens up in host memory."""

    def __init__(self, embedding: nn.Module, device: torch.device) -> None:
        """device: where token ids come from and rows go."""
        super().__init__()
        self.inner = embedding
        self.bytes = 0
        """Bytes copied to the device so far."""
        own = next(embedding.parameters())
        self.weight = own.new_empty((0, *own.shape[1:]), device=device)
        """`[0, D]`: where the model computes and in which dtype, which adapters read off an embedding."""

    @property
    def host_bytes(self) -> int:
        """Bytes of the embedding in host memory."""
        return sum(weight.nbytes for weight in self.inner.parameters())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return embeddings `[..., D]` of token ids `[...]`."""
        rows: torch.Tensor = self.inner(tokens.cpu())
        self.bytes += rows.nbytes
        return rows.to(tokens.device)
