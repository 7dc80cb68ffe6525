"""Test restored sessions, truncated sessions and KV eviction with every architecture.

The references are transformers and a plain model that keeps KV in lists. By default, only a few architectures run.
`make stress PART=architectures` runs all of them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import RECURRENT, RUNS, VOCAB, architecture
from support.plain_decode import LayerKV, assert_evicts_oldest, plain_step
from support.tiny_models import assert_greedy

from offload_rt import LLM, ModelError, SamplingParams

NAMES = (
    [name for name in RUNS if name not in RECURRENT]
    if os.environ.get("OFFLOAD_RT_CELLS") == "1"
    else ["gemma3", "gpt_oss", "opt", "youtu"]
)
GREEDY = SamplingParams(max_tokens=6, temperature=0)
DROPPED = range(20, 60)


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_llm(model: Any, **options: Any) -> LLM:
    return LLM(model, **({"policy": "full", "host_memory": "8MiB", "verify": "off"} | options))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that tensors are equal up to float32 rounding. They differ in the order of summation."""
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_restored_and_truncated_session_equals_references(name: str, tmp_path: Path) -> None:
    model = architecture(name)
    session = make_llm(model).session("s", tmp_path)
    list(session.send(prompt_of(100, 1), GREEDY))
    session.close()
    session = make_llm(model).session("s", tmp_path)
    before = [*session.tokens, *prompt_of(20, 2)]
    answer = [event.token_id for event in session.send(prompt_of(20, 2), GREEDY)]
    assert_greedy(model, before, answer)
    assert session.loaded_tokens > 100, "nothing is computed again"
    runner, tokens, computed = session.kv.runner, list(session.history.tokens), session.history.computed
    geometry = runner.adapter.geometry
    if geometry.absolute_positions:
        with pytest.raises(ModelError, match="absolute positions"):
            session.truncate(drop=DROPPED)
        session.close()
        return
    rows: LayerKV = [[] for _ in range(geometry.layers)]
    plain_step(runner.adapter, tokens[:computed], 0, rows)
    assert session.truncate(drop=DROPPED) == len(DROPPED)
    # Sliding layers attend only to kept tokens after the gap.
    kept, floor = [i for i in range(computed) if i not in DROPPED], session.history.floor
    for layer in geometry.kv_layers:
        rows[layer] = [rows[layer][i] for i in (kept if geometry.windows[layer] is None else kept[floor:])]
    expected = plain_step(runner.adapter, [tokens[computed]], computed, rows)
    session.close()
    session = make_llm(model).session("s", tmp_path)
    sequence = session.kv.ready(len(session.history.tokens))
    session.kv.load_all()
    assert_near(session.kv.runner.decode([sequence])[0], expected)
    session.close()


@pytest.mark.parametrize("name", NAMES)
def test_full_pool_evicts_the_oldest_tokens(name: str) -> None:
    model = architecture(name)
    pool = make_llm(model).runner.pool
    memory = pool.block_bytes * (2 * pool.groups.full + pool.groups.sliding * pool.groups.window_blocks)
    runner = make_llm(model, host_memory=memory, eviction={"policy": "fifo", "protect": "none"}).runner
    assert_evicts_oldest(runner, prompt_of(145, 3), 120, assert_near)
