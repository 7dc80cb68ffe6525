"""Base class of adapters: geometry, device, dtype, and common reshapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core import ModelGeometry
from ..errors import ModelError


class BaseAdapter:
    """Geometry, dtype and device of a loaded model; the adapters add its layers."""

    def __init__(self, geometry: ModelGeometry, embedding: torch.Tensor) -> None:
        self._geometry = geometry
        self._dtype = embedding.dtype
        self._device = embedding.device

    @property
    def geometry(self) -> ModelGeometry:
        """Shapes, scales and windows."""
        return self._geometry

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of hidden states, queries, keys and values."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Device of the hidden states."""
        return self._device

    def rotate_keys(self, layer: int, k: torch.Tensor, offset: int) -> torch.Tensor:
        """Raise ModelError, because absolute positions cannot be moved."""
        raise ModelError("this model has absolute positions: cached keys cannot be moved to others")

    def sinks(self, layer: int) -> torch.Tensor | None:
        """Return None: the model has no sinks."""
        return None

    def _split_heads(self, projected: torch.Tensor) -> torch.Tensor:
        """Return `[T, heads * d]` as a view `[heads, T, d]`."""
        return projected.view(projected.shape[0], -1, self._geometry.head_dim).transpose(0, 1)

    def _widen(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits `[T, V]` in float32, or in float64 for a float64 model."""
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def table_geometry(config: Any, attentions: Sequence[Any]) -> ModelGeometry:
    """Return the geometry of a model with learned positions, one KV head per query head and no window."""
    return ModelGeometry(
        layers=len(attentions),
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=attentions[0].head_dim,
        vocab=config.vocab_size,
        scales=tuple(float(attention.scaling) for attention in attentions),
        windows=(None,) * len(attentions),
        max_positions=config.max_position_embeddings,
        absolute_positions=True,
        default_alpha=4.0,
    )
