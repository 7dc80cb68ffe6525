"""The runtime's interface to a model: its layers in parts, without attention itself.

Every call takes T tokens of any sequences, in any order, with their positions. An adapter owns no cache and no loop. It
calls the modules of a loaded transformers model (norms, projections, rotary embedding, MLP).
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..core import ModelGeometry


class ModelAdapter(Protocol):
    """The layers of one decoder-only transformer.

    All tensors are on the model's device and in its dtype unless noted. No method needs gradients or modifies its
    arguments.
    """

    @property
    def geometry(self) -> ModelGeometry:
        """Shapes, scales and windows."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of hidden states, queries, keys and values."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the hidden states."""
        ...

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the input of layer 0, `[T, D]`, for token ids `[T]` at positions `[T]` (both int64)."""
        ...

    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input `[T, D]` of the q, k and v projections, given the layer's input `[T, D]`.

        This is the normed input, or the input itself if the model normalises after attention (OPT-350m).
        """
        ...

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q `[H, T, d]`, k `[Hkv, T, d]` and v `[Hkv, T, d]` after bias, QK-norm and RoPE.

        The attention scale is not applied to q; it is `geometry.scales[layer]`.
        """
        ...

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return only q of `qkv`, `[H, T, d]`, for prefill slices and KV speculation (paper §4.3)."""
        ...

    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return only k and v of `qkv`, each `[Hkv, T, d]`."""
        ...

    def rotate_keys(self, layer: int, k: torch.Tensor, offset: int) -> torch.Tensor:
        """Return keys k `[Hkv, n, d]` moved `offset` positions later. Only for relative positions (RoPE).

        Cached keys are rotated in float32, with angles computed in float64. Attention factors in the keys are kept.

        Raises:
            ModelError: The model uses absolute positions.
        """
        ...

    def sinks(self, layer: int) -> torch.Tensor | None:
        """Return the learned sink score of each head, `[H]` in float32 or wider, or None if the model has no sinks.

        A sink takes a share of the softmax but has no value. Its score is not scaled.
        """
        ...

    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the residual stream `[T, D]` after the layer's attention.

        Adds the output projection of `attended` `[T, H * d]` to the layer's input `hidden` `[T, D]`, and applies a norm
        if the model has one there.
        """
        ...

    def mlp(self, layer: int, residual: torch.Tensor) -> torch.Tensor:
        """Return the layer's output `[T, D]` from the residual stream after its attention `[T, D]`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits `[T, V]` from the last layer's output `[T, D]` (final norm, head, soft-capping)."""
        ...
