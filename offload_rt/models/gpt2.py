"""GPT-2: learned positions, a fused Conv1D for q, k and v (its weight is the transpose of Linear's), GELU."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ModelError
from .base import BaseAdapter, table_geometry
from .packed import refuse_packed


class GPT2Adapter(BaseAdapter):
    """`ModelAdapter` for `GPT2LMHeadModel`.

    `geometry.scales` accounts for `scale_attn_by_inverse_layer_idx` and `scale_attn_weights=False`.
    """

    def __init__(self, model: Any) -> None:
        refuse_packed(model, "GPT-2's queries, keys and values are cut out of one matrix")
        decoder, config = model.transformer, model.config
        if config.add_cross_attention:
            raise ModelError("this GPT-2 has cross-attention (an encoder's decoder); only plain decoders are supported")
        self._embedding = decoder.wte
        self._positions = decoder.wpe
        self._layers = list(decoder.h)
        self._attentions = [layer.attn for layer in self._layers]
        self._norm = decoder.ln_f
        self._head = model.lm_head
        super().__init__(table_geometry(config, self._attentions), self._embedding.weight)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed token ids `[T]` at positions `[T]` as `[T, D]`.

        The caller must check that all positions are below `geometry.max_positions`.
        """
        hidden: torch.Tensor = self._embedding(tokens)
        learned: torch.Tensor = self._positions(positions)
        return hidden + learned

    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the norm before attention to the layer's input, `[T, D]`."""
        normed: torch.Tensor = self._layers[layer].ln_1(hidden)
        return normed

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v, each `[H, T, d]`; q is unscaled."""
        q, k, v = self._attentions[layer].c_attn(attention_input).chunk(3, dim=-1)
        return self._split_heads(q), self._split_heads(k), self._split_heads(v)

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the unscaled q `[H, T, d]`, the first third of the fused projection."""
        return self._split_heads(self._fused(layer, attention_input, slice(None, self._geometry.hidden)))

    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v, each `[H, T, d]`, the last two thirds of the fused projection."""
        k, v = self._fused(layer, attention_input, slice(self._geometry.hidden, None)).chunk(2, dim=-1)
        return self._split_heads(k), self._split_heads(v)

    def _fused(self, layer: int, attention_input: torch.Tensor, columns: slice) -> torch.Tensor:
        """Compute the given output columns of Conv1D `c_attn` for `[T, D]`, without copying its weight `[D, 3 D]`."""
        c_attn = self._attentions[layer].c_attn
        return torch.addmm(c_attn.bias[columns], attention_input, c_attn.weight[:, columns])

    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return `hidden` `[T, D]` plus the output projection of `attended` `[T, H * d]`."""
        output: torch.Tensor = self._attentions[layer].c_proj(attended)
        return hidden + output

    def mlp(self, layer: int, residual: torch.Tensor) -> torch.Tensor:
        """Return `residual` `[T, D]` plus the MLP output for its norm."""
        module = self._layers[layer]
        output: torch.Tensor = module.mlp(module.ln_2(residual))
        return residual + output

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits `[T, V]` for the last layer's output `[T, D]`."""
        return self._widen(self._head(self._norm(hidden)))
