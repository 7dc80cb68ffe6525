"""A digest that tells one model from another in a fraction of a second, wherever and however its weights are stored.

Skew artifacts, the calibration cache and stored sessions belong to one model; this is how they know it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

from .packed import packing_of, tensors_of
from .text_part import is_of, other_parts, text_config

_VERSION = 2
_SAMPLES = 512
"""Elements of each tensor that are hashed: every element of a bias or gain of a small model, 0.3 MB of an 8B model."""
_SPREAD = 2_654_435_761
"""Knuth's multiplicative hash, a prime: multiples of it fall on all rows and columns, where a stride may miss some."""

_ESSENTIALS = (
    "rope_parameters",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "layer_norm_epsilon",
    "layer_norm_elementwise_affine",
    "do_layer_norm_before",
    "hidden_act",
    "activation_function",
    "sliding_window",
    "use_sliding_window",
    "layer_types",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "tie_word_embeddings",
)
"""What changes a model's numbers and cannot be seen from the names, shapes and values of its weights."""

_OF_SOME = (
    "hidden_activation",
    "layer_norm_eps",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "logit_scale",
    "no_rope_layers",
    "use_parallel_residual",
    "parallel_attn",
    "new_decoder_architecture",
    "multi_query",
    "num_kv_heads",
    "num_experts_per_tok",
    "norm_topk_prob",
    "routed_scaling_factor",
    "attention_value_scale",
    "attention_chunk_size",
    "attn_temperature_tuning",
    "attn_scale",
    "floor_scale",
)
"""The same, of architectures that came later: named only where a configuration has them, so that the fingerprints of
the others stay."""


def fingerprint(model: Any) -> str:
    """sha256, 64 hex digits, of a loaded transformers model: its architecture, the configuration that changes its
    numbers, and name, shape and a fixed sample of up to 512 elements of every weight, rounded to bfloat16; of a
    multimodal model, those of its text part.

    The same on every device, for every layout of the checkpoint's files, for every version of transformers, and whether
    a model is loaded in float32 or in bfloat16: what is calibrated on a CPU serves the same model on a GPU. What is
    tied to a dtype (stored KV) must name it beside the fingerprint. A change that touches none of the sampled elements,
    or is lost in the rounding, goes unseen; training changes them all.
    """
    digest = hashlib.sha256(f"offload-rt model {_VERSION}\n{_architecture(model)}\n".encode())
    samples = []
    weights = dict(model.named_parameters())
    if packing_of(model) is not None:  # some keep packed numbers in buffers
        weights |= dict(model.named_buffers())
    others = other_parts(model)
    for name, weight in sorted(weights.items()):
        if any(is_of(part, name) for part in others):
            continue
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        samples += [_sample(tensor.detach()).to(torch.bfloat16) for tensor in tensors_of(weight)]
    # One copy to the host, not one per weight.
    digest.update(torch.cat(samples).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _architecture(model: nn.Module) -> str:
    """The model's class and the essentials of its configuration as canonical JSON."""
    config: Any = text_config(model.config)
    essentials = {key: _canonical(getattr(config, key, None)) for key in _ESSENTIALS}
    further = {key: _canonical(getattr(config, key, None)) for key in _OF_SOME}
    essentials |= {key: value for key, value in further.items() if value is not None}
    return json.dumps({"architecture": type(model).__name__, "config": essentials}, sort_keys=True)


def _canonical(value: Any) -> Any:
    """`value` with every number a float (checkpoints write 10000 and 10000.0) and without keys that say nothing."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return value


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """`[min(512, elements)]` elements of `weight`, always the same ones, however it lies in memory, on its device."""
    elements = weight.numel()
    if elements <= _SAMPLES:
        return weight.reshape(-1)
    index = torch.arange(_SAMPLES, device=weight.device) * _SPREAD % elements
    return weight[torch.unravel_index(index, weight.shape)]
