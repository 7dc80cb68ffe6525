"""Dimensions and weight sizes of plain decoders, computed from config.json without transformers.

Building a model on the meta device takes four seconds of processor time, most of it for imports. `plain_shape` handles
Llama, Mistral, Qwen2 and Qwen3 without options that change shapes, and leaves all other models to `load_shape`. The
tests compare its results with those of models on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ..core import ModelGeometry
from ..utils.small_files import read_json
from .source import ModelSource
from .weights import WeightSizes, aligned

_IGNORED = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "hidden_act",
    "initializer_range", "max_window_layers", "model_type", "pad_token_id", "pretraining_tp", "rms_norm_eps",
    "rope_theta", "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
})  # fmt: skip
"""Entries of config.json that change neither shapes nor the support of a model by this package."""

_READ = frozenset({
    "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "tie_word_embeddings", "vocab_size",
})  # fmt: skip

_ROPE = frozenset({
    "factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings", "rope_theta", "rope_type",
})  # fmt: skip


@dataclass(frozen=True)
class _Family:
    """Options of the models with one `model_type`.

    Attributes:
        architecture: Name of the transformers class.
        required: Entries whose default value differs from that of Llama.
        bias: Whether the query, key and value projections have biases.
        norms: Whether queries and keys are normalised.
    """

    architecture: str
    required: tuple[str, ...] = ()
    bias: bool = False
    norms: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM"),
    "mistral": _Family("MistralForCausalLM", ("sliding_window", "num_key_value_heads")),
    "qwen2": _Family("Qwen2ForCausalLM", ("num_key_value_heads",), bias=True),
    "qwen3": _Family("Qwen3ForCausalLM", ("head_dim", "num_key_value_heads"), norms=True),
}
"""The plain decoders, by `model_type`."""


class PlainShape(NamedTuple):
    """Shape of a plain decoder, in any dtype."""

    geometry: ModelGeometry
    tied: bool
    matrices: tuple[tuple[int, ...], ...]  # shapes of the weights of a decoder layer
    dtype: str | None  # stated in config.json

    def weight_bytes(self, itemsize: int) -> int:
        """Return the size in bytes of all weights and buffers, without alignment."""
        layer = sum(prod(shape) * itemsize for shape in self.matrices)
        return self.sizes(itemsize).fixed + layer * self.geometry.layers

    def sizes(self, itemsize: int) -> WeightSizes:
        """Return the sizes of the weights in a dtype of `itemsize` bytes."""
        geometry = self.geometry
        embedding = geometry.vocab * geometry.hidden * itemsize
        rotary = 2 * (geometry.head_dim // 2) * 4  # the frequencies and their original values, in float32
        layer = sum(aligned(prod(shape) * itemsize) for shape in self.matrices)
        return WeightSizes(
            fixed=(1 if self.tied else 2) * embedding + geometry.hidden * itemsize + rotary,
            layers=(layer,) * geometry.layers,
            widest=max(side for shape in self.matrices if len(shape) == 2 for side in shape),
            embedding=0 if self.tied else embedding,
        )


def plain_shape(source: ModelSource) -> PlainShape | None:
    """Return the shape of a plain decoder in a local folder. None if it may be anything else, or is damaged."""
    folder = source.folder
    if folder is None or source.gguf is not None or (folder / "adapter_config.json").exists():
        return None
    try:
        return _shape_of(read_json(folder / "config.json"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # Building the model will report the error.


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
    matrices: list[tuple[int, ...]] = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    matrices += [(mlp, hidden), (mlp, hidden), (hidden, mlp), (hidden,), (hidden,)]
    matrices += [(queries,), (keys,), (keys,)] if family.bias else []
    matrices += [(d,), (d,)] if family.norms else []
    dtype = config.get("dtype") or config.get("torch_dtype")
    return PlainShape(geometry, bool(config.get("tie_word_embeddings")), tuple(matrices), dtype)


def _is_plain(config: Mapping[str, Any]) -> bool:
    """Return whether all entries are known, and those that could change shapes have values that do not."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    slides = config.get("sliding_window") is not None and config.get("use_sliding_window") is not False
    known = {
        "attention_bias": config.get("attention_bias") in (None, False),
        "layer_types": set(config.get("layer_types") or ()) <= {"full_attention"},
        "mlp_bias": config.get("mlp_bias") in (None, False),
        "rope_parameters": set(rope) <= _ROPE and rope.get("rope_type", "default") in ("default", "llama3"),
        "rope_scaling": not (config.get("rope_parameters") and config.get("rope_scaling")),
        "sliding_window": not slides,
        "use_sliding_window": config.get("use_sliding_window") in (None, False),
    }
    return set(config) <= _IGNORED | _READ | set(known) and all(known.values())
