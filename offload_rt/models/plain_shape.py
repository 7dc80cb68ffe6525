"""Dimensions and weight shapes of plain decoders, computed from config.json without importing torch or transformers.

Building a model on the meta device takes four seconds, mostly for imports. `plain_shape` avoids this for Llama,
Mistral, Qwen2 and Qwen3, unless an option changes the shapes. `load_shape` handles all other models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core import ModelGeometry
from ..errors import ModelError
from ..utils.small_files import read_json
from .source import ModelSource
from .stored_tensors import stored_tensors

_IGNORED = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id",
    "initializer_range", "max_window_layers", "model_type", "pad_token_id", "pretraining_tp", "rms_norm_eps",
    "rope_theta", "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
})  # fmt: skip
"""Entries of config.json that affect neither the shapes nor whether this package supports the model."""

_READ = frozenset({
    "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "tie_word_embeddings", "vocab_size",
})  # fmt: skip

_ROPE = frozenset({
    "factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings", "rope_theta", "rope_type",
})  # fmt: skip


@dataclass(frozen=True)
class _Family:
    """How the models of one `model_type` differ from Llama."""

    architecture: str  # name of the transformers class
    required: tuple[str, ...] = ()  # entries of config.json with defaults that differ from Llama's
    bias: bool = False  # the query, key and value projections have biases
    norms: bool = False  # queries and keys are normalised


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM"),
    "mistral": _Family("MistralForCausalLM", ("sliding_window", "num_key_value_heads")),
    "qwen2": _Family("Qwen2ForCausalLM", ("num_key_value_heads",), bias=True),
    "qwen3": _Family("Qwen3ForCausalLM", ("head_dim", "num_key_value_heads"), norms=True),
}
"""The plain decoders, by `model_type`."""


class PlainShape(NamedTuple):
    geometry: ModelGeometry
    tied: bool
    layer: Mapping[str, tuple[int, ...]]  # shapes of the weights of a decoder layer, by name
    dtype: str | None  # stated in config.json

    def weights(self) -> dict[str, tuple[int, ...]]:
        geometry = self.geometry
        matrix = (geometry.vocab, geometry.hidden)
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": matrix}
        for i in range(geometry.layers):
            found |= {f"model.layers.{i}.{name}": shape for name, shape in self.layer.items()}
        return found | {"model.norm.weight": (geometry.hidden,)} | ({} if self.tied else {"lm_head.weight": matrix})


def plain_shape(source: ModelSource) -> PlainShape | None:
    """Return the shape of a plain decoder in a local folder. Return None for other models and if a file is damaged."""
    folder = source.folder
    if folder is None or source.gguf is not None or (folder / "adapter_config.json").exists():
        return None
    try:
        return _shape_of(read_json(folder / "config.json"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # Building the model will report the error.


def check_shapes(source: ModelSource) -> None:
    """Raise ModelError if a weight of a plain decoder is missing or its shape does not match config.json.

    Only file headers are read. Other models are not checked, and neither are files that use other weight names.
    """
    if (plain := plain_shape(source)) is None:
        return
    stored = {tensor.name: tensor.shape for tensor in stored_tensors(source)}
    if "model.norm.weight" not in stored:
        return
    expected = plain.weights()
    if absent := [name for name in expected if name not in stored]:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise ModelError(
            f"the checkpoint {source} lacks {absent[0]}{more}, which config.json requires "
            f"({plain.geometry.layers} layers); it is not a complete model: download all of its files again"
        )
    for name, shape in expected.items():
        if stored[name] != shape:
            raise ModelError(
                f"the checkpoint {source} has another shape for {name} than config.json states: {list(stored[name])} "
                f"instead of {list(shape)}; the files are of different models, so download them again"
            )


def _shape_of(config: Mapping[str, Any]) -> PlainShape | None:
    family = _FAMILIES.get(config["model_type"])
    if family is None or config["architectures"] != [family.architecture]:
        return None
    if not (all(name in config for name in family.required) and _is_plain(config)):
        return None
    hidden, heads, layers = (config[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    kv_heads = config.get("num_key_value_heads") or heads
    d = config.get("head_dim") or hidden // heads
    others = [config[name] for name in ("intermediate_size", "vocab_size", "max_position_embeddings")]
    if (
        not all(type(each) is int and each > 0 for each in (hidden, heads, layers, kv_heads, d, *others))
        or heads % kv_heads
        or d % 2
    ):
        return None
    geometry = ModelGeometry(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=d,
        vocab=config["vocab_size"],
        scales=(d**-0.5,) * layers,
        windows=(None,) * layers,
        max_positions=config["max_position_embeddings"],
        absolute_positions=False,
        default_alpha=5.0,
    )
    queries, keys, mlp = heads * d, kv_heads * d, config["intermediate_size"]
    outputs = {"q": queries, "k": keys, "v": keys}
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": (n, hidden) for name, n in outputs.items()}
    layer |= {"self_attn.o_proj.weight": (hidden, queries), "mlp.gate_proj.weight": (mlp, hidden)}
    layer |= {"mlp.up_proj.weight": (mlp, hidden), "mlp.down_proj.weight": (hidden, mlp)}
    layer |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    layer |= {f"self_attn.{name}_proj.bias": (n,) for name, n in outputs.items() if family.bias}
    layer |= {f"self_attn.{name}_norm.weight": (d,) for name in "qk" if family.norms}
    dtype = config.get("dtype") or config.get("torch_dtype")
    return PlainShape(geometry, bool(config.get("tie_word_embeddings")), layer, dtype)


def _is_plain(config: Mapping[str, Any]) -> bool:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    slides = config.get("sliding_window") is not None and config.get("use_sliding_window") is not False
    known = {
        "hidden_act": config.get("hidden_act", "silu") == "silu",
        "attention_bias": config.get("attention_bias") in (None, False),
        "layer_types": set(config.get("layer_types") or ()) <= {"full_attention"},
        "mlp_bias": config.get("mlp_bias") in (None, False),
        "rope_parameters": set(rope) <= _ROPE and rope.get("rope_type", "default") in ("default", "llama3"),
        "rope_scaling": not (config.get("rope_parameters") and config.get("rope_scaling")),
        "sliding_window": not slides,
        "use_sliding_window": config.get("use_sliding_window") in (None, False),
    }
    return set(config) <= _IGNORED | _READ | set(known) and all(known.values())
