"""Queues of turns in a small pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from offload_rt import LLM, SamplingParams
from offload_rt.sessions.turn_queue import TurnQueue

from .tiny_models import tiny_model, tiny_prompt

SHORT = SamplingParams(max_tokens=7, temperature=0)
NAMES = ("ada", "bob", "cyd", "dan")
LAYERS = 3
BLOCK_BYTES = LAYERS * 2 * 2 * 64 * 32 * 4
MODEL = tiny_model("llama", dtype=torch.float32, num_hidden_layers=LAYERS)


def make_llm(blocks: int = 400, **options: Any) -> LLM:
    chosen = {"policy": "full"} | options
    size = BLOCK_BYTES
    if "kv_cache_dtype" in options:
        size = LLM(MODEL, dtype="float32", host_memory="1MiB", **chosen).runner.pool.block_bytes
    llm = LLM(MODEL, dtype="float32", host_memory=blocks * size, **chosen)
    assert llm.runner.pool.block_count == blocks
    return llm


def turn(name: str, number: int) -> list[int]:
    return tiny_prompt(70 + 10 * number, seed=1000 * NAMES.index(name) + number)


def drain(queue: TurnQueue) -> Iterator[None]:
    while not queue.idle:
        queue.step()
        queue.check_integrity()
        yield
