"""OPT: learned positions (offset 2), biases, ReLU, norms before attention or after it (OPT-350m)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .base import BaseAdapter, table_geometry


class OPTAdapter(BaseAdapter):
    """`ModelAdapter` for `OPTForCausalLM`.

    transformers multiplies OPT's queries by 1/sqrt(d) before attention. Here queries are unscaled, and the factor is
    in `geometry.scales`. Embedding projections and final norms that a checkpoint lacks are replaced by the identity.
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
        """Embed token ids `[T]` at positions `[T]` as `[T, D]`.

        The caller must check that all positions are below `geometry.max_positions`.
        """
        hidden: torch.Tensor = self._project_in(self._embedding(tokens))
        learned: torch.Tensor = self._positions(tokens, position_ids=positions)
        return hidden + learned

    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the norm of the layer's input `[T, D]`, or the input itself if norms come after attention."""
        if not self._norm_first:
            return hidden
        normed: torch.Tensor = self._layers[layer].self_attn_layer_norm(hidden)
        return normed

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v, each `[H, T, d]`; q is unscaled."""
        return (
            self.query(layer, attention_input, positions),
            *self.key_value(layer, attention_input, positions),
        )

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the unscaled q `[H, T, d]`."""
        return self._split_heads(self._attentions[layer].q_proj(attention_input))

    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v, each `[H, T, d]`."""
        attention = self._attentions[layer]
        k, v = attention.k_proj(attention_input), attention.v_proj(attention_input)
        return self._split_heads(k), self._split_heads(v)

    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return `hidden` `[T, D]` plus the projection of `attended` `[T, H * d]`, normed if norms come after."""
        output: torch.Tensor = self._attentions[layer].out_proj(attended)
        residual = hidden + output
        if self._norm_first:
            return residual
        normed: torch.Tensor = self._layers[layer].self_attn_layer_norm(residual)
        return normed

    def mlp(self, layer: int, residual: torch.Tensor) -> torch.Tensor:
        """Return `residual` `[T, D]` plus its MLP output. The final norm is applied before the MLP or after the sum."""
        module = self._layers[layer]
        inner = module.final_layer_norm(residual) if self._norm_first else residual
        output: torch.Tensor = residual + module.fc2(module.activation_fn(module.fc1(inner)))
        return output if self._norm_first else module.final_layer_norm(output)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits `[T, V]` for the last layer's output `[T, D]`."""
        return self._widen(self._head(self._project_out(self._norm(hidden))))
