"""Test the prefix cache of prompts without a session name: in host memory, on disk, and after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.serving import wait_until
from support.tiny_models import VOCAB, tiny_model

from offload_rt import LLM, AsyncLLM, RequestOutput, SamplingParams
from offload_rt.sessions import context

PARAMS = SamplingParams(max_tokens=5, temperature=0)
T = TypeVar("T")

HEADS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}  # head_dim 32
MODELS = {"llama": HEADS, "qwen2": HEADS | {"use_sliding_window": True, "max_window_layers": 1}}


def prompt(tokens: int, seed: int = 1) -> list[int]:
    return [(7 * i * seed + i // 3) % VOCAB for i in range(tokens)]


async def last(engine: AsyncLLM, ids: list[int], params: SamplingParams = PARAMS, **named: Any) -> RequestOutput:
    return [output async for output in engine.generate(ids, params, **named)][-1]


def make(store: Path | None, family: str = "llama", **options: Any) -> AsyncLLM:
    chosen = {"policy": "full", "host_memory": "16MiB"} | options
    return AsyncLLM(LLM(tiny_model(family, **MODELS[family]), **chosen), store=store)


def served(engine: AsyncLLM, use: Callable[[AsyncLLM], Awaitable[T]]) -> T:
    """Run `use` with an engine, and check that nothing is left in use afterwards."""

    async def run() -> T:
        async with engine:
            found = await use(engine)
            await asyncio.to_thread(wait_until, lambda: engine.load().pool_used_bytes == 0)
            engine.llm.runner.check_integrity()
            return found

    return asyncio.run(run())


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("policy", ["full", "infinigen"])
def test_prompts_are_found_again_after_a_restart(
    family: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Send the turns of a stateless client to two servers in turn. All tokens equal those without a cache."""
    monkeypatch.setattr(context, "SEGMENT_SECONDS", 0.0)  # one slice per segment
    options = {"policy": policy, "prefill_chunk_size": 64}
    turns = [prompt(300)]
    for seed in (2, 3):
        answered = served(make(None, family, **options), lambda engine: last(engine, turns[-1]))
        turns.append([*turns[-1], *answered.outputs[0].token_ids, *prompt(70, seed)])
    expected = [served(make(None, family, **options), lambda engine, t=t: last(engine, t)) for t in turns]  # type: ignore[misc]
    cached = []
    for turn, right in zip(turns, expected, strict=True):
        found = served(make(tmp_path, family, **options), lambda engine, turn=turn: last(engine, turn))  # type: ignore[misc]
        assert found.outputs[0].token_ids == right.outputs[0].token_ids
        cached.append(found.num_cached_tokens)
    assert cached[0] == 0 and cached[1] >= 256 and cached[2] >= 320, cached
