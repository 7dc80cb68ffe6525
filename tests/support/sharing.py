"""Create float32 runtimes with small pools for tests of shared prefixes."""

from __future__ import annotations

from typing import Any

import torch

from offload_rt import LLM, SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.model_runner.batch import SharedPrefixes

from .staged_transfer import staged as with_staging
from .tiny_models import depth, tiny_model

LAYERS = 2
BLOCK_BYTES = 2 * LAYERS * 2 * 32 * BLOCK_SIZE * 4
ROW = 2 * 2 * 32 * 4
"""Bytes of K and V for one token in one layer, with two KV heads of size 32 in float32."""


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0)


def make_llm(name: str = "llama", *, blocks: int = 200, staged: bool = False, **options: Any) -> LLM:
    model = tiny_model(name, dtype=torch.float32, **depth(name, LAYERS))
    llm = LLM(model, **({"policy": "full", "dtype": "float32", "host_memory": blocks * BLOCK_BYTES} | options))
    runner = llm.runner
    runner.prefixes = SharedPrefixes(ROW, min_saved=1)
    return with_staging(llm) if staged else llm
