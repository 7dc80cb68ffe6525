"""Test captured steps that read copies of KV blocks in place, on the simulated device."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.cuda_cells import (
    BLOCK_BYTES,
    GRAPHS,
    LATENT,
    LOW_BITS,
    SCHEDULES,
    SPARSE,
    USES_EARLIER_KV,
    Answers,
    Cell,
    answers,
    captured_graphs,
    forked,
    joining,
    padded_states,
    replayed,
    session,
    shared,
    sliding_replayed,
)
from support.cuda_simulator import Lazy, simulated
from support.outputs import completed
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.model_runner import batched
from offload_rt.model_runner.cuda_graphs import GraphSteps

MANY, FEW = 60 * BLOCK_BYTES, 2 * BLOCK_BYTES


def leaving(make: Callable[..., LLM], folder: Path) -> Answers:
    """Decode four sequences across block boundaries and a bucket. Two of them end early."""
    llm, prompts = make(), [tiny_prompt(n, seed=n) for n in (57, 121, 30, 58)]
    params = [SamplingParams(most, temperature=0, ignore_eos=True) for most in (14, 15, 4, 9)]
    completions = completed(llm.generate(prompts, params))
    llm.runner.check_integrity()
    if isinstance(llm.runner.steps, GraphSteps):
        shapes = {inputs.shape[:2] for inputs in llm.runner.steps._captured}
        assert shapes >= {(4, 128), (4, 192), (2, 192)}, shapes
        for one in completions:
            assert one.stats.device_kv_hit_rate == 1 and one.stats.exact_fraction == 1
            assert one.stats.fetched_fraction == pytest.approx(0, abs=1e-15)  # a difference of fractions
    return [[*one.token_ids, one.stats.h2d_bytes] for one in completions]


CELLS = [
    Cell("full", "full", replayed, daily="late write-back"),
    Cell("batch sizes", "full", joining),
    Cell("leaving", "full", leaving, settings={"missed_mass_every": 1}, daily="seed 1"),
    Cell("shared", "full", shared, settings={"enable_prefix_caching": True}),
    Cell("forked", "full", forked),
    Cell("session", "full", session, daily="seed 0"),
    Cell("a window", "full", sliding_replayed, model="qwen2", daily="seed 0"),
    Cell("gpt-oss", "full", sliding_replayed, model="gpt_oss"),
    Cell("hybrid", "full", padded_states, model="qwen3_5"),
    Cell("latent", "full", replayed, model=LATENT, daily="late prefetch and write-back"),
    Cell("earlier kv", "full", sliding_replayed, model=USES_EARLIER_KV),
    Cell("dense layer", "infinigen", replayed, SPARSE | {"dense_layers": (0,)}),
    Cell("dense layer, default", "infinigen", replayed, LOW_BITS | {"dense_layers": (1,)}, daily="late compute"),
]
ALL = os.environ.get("OFFLOAD_RT_SCHEDULES") == "all"
RUNS = [(one, name) for one in CELLS for name in (SCHEDULES if ALL else filter(None, [one.daily]))]


@pytest.mark.parametrize(("cell", "schedule"), RUNS, ids=str)
def test_captured_steps_with_copies_generate_the_tokens_of_a_cpu(
    cell: Cell, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Mock(side_effect=batched.attend_copies)
    monkeypatch.setattr(batched, "attend_copies", reads)
    expected = cell.run("cpu", tmp_path)
    assert not reads.called
    with simulated(SCHEDULES[schedule]()):
        found = replace(cell, settings=GRAPHS | cell.settings | {"device_kv_memory": MANY}).run("cuda", tmp_path)
    assert reads.called
    if cell.scene in (forked, session):
        assert found == expected
    else:
        assert [tokens for *tokens, _ in found] == [tokens for *tokens, _ in expected]
        assert cell.policy != "full" or [transferred for *_, transferred in found] == [0] * len(found)


@pytest.mark.parametrize("settings", [{"device_kv_memory": FEW}, {"device_kv_memory": MANY, "kv_cache_dtype": "int8"}])
def test_step_runs_eagerly_if_kv_is_not_on_the_device_in_the_dtype_of_the_model(settings: dict[str, Any]) -> None:
    prompts, found = [tiny_prompt(n, seed=n) for n in (60, 70)], []
    with simulated(Lazy()):
        for more in (settings, settings | {"device_kv_memory": None}):
            model = tiny_model("llama", num_hidden_layers=2).to("cuda")
            llm = LLM(model, policy="full", host_memory="4MiB", **GRAPHS, **more)
            found.append([tokens for *tokens, _ in answers(llm, prompts, 6)])
            assert not captured_graphs(llm)
    assert found[0] == found[1]
