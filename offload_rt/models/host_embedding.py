"""An embedding that is looked up in host memory: only rows cross the link."""

from __future__ import annotations

import torch
from torch import nn


class HostEmbedding(nn.Module):
    """Stands in the place of a model's embedding, which it calls in host memory."""

    def __init__(self, embedding: nn.Module, device: torch.device) -> None:
        """device: where token ids come from and rows go."""
        super().__init__()
        self.inner = embedding
        self.bytes = 0
        """What has crossed the link so far."""
        own = next(embedding.parameters())
        self.weight = own.new_empty((0, *own.shape[1:]), device=device)
        """`[0, D]`: where the model computes and in which dtype, which adapters read off an embedding."""

    @property
    def host_bytes(self) -> int:
        """The whole embedding."""
        return sum(weight.nbytes for weight in self.inner.parameters())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[..., D]` of token ids `[...]`."""
        rows: torch.Tensor = self.inner(tokens.cpu())
        self.bytes += rows.nbytes
        return rows.to(tokens.device)
