"""The adapter of most decoders: Llama's family in the widest sense, recognised from modules and configuration.

What sets its members apart sits in transformers' modules and is met there: norms and how the residual stream is built
(`decoder_layer`), projections (`projections`), positions (`rotary`). Here: geometry, embedding and head. What is not
recognised is refused, with `ModelError.reason`.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from ..core import ModelGeometry
from ..errors import ModelError
from .base import BaseAdapter
from .decoder_layer import DecoderLayer
from .growth import growth_of
from .projections import Projections, first_of, refuse_unused
from .rotary import Rotary, refuse_length_dependent
from .text_part import text_config, text_decoder
from .weights import decoder_layers

_FINAL_NORM = ("norm", "final_layernorm", "final_layer_norm", "ln_f")

_KINDS_OF_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")

_ROTATED_WHERE_SLIDING = ("Cohere2Model", "Exaone4Model")
"""Decoders whose layers that see everything have no positions."""


class DecoderAdapter(BaseAdapter):
    """`ModelAdapter` over a transformers decoder with rotary positions. Its layers' modules are called, its attention
    is not."""

    def __init__(self, model: Any) -> None:
        decoder, config = text_decoder(model), text_config(model.config)
        layers = decoder_layers(model)
        self._layers = [DecoderLayer(layer) for layer in layers]
        attentions = [layer.attention for layer in self._layers]
        _refuse_what_cannot_run(model, config, decoder, attentions)
        self._embedding = model.get_input_embeddings()
        self._multiplier = float(getattr(decoder, "embedding_multiplier", 1.0))
        self._growth = [growth_of(attention, config) for attention in attentions]
        self._norm = first_of(decoder, _FINAL_NORM)
        self._head = model.get_output_embeddings()
        self._logit_factor = _logit_factor(model.config)
        self._logit_cap: float | None = getattr(model.config, "final_logit_softcapping", None)
        heads, kv_heads = _heads(config, attentions[0])
        self._projections = [Projections(attention, heads, kv_heads) for attention in attentions]
        self._sinks = [_sinks(attention, self._embedding.weight) for attention in attentions]
        self._rotary = Rotary(decoder.rotary_emb, _kinds(config, decoder, attentions), attentions[0])
        known = (self._embedding, self._norm, decoder.rotary_emb)
        named = list(decoder.named_children())
        stacks = [name for name, child in named if isinstance(child, nn.ModuleList)][:1]
        refuse_unused(decoder, [*stacks, *(name for name, child in named if any(child is each for each in known))])
        super().__init__(self._measure(config, decoder, attentions), self._embedding.weight)

    def _measure(self, config: Any, decoder: Any, attentions: list[Any]) -> ModelGeometry:
        first = self._projections[0]
        return ModelGeometry(
            layers=len(attentions),
            hidden=config.hidden_size,
            heads=first.heads,
            kv_heads=first.kv_heads,
            head_dim=first.head_dim,
            vocab=config.vocab_size,
            scales=tuple(_scale(attention, first.head_dim) for attention in attentions),
            windows=_windows(config, decoder, len(attentions)),
            max_positions=_max_positions(config),
            absolute_positions=False,
            default_alpha=5.0,
            softcap=_declared(config, "attn_logit_softcapping"),
            sinks=any(sinks is not None for sinks in self._sinks),
            chunked="chunked_attention" in (_declared(config, "layer_types") or ()),
            experts=any(layer.of_experts for layer in self._layers),
        )

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[T, D]` of token ids `[T]`; positions enter later."""
        hidden: torch.Tensor = self._embedding(tokens)
        return hidden if self._multiplier == 1 else hidden * self._multiplier

    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's input `[T, D]`, normed where the layer norms there."""
        return self._layers[layer].attention_input(hidden)

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[H, T, d]`, k `[Hkv, T, d]`, v `[Hkv, T, d]` at positions `[T]`; q unscaled."""
        q, k, v = self._projections[layer].qkv(attention_input)
        return self._turned_query(layer, q, positions), self._turned(layer, k, positions), v

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """q `[H, T, d]` of `qkv`."""
        return self._turned_query(layer, self._projections[layer].query(attention_input), positions)

    def _turned(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries or keys x `[heads, T, d]` rotated, and normed where the model norms behind that."""
        return self._projections[layer].normed_behind(self._rotary.rotate(layer, x, positions))

    def _turned_query(self, layer: int, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """q `[H, T, d]` rotated, and longer where the model makes queries of late positions so."""
        turned, growth = self._turned(layer, q, positions), self._growth[layer]
        return turned if growth is None else turned * growth.at(positions).to(q.dtype)[:, None]

    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of `qkv`, each `[Hkv, T, d]`."""
        k, v = self._projections[layer].key_value(attention_input)
        return self._turned(layer, k, positions), v

    def rotate_keys(self, layer: int, k: torch.Tensor, offset: int) -> torch.Tensor:
        """Cached keys `[Hkv, n, d]` of a layer, by `offset` more positions."""
        return self._rotary.rotate_by(layer, k, offset)

    def sinks(self, layer: int) -> torch.Tensor | None:
        """The layer's attention sinks `[H]`, where it has any."""
        return self._sinks[layer]

    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual stream `[T, D]` from the layer's input `[T, D]` and `attended` `[T, H * d]`. Where the MLP runs
        beside the attention, it is in it already."""
        return self._layers[layer].after_attention(hidden, self._projections[layer].output(attended))

    def mlp(self, layer: int, residual: torch.Tensor) -> torch.Tensor:
        """The layer's output `[T, D]` from the residual stream behind its attention."""
        return self._layers[layer].mlp(residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[T, V]` of the last layer's output `[T, D]`."""
        logits: torch.Tensor = self._head(self._norm(hidden))
        if self._logit_factor != 1:
            logits = logits * self._logit_factor
        if self._logit_cap is not None:
            logits = (logits / self._logit_cap).tanh() * self._logit_cap
        return self._widen(logits)


def _refuse_what_cannot_run(model: Any, config: Any, decoder: Any, attentions: list[Any]) -> None:
    """Raises ModelError for what no part of this adapter could compute, with its reason."""
    name = type(model).__name__
    if getattr(config, "alibi", False) or hasattr(decoder, "build_alibi_tensor"):
        raise ModelError(
            f"{name} tells positions by a bias on its attention scores (ALiBi), which no kernel here adds; supported "
            "are rotary positions and tables of learned ones",
            reason="alibi",
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ModelError(f"{name} attends to later tokens too; only causal decoders run", reason="bidirectional")
    if getattr(decoder, "rotary_emb", None) is None:
        raise ModelError(f"{name} has no rotary positions (rotary_emb) and no adapter of its own", reason="positions")
    for kind in _declared(config, "layer_types") or []:
        if kind not in _KINDS_OF_LAYERS:
            raise ModelError(f"{name} has layers of the kind {kind!r}, which is not known", reason="layer_type")
    rope_type = getattr(decoder.rotary_emb, "rope_type", "default")
    refuse_length_dependent(tuple(rope_type.values()) if isinstance(rope_type, dict) else (rope_type,))
    if len(attentions) != config.num_hidden_layers:
        raise ModelError(f"{name} has {len(attentions)} layers, not {config.num_hidden_layers}", reason="modules")


def _heads(config: Any, attention: Any) -> tuple[int, int]:
    """(query heads, KV heads). Raises ModelError where they do not group."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(attention, "num_kv_heads", None) or _declared(config, "num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ModelError(
            f"{heads} query heads cannot share {kv_heads} KV heads evenly; "
            "num_attention_heads must be a multiple of num_key_value_heads",
            reason="heads",
        )
    return heads, kv_heads


def _sinks(attention: Any, embedding: torch.Tensor) -> torch.Tensor | None:
    """A layer's attention sinks `[H]` on the device of the model, wherever the layer's weights are."""
    sinks: torch.Tensor | None = getattr(attention, "sinks", None)
    if sinks is None:
        return None
    return sinks.detach().to(embedding.device, torch.promote_types(sinks.dtype, torch.float32))


def _scale(attention: Any, head_dim: int) -> float:
    """What the layer multiplies q·k by."""
    return float(getattr(attention, "scaling", None) or head_dim**-0.5)


def _declared(config: Any, name: str) -> Any:
    """An entry of the configuration, None where its class has no such field: a stray entry in a file counts for
    nothing, as in transformers."""
    return getattr(config, name, None) if any(field.name == name for field in fields(config)) else None


def _windows(config: Any, decoder: Any, layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window. A model slides if the file of its class makes masks that do: Llama's does not,
    whatever its configuration says."""
    slides = hasattr(sys.modules[type(decoder).__module__], "create_sliding_window_causal_mask")
    window: int | None = getattr(config, "sliding_window", None) if slides else None
    types = _declared(config, "layer_types") or ["sliding_attention"] * layers
    shown = {"sliding_attention": window, "chunked_attention": getattr(config, "attention_chunk_size", None)}
    return tuple(shown.get(kind) for kind in types)


def _kinds(config: Any, decoder: Any, attentions: list[Any]) -> list[str | None]:
    """Under which name each layer finds its rotation in the rotary module; None for layers without positions."""
    several = isinstance(getattr(decoder.rotary_emb, "rope_type", None), dict)
    types = _declared(config, "layer_types") or [""] * len(attentions)
    without = type(decoder).__name__ in _ROTATED_WHERE_SLIDING
    kinds: list[str | None] = []
    for attention, kind in zip(attentions, types, strict=True):
        turns = getattr(attention, "use_rope", True) and not (without and kind == "full_attention")
        kinds.append((kind if several else "") if turns else None)
    return kinds


def _logit_factor(config: Any) -> float:
    """What logits are multiplied by: Cohere's `logit_scale`, or one over Granite's `logits_scaling`. (A multimodal
    model does neither, whatever its text part says: its head is its own.)"""
    scale, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    return float(scale or 1.0) / float(divisor or 1.0)


def _max_positions(config: Any) -> int:
    """Positions the model was built for; YaRN checkpoints often state only those it was first trained on."""
    trained: int = config.max_position_embeddings
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type") == "yarn":
        return max(trained, int(rope["factor"] * (rope.get("original_max_position_embeddings") or trained)))
    return trained
