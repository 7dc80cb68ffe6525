"""Threads that share a runtime take turns on it, step by step: every one of them gets the tokens it would get alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.outputs import completed
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams

SHORT = SamplingParams(max_tokens=12, temperature=0)
POLICIES: dict[str, dict[str, Any]] = {"full": {"policy": "full"}, "infinigen": {"policy_options": {"recent": 16}}}


def make_llm(**options: Any) -> LLM:
    return LLM(tiny_model("llama", dtype=torch.float64), dtype="float64", host_memory="32MiB", **options)


def work(llm: LLM, folder: Path, number: int) -> list[Any]:
    """Every kind of call: what it gives belongs to `number` alone."""
    prompts = [tiny_prompt(90 + 7 * number + i, seed=10 * number + i) for i in range(2)]
    found: list[Any] = [completion.token_ids for completion in completed(llm.generate(prompts, SHORT))]
    found.append([event.token_id for event in llm.stream(prompts[1], SHORT)])
    found.append([round(one, 9) for one in llm.score([prompts[0]], [[3, 4, 5]])[0].logprobs])
    with llm.session(f"s{number}", folder) as session:
        found.append([event.token_id for event in session.send(prompts[0], SHORT)])
        session.truncate(keep_last=60)
        found.append([event.token_id for event in session.send(prompts[1], SHORT)])
    return found


@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_threads_get_the_tokens_that_they_would_get_alone(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    alone = make_llm(**options)
    expected = [work(alone, tmp_path / "alone", number) for number in range(3)]
    llm = make_llm(**options)
    calls: list[Callable[[], list[Any]]] = [lambda n=n: work(llm, tmp_path / "store", n) for n in range(3)]  # type: ignore[misc]
    with ThreadPoolExecutor(3) as threads:
        found = [future.result() for future in [threads.submit(call) for call in calls]]
    assert found == expected
    llm.runner.check_integrity()
