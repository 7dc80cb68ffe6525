"""Tiny random models of all supported families, with valid shapes that no real model has."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import PreTrainedModel

from support.architectures import LATENT, RECURRENT, RUNS, build

WINDOWS = (1, 2, 12, 31, 63, 64, 65, 100, 127, 128, 129, 200)
HEAD_STEP = {
    "phi": 4,
    "phi4_mini": 4,
    "glm": 4,
    "glm4": 4,
    "gpt_neox": 8,
    "gpt_neox_sequential": 8,
    "opt": 1,
    "gpt2": 1,
}
"""Required divisor of the head size: 1 without RoPE, 2 with RoPE, more if only a part of each head is rotated."""
FIXED_HEADS = ("qwen2_vl", "qwen2_5_vl", "mimo_v2_flash", *LATENT)
"""Families whose head size is fixed, because other options depend on it."""
HEAD_SIZES = (8, 18, 32, 32, 64)
"""Head sizes for half of the models. C kernels support multiples of 32."""
PLAIN_ROPE = ("mistral", "qwen2", "qwen3", "granite", "olmo2", "starcoder2")
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
)


def random_model(rng: random.Random) -> tuple[str, PreTrainedModel]:
    name = rng.choice([name for name in RUNS if name not in RECURRENT])
    kind = RUNS[name]
    text = kind.options.get("text_config", kind.options)
    changes = {**_heads(rng, name, text), **_layers(rng, text)}
    if name in PLAIN_ROPE:
        changes["rope_parameters"] = rng.choice(ROPES) | {"rope_theta": 1e4}
    if name not in ("llama4", "mimo_v2_flash"):
        changes["tie_word_embeddings"] = rng.random() < 0.3
    if "text_config" in kind.options:
        options = kind.options | {"text_config": text | changes}
    else:
        options = kind.options | changes
    dtype = torch.float64 if "mixture of experts" not in kind.traits and rng.random() < 0.4 else torch.float32
    return f"{name} {changes} {dtype}", build(kind.config, dtype, **options)


def _heads(rng: random.Random, name: str, text: dict[str, Any]) -> dict[str, Any]:
    if name in FIXED_HEADS:
        return {}
    kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 5))
    step = HEAD_STEP.get(name, 2)
    size = step * rng.randint(1 if step > 2 else -(-3 // step), max(1, 36 // step))
    if rng.random() < 0.5:
        size = rng.choice([known for known in HEAD_SIZES if known % step == 0])
    changes: dict[str, Any] = {"num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads}
    if "num_kv_heads" in text:
        changes["num_kv_heads"] = kv_heads
    if "head_dim" in text:
        return changes | {"head_dim": size, "hidden_size": kv_heads * group * 8}
    changes["hidden_size"] = kv_heads * group * size
    if name == "opt":
        changes["word_embed_proj_dim"] = changes["hidden_size"]
    if "mamba_d_head" in text:
        # The configuration checks these sizes although no layer is recurrent.
        changes["mamba_d_head"] = changes["hidden_size"] * text["mamba_expand"] // text["mamba_n_heads"]
    return changes


def _layers(rng: random.Random, text: dict[str, Any]) -> dict[str, Any]:
    if "num_kv_shared_layers" in text:  # few patterns are valid: each kind of layer must store KV before it is shared
        return {}
    count = rng.randint(1, 4)
    changes: dict[str, Any] = {"num_hidden_layers": count}
    if "sliding_window" in text and text["sliding_window"] is not None:
        changes["sliding_window"] = rng.choice(WINDOWS)
    if "attention_chunk_size" in text:
        changes["attention_chunk_size"] = rng.choice(WINDOWS)
    kinds = text.get("layer_types", ())
    if kinds and set(kinds) != {"full_attention"}:
        narrow = next(kind for kind in kinds if kind != "full_attention")
        slides = [rng.random() < rng.choice((0.5, 0.5, 1.0)) for _ in range(count)]
        changes["layer_types"] = [narrow if own else "full_attention" for own in slides]
        if "no_rope_layers" in text:
            changes["no_rope_layers"] = [int(own) for own in slides]
    elif kinds:
        changes["layer_types"] = ["full_attention"] * count
    elif "no_rope_layers" in text:
        changes["no_rope_layers"] = [rng.randint(0, 1) for _ in range(count)]
    return changes
