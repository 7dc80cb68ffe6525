"""Adapters of models with learned positions: OPT and GPT-2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..core import ModelGeometry
from ..errors import ModelError
from .adapter import ModelAdapter
from .linear import refuse_packed


class LearnedPositionsAdapter(ModelAdapter):
    """Base class for models that have learned positions, as many KV heads as query heads, and no sliding window."""

    def __init__(self, model: Any, embedding: nn.Module, layers: Sequence[Any], attentions: Sequence[Any]) -> None:
        config, weight = model.config, embedding.weight
        self._embedding, self._layers, self._attentions = embedding, layers, attentions
        self._head = model.lm_head
        geometry = ModelGeometry(
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
        assert isinstance(weight, torch.Tensor)
        super().__init__(geometry, weight.dtype, weight.device)

    def _split_heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.view(projected.shape[0], -1, self.geometry.head_dim).transpose(0, 1)

    def _head_logits(self, normed: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(normed)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class OPTAdapter(LearnedPositionsAdapter):
    """`ModelAdapter` for `OPTForCausalLM`. Norms are placed before attention and MLP, or after them in OPT-350m.

    transformers multiplies OPT's queries by 1/sqrt(d). This adapter returns unscaled queries and puts the factor in
    `geometry.scales`.
    """

    def __init__(self, model: Any) -> None:
        decoder = model.model.decoder
        self._positions = decoder.embed_positions
        self._project_in = decoder.project_in or nn.Identity()
        self._norm_first = bool(model.config.do_layer_norm_before)
        self._norm = decoder.final_layer_norm or nn.Identity()  # some checkpoints have no final norm and no projections
        self._project_out = decoder.project_out or nn.Identity()
        layers = list(decoder.layers)
        super().__init__(model, decoder.embed_tokens, layers, [layer.self_attn for layer in layers])

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self._project_in(self._embedding(tokens))
        learned: torch.Tensor = self._positions(tokens, position_ids=positions)
        return hidden + learned

    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._layers[layer].self_attn_layer_norm(hidden) if self._norm_first else hidden
        return normed

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._split_heads(self._attentions[layer].q_proj(attention_input))

    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attention = self._attentions[layer]
        k, v = attention.k_proj(attention_input), attention.v_proj(attention_input)
        return self._split_heads(k), self._split_heads(v)

    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        residual: torch.Tensor = hidden + self._attentions[layer].out_proj(attended)
        return residual if self._norm_first else self._layers[layer].self_attn_layer_norm(residual)

    def mlp(self, layer: int, residual: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        module = self._layers[layer]
        inner = module.final_layer_norm(residual) if self._norm_first else residual
        output: torch.Tensor = residual + module.fc2(module.activation_fn(module.fc1(inner)))
        return output if self._norm_first else module.final_layer_norm(output)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head_logits(self._project_out(self._norm(hidden)))


class GPT2Adapter(LearnedPositionsAdapter):
    """`ModelAdapter` for `GPT2LMHeadModel`, where a single Conv1D computes q, k and v."""

    def __init__(self, model: Any) -> None:
        refuse_packed(model, "GPT-2's queries, keys and values are slices of one matrix")
        if model.config.add_cross_attention:
            raise ModelError("this GPT-2 has cross-attention (an encoder's decoder); only plain decoders are supported")
        decoder = model.transformer
        self._positions, self._norm = decoder.wpe, decoder.ln_f
        layers = list(decoder.h)
        super().__init__(model, decoder.wte, layers, [layer.attn for layer in layers])

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self._embedding(tokens)
        learned: torch.Tensor = self._positions(positions)
        return hidden + learned

    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._layers[layer].ln_1(hidden)
        return normed

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self._attentions[layer].c_attn(attention_input).chunk(3, dim=-1)
        return self._split_heads(q), self._split_heads(k), self._split_heads(v)

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._split_heads(self._qkv_columns(layer, attention_input, slice(None, self.geometry.hidden)))

    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._qkv_columns(layer, attention_input, slice(self.geometry.hidden, None)).chunk(2, dim=-1)
        return self._split_heads(k), self._split_heads(v)

    def _qkv_columns(self, layer: int, attention_input: torch.Tensor, columns: slice) -> torch.Tensor:
        c_attn = self._attentions[layer].c_attn  # its weight is the transpose of a linear layer's weight
        return torch.addmm(c_attn.bias[columns], attention_input, c_attn.weight[:, columns])

    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._attentions[layer].c_proj(attended)
        return hidden + output

    def mlp(self, layer: int, residual: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        module = self._layers[layer]
        output: torch.Tensor = module.mlp(module.ln_2(residual))
        return residual + output

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head_logits(self._norm(hidden))
