"""The one view of a model that the runtime has: its layers in pieces, with attention itself left out.

A token is a token: every call takes T tokens of any sequences, in any order, with their positions. An adapter owns no
cache and no loop; it calls the modules of a loaded transformers model (norms, projections, rotary embedding, MLP).
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..core import ModelGeometry


class ModelAdapter(Protocol):
    """The layers of one decoder-only transformer. All tensors are on the model's device and in its dtype unless said
    otherwise; no method needs gradients and none changes an argument."""

    @property
    def geometry(self) -> ModelGeometry:
        """Shapes, scales and windows."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states, queries, keys and values."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the hidden states live."""
        ...

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states `[T, D]` of token ids `[T]` at positions `[T]` (both int64): the input of layer 0."""
        ...

    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """What layer `layer` projects to q, k and v, given its input `[T, D]`: its norm where it normalises before
        attention, the input itself where it normalises after (OPT-350m). `[T, D]`."""
        ...

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[H, T, d]`, k `[Hkv, T, d]`, v `[Hkv, T, d]` after bias, QK-norm and RoPE; q without the attention scale
        (that is `geometry.scales[layer]`)."""
        ...

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Only q of `qkv`, `[H, T, d]`: prefill slices and speculation (paper §4.3) need no keys."""
        ...

    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Only k and v of `qkv`, each `[Hkv, T, d]`."""
        ...

    def rotate_keys(self, layer: int, k: torch.Tensor, offset: int) -> torch.Tensor:
        """Keys k `[Hkv, n, d]` of layer `layer` as they would be `offset` positions later, for relative positions only
        (RoPE): a rotation of the cached key in float32 from float64 angles; what else the key holds (attention factors)
        stays.
        Raises ModelError for absolute positions."""
        ...

    def sinks(self, layer: int) -> torch.Tensor | None:
        """Of a model with attention sinks the score of each head's, `[H]` in float32 or wider: a row without a value
        that takes its share of the softmax, and is not scaled. None: there are none."""
        ...

    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual stream `[T, D]` after layer `layer`'s attention: output projection of `attended` `[T, H * d]`
        added to the layer's input `hidden` `[T, D]` (and normed where the model normalises there)."""
        ...

    def mlp(self, layer: int, residual: torch.Tensor) -> torch.Tensor:
        """The output of the layer `[T, D]` from the residual stream after its attention `[T, D]`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits `[T, V]` from the last layer's output `[T, D]` (final norm, head, soft-capping)."""
        ...
