"""OPT: learned positions (their table starts at 2), biases, ReLU; norms before attention, or after it (OPT-350m)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .base import BaseAdapter, table_geometry


class OPTAdapter(BaseAdapter):
    """`ModelAdapter` over `OPTForCausalLM`.

    transformers multiplies OPT's queries by 1/sqrt(d) before attention; here they stay as projected and the factor is
    in `geometry.scales`. Modules a checkpoint does not have (projections of the embedding, the final norm) are the
    identity.
    """

    def __init__(self, model: Any) -> None:
        decoder, config = model.model.decoder, model.config
        self._embedding = decoder.embed_tokens
        self._positions = decoder.embed_positions
        self._project_in = decoder.project_in or nn.Identity()
        self._layers = list(decoder.layers)
        self._attentions = [layer.self_attn for layer in self._layers]
        self._norm_first = bool(config.do_layer_norm_before)
        self._norm = decoder.final_layer_norm or nn.Identity()
        self._project_out = decoder.project_out or nn.Identity()
        self._head = model.lm_head
        super().__init__(table_geometry(config, self._attentions), self._embedding.weight)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[T, D]` of token ids `[T]` at positions `[T]`, each below `geometry.max_positions` (the caller checks)."""
        hidden: torch.Tensor = self._project_in(self._embedding(tokens))
        learned: torch.Tensor = self._positions(tokens, position_ids=positions)
        return hidden + learned

    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's norm of its input `[T, D]`, or the input itself where the norm comes after."""
        if not self._norm_first:
            return hidden
        normed: torch.Tensor = self._layers[layer].self_attn_layer_norm(hidden)
        return normed

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v, each `[H, T, d]`; q unscaled."""
        return (
            self.query(layer, attention_input, positions),
            *self.key_value(layer, attention_input, positions),
        )

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """q `[H, T, d]`, unscaled."""
        return self._split_heads(self._attentions[layer].q_proj(attention_input))

    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v, each `[H, T, d]`."""
        attention = self._attentions[layer]
        k, v = attention.k_proj(attention_input), attention.v_proj(attention_input)
        return self._split_heads(k), self._split_heads(v)

    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """`hidden` `[T, D]` plus the output projection of `attended` `[T, H * d]`; normed where norms come after."""
        output: torch.Tensor = self._attentions[layer].out_proj(attended)
        residual = hidden + output
        if self._norm_first:
            return residual
        normed: torch.Tensor = self._layers[layer].self_attn_layer_norm(residual)
        return normed

    def mlp(self, layer: int, residual: torch.Tensor) -> torch.Tensor:
        """`residual` `[T, D]` plus its MLP; the layer's final norm is applied before the MLP, or after the sum."""
        module = self._layers[layer]
        inner = module.final_layer_norm(residual) if self._norm_first else residual
        output: torch.Tensor = residual + module.fc2(module.activation_fn(module.fc1(inner)))
        return output if self._norm_first else module.final_layer_norm(output)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[T, V]` of the last layer's output `[T, D]`."""
        return self._widen(self._head(self._project_out(self._norm(hidden))))
