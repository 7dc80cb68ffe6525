"""Base class for adapters that wrap another adapter."""

from __future__ import annotations

import torch

from ..core import ModelGeometry
from .adapter import ModelAdapter


class ForwardingAdapter:
    """`ModelAdapter` that forwards every call to `inner`.

    Subclasses override single methods. `ModelAdapter` documents shapes and errors.
    """

    def __init__(self, inner: ModelAdapter) -> None:
        self._inner = inner

    @property
    def geometry(self) -> ModelGeometry:
        return self._inner.geometry

    @property
    def dtype(self) -> torch.dtype:
        return self._inner.dtype

    @property
    def device(self) -> torch.device:
        return self._inner.device

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._inner.embed(tokens, positions)

    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return self._inner.attention_input(layer, hidden)

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._inner.qkv(layer, attention_input, positions)

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._inner.query(layer, attention_input, positions)

    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inner.key_value(layer, attention_input, positions)

    def rotate_keys(self, layer: int, k: torch.Tensor, offset: int) -> torch.Tensor:
        return self._inner.rotate_keys(layer, k, offset)

    def sinks(self, layer: int) -> torch.Tensor | None:
        return self._inner.sinks(layer)

    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return self._inner.after_attention(layer, hidden, attended)

    def mlp(self, layer: int, residual: torch.Tensor) -> torch.Tensor:
        return self._inner.mlp(layer, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._inner.logits(hidden)
