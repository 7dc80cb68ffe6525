"""Tiny models with sliding-window layers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from offload_rt import LLM, SamplingParams

from .architectures import architecture
from .tiny_models import VOCAB, tiny_model

WINDOW = 48
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "all slide": ("mistral", {"num_hidden_layers": 2}),
    "half slide": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 2}),
    "room to spare": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "num_hidden_layers": 5}),
    "one slides": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "num_hidden_layers": 3}),
    "narrow rows": ("gemma4_moe", {}),
    "many heads": ("mimo_v2_flash", {}),
    "shared": ("gemma4_e2b", {"vocab_size_per_layer_input": VOCAB}),
    "shared after sliding": ("gemma4_e4b", {"vocab_size_per_layer_input": VOCAB}),
}
TWO_SHAPES = ("narrow rows", "many heads", "shared", "shared after sliding")
"""Models whose sliding-window layers have a different row shape than their full-attention layers."""

BOUNDS = {torch.float64: 1e-6, torch.float32: 2e-4}
"""Largest error by dtype. C kernels run in float32, where values of about 10 are rounded."""


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    name, config = MODELS[kind]
    if kind in TWO_SHAPES:
        config = {"vocab_size": VOCAB, "sliding_window": WINDOW, "max_position_embeddings": 4096} | config
        return architecture(name, dtype=dtype, **config)
    return tiny_model(name, dtype=dtype, **config)


def make_llm(kind: str, *, memory: int | str = "64MiB", dtype: torch.dtype = torch.float32, **options: Any) -> LLM:
    return LLM(model_of(kind, dtype), **({"dtype": dtype, "host_memory": memory, "policy": "full"} | options))


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0)
