"""Test threads that share a runtime. Each thread gets the same tokens as if it ran alone.

`tests/adversary/interleavings.py` runs random requests on engines that share a pool.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.architectures import architecture
from support.outputs import completed
from support.step_order import run_in_rounds
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, InputError, PoolFullError, SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.engine import pool_order
from offload_rt.engine.engine import Engine

SHORT = SamplingParams(max_tokens=8, temperature=0)
POLICIES: dict[str, dict[str, Any]] = {"full": {"policy": "full"}, "infinigen": {"policy_options": {"recent": 16}}}


def make_llm(**options: Any) -> LLM:
    return LLM(tiny_model("llama", num_hidden_layers=2), dtype="float32", host_memory="32MiB", **options)


def results_of_calls(llm: LLM, folder: Path, number: int) -> list[Any]:
    """Return results of `generate`, `stream`, `score` and a session. The prompts depend on `number`."""
    prompts = [tiny_prompt(90 + 7 * number + i, seed=10 * number + i) for i in range(2)]
    found: list[Any] = [completion.token_ids for completion in completed(llm.generate(prompts, SHORT))]
    found.append([event.token_id for event in llm.stream(prompts[1], SHORT)])
    found.append([round(one, 9) for one in llm.score([prompts[0]], [[3, 4, 5]])[0].logprobs])
    with llm.session(f"s{number}", folder) as session:
        found.append([event.token_id for event in session.send(prompts[0], SHORT)])
        session.truncate(keep_last=60)
        found.append([event.token_id for event in session.send(prompts[1], SHORT)])
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_threads_get_the_tokens_of_separate_runs(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    alone = make_llm(**options)
    expected = [results_of_calls(alone, tmp_path / "alone", number) for number in range(3)]
    llm = make_llm(**options)
    calls: list[Callable[[], list[Any]]] = [lambda n=n: results_of_calls(llm, tmp_path / "store", n) for n in range(3)]  # type: ignore[misc]
    with ThreadPoolExecutor(3) as threads:
        found = [future.result() for future in [threads.submit(call) for call in calls]]
    assert found == expected
    llm.runner.check_integrity()


def test_threads_wait_for_memory_of_other_threads() -> None:
    params, prompts = SamplingParams(max_tokens=40, temperature=0), [tiny_prompt(100, seed=i) for i in range(3)]
    expected = [output.outputs[0].token_ids for output in llm_with_blocks(40).generate(prompts, params)]
    llm = llm_with_blocks(4)  # each request needs three blocks
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(llm.generate, [prompt], params) for prompt in prompts]
        assert [one.result()[0].outputs[0].token_ids for one in asked] == expected
    llm.runner.check_integrity()
    assert llm.runner.pool.sequence_bytes == 0


def test_no_thread_waits_long_for_a_paused_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused stream keeps its KV. Other requests fail: from its own thread at once, from others after `PATIENCE`."""
    llm = llm_with_blocks(3)
    stream = llm.stream(tiny_prompt(100), SHORT)
    next(stream)
    with pytest.raises(PoolFullError):
        llm.generate(tiny_prompt(100, seed=1), SHORT)
    monkeypatch.setattr(pool_order, "PATIENCE", 0.05)
    next(stream)
    with ThreadPoolExecutor(1) as threads, pytest.raises(PoolFullError):
        threads.submit(llm.generate, tiny_prompt(100, seed=1), SHORT).result(20)
    stream.close()  # type: ignore[attr-defined]


def llm_with_blocks(blocks: int) -> LLM:
    model = tiny_model("llama", num_hidden_layers=2)
    return LLM(model, policy="full", host_memory=blocks * 2 * 2 * 2 * 32 * BLOCK_SIZE * 4, verify="off")


def test_a_forked_process_cannot_use_the_runtime(tmp_path: Path) -> None:
    llm, prompt = make_llm(policy="full"), tiny_prompt(70)
    session = llm.session("s", tmp_path)
    first = [event.token_id for event in session.send(prompt, SHORT)]
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate([prompt], SHORT), lambda: next(iter(llm.stream(prompt, SHORT))),
        lambda: llm.score([prompt], [[1]]), lambda: next(iter(session.send(prompt, SHORT))), session.close,
        lambda: session.truncate(keep_last=9), lambda: llm.session("t", tmp_path), lambda: llm.turns(tmp_path),
        llm.close,
    ]  # fmt: skip
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Forking with running threads causes a warning. This test is about the check in the child.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # otherwise the child could wait forever for a saver thread that it does not have
        try:
            for call in calls:
                try:
                    call()
                except InputError as error:
                    os.write(writing, b"x" if "loaded in process" in str(error) else b"?")
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as results:
        assert results.read() == b"x" * len(calls)
    history = [*prompt, *first, *prompt]
    assert [event.token_id for event in session.send(prompt, SHORT)] == make_llm(policy="full").generate(
        [history], SHORT
    )[0].outputs[0].token_ids
    llm.close()


def test_the_younger_of_two_requests_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_order, "RECHECK_SECONDS", 0.0)
    # Each request needs three of the four blocks.
    llm, params = llm_with_blocks(4), SamplingParams(max_tokens=40, temperature=0)
    older, younger = engines = [Engine(llm.runner, max_num_seqs=2) for _ in range(2)]
    prompts = [tiny_prompt(110), tiny_prompt(100, seed=1)]  # the older request needs its third block first
    requests = [engine.add(prompt, params) for engine, prompt in zip(engines, prompts, strict=True)]
    run_in_rounds(engines, 0, 200)
    assert older.scheduler.preemptions == 0 and younger.scheduler.preemptions == 1
    for prompt, request in zip(prompts, requests, strict=True):
        [alone] = completed(llm_with_blocks(40).generate([prompt], params))
        assert request.completions()[0].token_ids == alone.token_ids


def test_beam_searches_of_two_threads_end_in_a_small_pool() -> None:
    """Regression test: both searches used to preempt themselves and restart forever."""
    model, params = architecture("gemma3"), SamplingParams(max_tokens=12, temperature=0, num_beams=3)
    prompts = [[token % 90 + 1 for token in tiny_prompt(count, seed=count)] for count in (63, 64)]
    llm = LLM(model, policy="full", host_memory=27 * 12_288, verify="off")
    expected = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(llm.generate, [prompt], params) for prompt in prompts]
        assert [one.result(60)[0].outputs[0].token_ids for one in asked] == expected
