"""Llama, Qwen2, Qwen3 and Mistral: RMSNorm before attention, RoPE, grouped queries, a gated MLP.

What sets them apart sits in transformers' modules (biases, QK-norm, tied heads) and is met there, not here: attention
without `q_norm` gets the identity. Only the sliding window is read differently: Mistral has four lines of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..core import ModelGeometry
from ..errors import ModelError
from .base import BaseAdapter

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

_Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sign-folded sin (see `_rotate`), each `[1, T, d]`."""


class LlamaAdapter(BaseAdapter):
    """`ModelAdapter` over `LlamaForCausalLM`, `Qwen2ForCausalLM` or `Qwen3ForCausalLM`.

    One thing is remembered between calls: cos and sin of the last positions. Layer 0 always computes them; deeper
    layers reuse them while they are called with the same tensor object, which must not be changed in place between
    layer 0 and the last one. A CUDA graph that captures a step from layer 0 on records their computation too.
    """

    def __init__(self, model: Any) -> None:
        decoder, config = model.model, model.config
        self._embedding = decoder.embed_tokens
        self._layers = list(decoder.layers)
        self._attentions = [layer.self_attn for layer in self._layers]
        self._query_norms = [getattr(attention, "q_norm", nn.Identity()) for attention in self._attentions]
        self._key_norms = [getattr(attention, "k_norm", nn.Identity()) for attention in self._attentions]
        self._rotary = decoder.rotary_emb
        self._norm = decoder.norm
        self._head = model.lm_head
        self._rotated_positions: torch.Tensor | None = None
        self._rotation: _Rotation
        _refuse_what_cannot_run(config, self._rotary.rope_type)
        super().__init__(self._measure(config), self._embedding.weight)

    def _measure(self, config: Any) -> ModelGeometry:
        return ModelGeometry(
            layers=len(self._layers),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=self._attentions[0].head_dim,
            vocab=config.vocab_size,
            scales=tuple(float(attention.scaling) for attention in self._attentions),
            windows=tuple(self._window(config, attention) for attention in self._attentions),
            max_positions=_max_positions(config),
            absolute_positions=False,
            default_alpha=5.0,
        )

    def _window(self, config: Any, attention: Any) -> int | None:
        """Qwen's attention modules carry their own window (`use_sliding_window`, `layer_types`); Llama's have none,
        whatever the configuration says."""
        window: int | None = getattr(attention, "sliding_window", None)
        return window

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[T, D]` of token ids `[T]`; positions enter later, through RoPE."""
        hidden: torch.Tensor = self._embedding(tokens)
        return hidden

    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's RMSNorm of its input, `[T, D]`."""
        normed: torch.Tensor = self._layers[layer].input_layernorm(hidden)
        return normed

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[H, T, d]`, k `[Hkv, T, d]`, v `[Hkv, T, d]` at positions `[T]`; q unscaled."""
        rotation = self._cos_sin(layer, attention_input, positions)
        return self._query(layer, attention_input, rotation), *self._key_value(layer, attention_input, rotation)

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """q `[H, T, d]` after bias, QK-norm and RoPE."""
        return self._query(layer, attention_input, self._cos_sin(layer, attention_input, positions))

    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v, each `[Hkv, T, d]`; k after bias, QK-norm and RoPE."""
        return self._key_value(layer, attention_input, self._cos_sin(layer, attention_input, positions))

    def _query(self, layer: int, attention_input: torch.Tensor, rotation: _Rotation) -> torch.Tensor:
        q = self._split_heads(self._attentions[layer].q_proj(attention_input))
        return _rotate(self._query_norms[layer](q), rotation)

    def _key_value(
        self, layer: int, attention_input: torch.Tensor, rotation: _Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attention = self._attentions[layer]
        k = self._split_heads(attention.k_proj(attention_input))
        v = self._split_heads(attention.v_proj(attention_input))
        return _rotate(self._key_norms[layer](k), rotation), v

    def rotate_keys(self, k: torch.Tensor, offset: int) -> torch.Tensor:
        """RoPE by `offset` more positions of cached keys `[Hkv, n, d]`; angles are float64, the product float32."""
        angles = self._rotary.inv_freq.to(torch.float64) * offset
        compute = torch.promote_types(k.dtype, torch.float32)
        cos, sin = (wave.to(compute).to(k.device) for wave in (angles.cos(), angles.sin()))
        rotation = torch.cat((cos, cos)), torch.cat((-sin, sin))
        return _rotate(k.to(compute), rotation).to(k.dtype)

    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """`hidden` `[T, D]` plus the output projection of `attended` `[T, H * d]`."""
        output: torch.Tensor = self._attentions[layer].o_proj(attended)
        return hidden + output

    def mlp(self, layer: int, residual: torch.Tensor) -> torch.Tensor:
        """`residual` `[T, D]` plus the gated MLP of its norm."""
        module = self._layers[layer]
        output: torch.Tensor = module.mlp(module.post_attention_layernorm(residual))
        return residual + output

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[T, V]` of the last layer's output `[T, D]`."""
        return self._widen(self._head(self._norm(hidden)))

    def _cos_sin(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> _Rotation:
        """cos and sin of positions `[T]` in the dtype of `x`, from the model's own rotary module, its attention factor
        (YaRN) included."""
        if layer > 0 and positions is self._rotated_positions:
            return self._rotation
        cos, sin = self._rotary(x, positions[None])
        minus, plus = sin.chunk(2, dim=-1)
        self._rotated_positions = positions
        self._rotation = cos, torch.cat((-minus, plus), dim=-1)
        return self._rotation


class MistralAdapter(LlamaAdapter):
    """`ModelAdapter` over `MistralForCausalLM`: the configuration's window holds for every layer."""

    def _window(self, config: Any, attention: Any) -> int | None:
        window: int | None = config.sliding_window
        return window


def _rotate(x: torch.Tensor, rotation: _Rotation) -> torch.Tensor:
    """RoPE of `x` `[heads, T, d]`: `x cos + rotate_half(x) sin`. The minus of rotate_half is moved into the sin, which
    gives the same bits with fewer kernels."""
    cos, sin = rotation
    return (x * cos).add_(x.roll(x.shape[-1] // 2, dims=-1).mul_(sin))


def _refuse_what_cannot_run(config: Any, rope_type: str) -> None:
    """Raises ModelError where cached keys could not stay valid or heads do not group."""
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise ModelError(
            f"RoPE type {rope_type!r} changes its frequencies with the length of the text, so cached keys "
            "would go stale; supported are default, linear, llama3 and yarn"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"{config.num_attention_heads} query heads cannot share {config.num_key_value_heads} KV heads evenly; "
            "num_attention_heads must be a multiple of num_key_value_heads"
        )


def _max_positions(config: Any) -> int:
    """Positions the model was built for; YaRN checkpoints often state only those it was first trained on."""
    rope = config.rope_parameters
    trained: int = config.max_position_embeddings
    if rope["rope_type"] == "yarn":
        return max(trained, int(rope["factor"] * (rope.get("original_max_position_embeddings") or trained)))
    return trained
