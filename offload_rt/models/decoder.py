"""The adapter of most decoders: Llama and models with a similar structure.

The adapter infers the model's structure from its module names and configuration, and raises ModelError if it does not
recognise the structure. This module handles geometry, embedding and head; `decoder_layer` and `rotary` handle the
layers.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from ..core import ModelGeometry, RowShape
from ..errors import ModelError
from .adapter import ModelAdapter
from .decoder_layer import DecoderLayer, Projections, first_of, refuse_unused
from .kv_sharing import kv_sources
from .latent_attention import LatentProjections, is_latent
from .layer_embeddings import LayerEmbeddings
from .multimodal import text_config, text_decoder
from .recurrent import RecurrentState, Stage, recurrent_mixer, run_layer, state_shapes
from .rotary import Rotary, refuse_length_dependent, unrotated
from .weights import attention_layers, decoder_layers

_FINAL_NORM = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "embedding_norm", "norm_f")

_ROTARY = ("rotary_emb", "pos_emb")

_KINDS_OF_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")

_CAPPED_AS_TEXT = ("Gemma4ForConditionalGeneration",)
"""Multimodal classes that apply the `final_logit_softcapping` in their language model's configuration.

Other multimodal classes ignore it.
"""

_ROPE_IN_SLIDING_LAYERS_ONLY = ("Cohere2Model", "Exaone4Model")
"""Model classes that rotate queries and keys only in sliding-window layers."""


@dataclass(frozen=True)
class AttentionTemperature:
    """Attention temperature scaling of one layer, which keeps the softmax sharp over long texts.

    Queries are multiplied by 1 + rate log(1 + floor((position + position_offset) / step)).
    """

    rate: float
    step: float
    position_offset: int

    @classmethod
    def of(cls, attention: Any, config: Any) -> AttentionTemperature | None:
        """Return the scaling of a layer, or None if it has none.

        Llama 4 scales in layers without RoPE, Ministral 3 in all layers.
        """
        if getattr(config, "attn_temperature_tuning", False):
            return None if attention.use_rope else cls(float(attention.attn_scale), float(attention.floor_scale), 1)
        rope = _rope(config)
        rate = rope.get("llama_4_scaling_beta")
        return None if rate is None else cls(float(rate), float(rope["original_max_position_embeddings"]), 0)

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        return 1 + self.rate * torch.log1p(torch.floor((positions.float() + self.position_offset) / self.step))

    def scale_queries(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return q * self.factors(positions).to(q.dtype)[:, None]


class DecoderAdapter(ModelAdapter):
    """`ModelAdapter` for transformers decoders with rotary positions.

    Each decoder layer without attention is called as a single module (see `recurrent`).
    """

    def __init__(self, model: Any) -> None:
        decoder, config = text_decoder(model), text_config(model.config)
        layers = decoder_layers(model)
        attention_indices = attention_layers(layers)
        self._decoder_layers, self._attention_indices = layers, attention_indices
        self._layers_between = [range(a + 1, b) for a, b in itertools.pairwise((-1, *attention_indices, len(layers)))]
        """Ranges of decoder layers without attention: before the first attention layer, between attention layers, and
        after the last.
        """
        states = state_shapes(type(model).__name__, layers, attention_indices)
        _refuse_unsupported(model, config, decoder, layers, attention_indices)
        self._layers = [DecoderLayer(layers[i]) for i in attention_indices]
        attentions = [layer.attention for layer in self._layers]
        self._embedding = model.get_input_embeddings()
        self._multiplier = float(getattr(decoder, "embedding_multiplier", 1.0))
        self._temperatures = [AttentionTemperature.of(attention, config) for attention in attentions]
        self._norm = first_of(decoder, _FINAL_NORM)
        self._head = model.get_output_embeddings()
        self._logit_factor = _logit_factor(model.config) * float(getattr(decoder, "lm_head_multiplier", 1.0))
        capped_by = config if type(model).__name__ in _CAPPED_AS_TEXT else model.config
        self._logit_cap: float | None = getattr(capped_by, "final_logit_softcapping", None)
        self._projections = [_projections(config, attention) for attention in attentions]
        windows = _windows(config, decoder, attention_indices)
        full_rows, window_rows = _row_shapes(type(model).__name__, self._projections, windows)
        rotary = _rotary_module(decoder)
        self._rotary = Rotary(rotary, _kinds(config, decoder, rotary, attentions, attention_indices), attentions)
        self._layer_embeddings = LayerEmbeddings.find(decoder, self._embedding)
        embedding_modules = () if self._layer_embeddings is None else self._layer_embeddings.modules
        used_modules = (self._embedding, self._norm, rotary, *embedding_modules)
        children = list(decoder.named_children())
        stacks = [name for name, child in children if isinstance(child, nn.ModuleList)][:1]
        used_names = (name for name, child in children if any(child is module for module in used_modules))
        refuse_unused(decoder, [*stacks, *used_names])
        weight = self._embedding.weight
        self._state: RecurrentState | None = None
        self._gates: dict[int, torch.Tensor] | None = None
        sinks = [_sinks(attention, weight) for attention in attentions]
        geometry = replace(
            self._geometry_of(config, attentions, full_rows, windows),
            states=states,
            window_rows=window_rows,
            sinks=any(sink is not None for sink in sinks),
            kv_from=kv_sources(attentions),
        )
        super().__init__(geometry, weight.dtype, weight.device, sinks)

    def _geometry_of(
        self, config: Any, attentions: list[Any], rows: RowShape, windows: tuple[int | None, ...]
    ) -> ModelGeometry:
        hybrid = len(self._decoder_layers) > len(attentions)
        return ModelGeometry(
            layers=len(attentions),
            hidden=config.hidden_size,
            heads=self._projections[0].heads,
            kv_heads=rows.kv_heads,
            head_dim=rows.head_dim,
            vocab=config.vocab_size,
            scales=tuple(
                float(getattr(attention, "scaling", None) or projection.default_scale)
                for attention, projection in zip(attentions, self._projections, strict=True)
            ),
            windows=windows,
            max_positions=_max_positions(config),
            absolute_positions=False,
            default_alpha=5.0,
            softcap=_declared(config, "attn_logit_softcapping"),
            chunked="chunked_attention" in (_declared(config, "layer_types") or ()),
            experts=any(hasattr(module, "experts") for layer in self._decoder_layers for module in layer.modules()),
            attention_at=tuple(self._attention_indices) if hybrid else (),
            depth=len(self._decoder_layers) if hybrid else 0,
            value_dim=self._projections[0].value_dim,
        )

    def with_state(self, state: RecurrentState | None) -> Self:
        if state is None:
            return self
        bound = copy.copy(self)
        bound._state, bound._gates = state, {}
        return bound

    def stages(self, layer: int) -> Sequence[Stage]:
        between = self._layers_between[layer + 1]
        return [Stage(i, partial(self._run, i, self._decoder_layers[i])) for i in between] if between else ()

    def _run(self, decoder_layer: int, module: Any, hidden: torch.Tensor) -> torch.Tensor:
        return run_layer(module, decoder_layer, hidden, self._state)

    def replay_mixer(self, decoder_layer: int, inputs: torch.Tensor) -> None:
        self._run(decoder_layer, recurrent_mixer(self._decoder_layers[decoder_layer]), inputs)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert self._state is not None or not self.geometry.states, "with_state binds the adapter to sequences"
        hidden: torch.Tensor = self._embedding(tokens)
        return hidden if self._multiplier == 1 else hidden * self._multiplier

    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        normed, multiplier = self._layers[layer].before_attention(hidden), self._layers[layer].input_multiplier
        return normed if multiplier == 1 else normed * multiplier

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        projections, temperature = self._projections[layer], self._temperatures[layer]
        rotate = self._rotary.rotation_to(layer, positions, attention_input)
        if projections.gated and self._gates is not None:
            q, self._gates[layer] = projections.query_and_gate(attention_input, rotate)
            k, v = projections.key_value(attention_input, rotate)
        else:
            q, k, v = projections.qkv(attention_input, rotate)
        return q if temperature is None else temperature.scale_queries(q, positions), k, v

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q = self._projections[layer].query(attention_input, self._rotary.rotation_to(layer, positions, attention_input))
        temperature = self._temperatures[layer]
        return q if temperature is None else temperature.scale_queries(q, positions)

    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotate = self._rotary.rotation_to(layer, positions, attention_input)
        return self._projections[layer].key_value(attention_input, rotate)

    def rotate_keys(self, layer: int, k: torch.Tensor, offset: int) -> torch.Tensor:
        return self._projections[layer].rotate_cached(k, self._rotary.rotation_by(layer, offset, k))

    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        projections = self._projections[layer]
        projected = projections.output(attended, self._gate(layer, hidden) if projections.gated else None)
        run_mixer = partial(self._run, self._attention_indices[layer])
        return self._layers[layer].after_attention(hidden, projected, run_mixer)

    def _gate(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        if self._gates is not None and (gate := self._gates.pop(layer, None)) is not None:
            return gate  # In a decode step, the gate has already been computed by `qkv`.
        # The query is not used, so it need not be rotated.
        return self._projections[layer].query_and_gate(self.attention_input(layer, hidden), unrotated)[1]

    def mlp(self, layer: int, residual: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        embeddings, index = self._layer_embeddings, self._attention_indices[layer]
        return self._layers[layer].mlp(residual, None if embeddings is None else partial(embeddings, index, tokens))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(self._norm(hidden))
        if self._logit_factor != 1:
            logits = logits * self._logit_factor
        if self._logit_cap is not None:
            logits = (logits / self._logit_cap).tanh() * self._logit_cap
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _rotary_module(decoder: Any) -> Any:
    return next((module for name in _ROTARY if (module := getattr(decoder, name, None)) is not None), None)


def _refuse_unsupported(
    model: Any, config: Any, decoder: Any, layers: list[nn.Module], attention_indices: list[int]
) -> None:
    name = type(model).__name__
    if getattr(config, "alibi", False) or hasattr(decoder, "build_alibi_tensor"):
        raise ModelError(
            f"{name} encodes positions as a bias on attention scores (ALiBi), which is not supported; rotary and "
            "learned positions are supported",
            reason="alibi",
        )
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):  # "vision": images only
        raise ModelError(
            f"{name} also attends to later tokens; only causal decoders are supported", reason="bidirectional"
        )
    rotary = _rotary_module(decoder)
    # Recurrent layers depend on the order of tokens, so hybrid models may do without rotary positions.
    if len(attention_indices) == len(layers) and not any(hasattr(decoder, attribute) for attribute in _ROTARY):
        raise ModelError(f"{name} has no rotary positions (rotary_emb) and no registered adapter", reason="positions")
    types = _layer_types(config, attention_indices) or []
    unsupported_types = [kind for kind in types if kind not in _KINDS_OF_LAYERS]
    if unsupported_types:
        raise ModelError(
            f"{unsupported_types.count(unsupported_types[0])} of the {len(layers)} layers of {name} are of type "
            f"{unsupported_types[0]!r}, which is not supported",
            reason="layer_type",
        )
    rope_type = getattr(rotary, "rope_type", "default")
    refuse_length_dependent(tuple(rope_type.values()) if isinstance(rope_type, dict) else (rope_type,))
    if len(layers) != config.num_hidden_layers:
        raise ModelError(
            f"{name} has {len(layers)} decoder layers; its configuration has {config.num_hidden_layers}",
            reason="modules",
        )


def _projections(config: Any, attention: Any) -> Projections | LatentProjections:
    return LatentProjections(attention) if is_latent(attention) else Projections(attention, *_heads(config, attention))


def _heads(config: Any, attention: Any) -> tuple[int, int]:
    heads = int(config.num_attention_heads)
    layer_config = config
    if getattr(config, "is_heterogeneous", False):  # Gemma 4
        layer_config = config.per_layer_config[attention.layer_idx]
    kv_heads = int(getattr(attention, "num_kv_heads", None) or _declared(layer_config, "num_key_value_heads") or heads)
    if heads % kv_heads == 0 and (group := getattr(attention, "num_key_value_groups", None)):
        kv_heads = heads // int(group)  # may differ between layers
    if heads % kv_heads:
        raise ModelError(
            f"{heads} query heads cannot share {kv_heads} KV heads evenly; "
            "num_attention_heads must be a multiple of num_key_value_heads",
            reason="heads",
        )
    return heads, kv_heads


def _row_shapes(
    name: str, projections: Sequence[Projections | LatentProjections], windows: tuple[int | None, ...]
) -> tuple[RowShape, RowShape | None]:
    """Return the KV shapes of full-attention layers and of sliding-window layers (None if both are equal).

    If the larger head dimension is not a multiple of the smaller one, all vectors are padded to the larger dimension.
    Raise ModelError if layers of the same type have different shapes.
    """
    shapes_by_kind: dict[bool, set[RowShape]] = {False: set(), True: set()}
    for projection, length in zip(projections, windows, strict=True):
        planes = 2 if projection.value_dim is None else 1
        shapes_by_kind[length is not None].add(RowShape(projection.kv_heads, projection.head_dim, planes))
    if any(len(shapes) > 1 for shapes in shapes_by_kind.values()):
        raise ModelError(
            f"{name} has full-attention layers, or sliding-window layers, with different numbers or widths of KV "
            "heads, which is not supported",
            reason="heads",
        )
    rows = [next(iter(shapes)) for shapes in shapes_by_kind.values() if shapes]
    full, window = rows[0], rows[-1]
    if full == window:
        return full, None
    if 1 in (full.planes, window.planes):
        raise ModelError(f"{name} has latent attention with sliding windows, which is not supported", reason="heads")
    if full.head_dim % window.head_dim:
        max_head_dim = max(full.head_dim, window.head_dim)
        full, window = replace(full, head_dim=max_head_dim), replace(window, head_dim=max_head_dim)
        for projection in projections:
            assert isinstance(projection, Projections)
            projection.pad_to(max_head_dim)
    return full, (window if window != full else None)


def _sinks(attention: Any, embedding: torch.Tensor) -> torch.Tensor | None:
    sinks: torch.Tensor | None = getattr(attention, "sinks", None)
    if sinks is None:
        return None
    return sinks.detach().to(embedding.device, torch.promote_types(sinks.dtype, torch.float32))


def _declared(config: Any, name: str) -> Any:
    """Return a field of `config`, or None if its class does not define this field."""
    return getattr(config, name, None) if any(field.name == name for field in fields(config)) else None


def _layer_types(config: Any, attention_indices: list[int]) -> list[str] | None:
    types = _declared(config, "layer_types")
    return types and [types[i] for i in attention_indices]


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _windows(config: Any, decoder: Any, attention_indices: list[int]) -> tuple[int | None, ...]:
    # Llama's configuration may state a window, but its module does not build a sliding-window mask.
    has_window_mask = hasattr(sys.modules[type(decoder).__module__], "create_sliding_window_causal_mask")
    window: int | None = getattr(config, "sliding_window", None) if has_window_mask else None
    types = _layer_types(config, attention_indices) or ["sliding_attention"] * len(attention_indices)
    window_of_type = {"sliding_attention": window, "chunked_attention": getattr(config, "attention_chunk_size", None)}
    return tuple(window_of_type.get(kind) for kind in types)


def _kinds(
    config: Any, decoder: Any, rotary: Any, attentions: list[Any], attention_indices: list[int]
) -> list[str | None]:
    """Return, for each attention layer, the layer type that selects its RoPE frequencies, or None if it has no RoPE."""
    if rotary is None:
        return [None] * len(attentions)
    per_type = isinstance(getattr(rotary, "rope_type", None), dict)
    types = _layer_types(config, attention_indices) or [""] * len(attentions)
    only_sliding_rotates = type(decoder).__name__ in _ROPE_IN_SLIDING_LAYERS_ONLY
    kinds: list[str | None] = []
    for attention, kind in zip(attentions, types, strict=True):
        rotates = getattr(attention, "use_rope", True) and not (only_sliding_rotates and kind == "full_attention")
        kinds.append((kind if per_type else "") if rotates else None)
    return kinds


def _logit_factor(config: Any) -> float:
    # `config` is the configuration of the whole model: multimodal models ignore the factor of their language model.
    # Cohere has `logit_scale`, and Granite has `logits_scaling`.
    scale, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    return float(scale or 1.0) / float(divisor or 1.0)


def _max_positions(config: Any) -> int:
    trained: int = config.max_position_embeddings
    rope = _rope(config)
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type") == "yarn":  # some checkpoints state only the context length before YaRN scaling
        return max(trained, int(rope["factor"] * (rope.get("original_max_position_embeddings") or trained)))
    return trained
