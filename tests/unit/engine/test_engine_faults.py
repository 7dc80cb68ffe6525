"""Test that an unexpected exception ends only the request that caused it and does not change other requests' tokens."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from support.faults import ERRORS, PLACES, drain, fault
from support.outputs import completed
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, AsyncLLM, EngineError, OffloadError, SamplingParams, StoreOptions
from offload_rt.core import BLOCK_SIZE
from offload_rt.engine.engine import Engine
from offload_rt.engine.request import Request
from offload_rt.policies.base import PolicyState
from offload_rt.sessions.session_kv import SessionKV

PROMPTS = [tiny_prompt(BLOCK_SIZE + 4) + tiny_prompt(12, seed=i) for i in range(4)]
PARAMS = [
    SamplingParams(max_tokens=6, temperature=0),
    SamplingParams(max_tokens=7, seed=1, n=2),
    SamplingParams(max_tokens=5, temperature=0, num_beams=2),
    SamplingParams(max_tokens=6, seed=3),
]
MODEL = tiny_model("llama", num_hidden_layers=2)
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "infinigen": {"policy": "infinigen", "policy_options": {"recent": 8, "sinks": 2}},
    "exact": {"policy": "infinigen", "policy_options": {"recent": 8, "sinks": 2}, "exact": "sparse"},
}


@pytest.fixture(scope="module", params=POLICIES)
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM(MODEL, host_memory="8MiB", verify="off", **POLICIES[request.param])


@pytest.fixture(scope="module")
def expected_tokens(llm: LLM) -> list[list[list[int]]]:
    return [generate_request(llm, i) for i in range(len(PROMPTS))]


def generate_request(llm: LLM, i: int) -> list[list[int]]:
    return [one.token_ids for one in completed(llm.generate([PROMPTS[i]], PARAMS[i]))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_ends_one_request_at_most(place: str, llm: LLM, expected_tokens: list[list[list[int]]]) -> None:
    rng, called = random.Random(f"{place} {llm.config.policy} {llm.config.exact}"), 0
    for make_error in rng.sample(ERRORS, 2 if "OFFLOAD_RT_CELLS" in os.environ else 1):
        failed: dict[Request, Exception] = {}
        engine = Engine(llm.runner, max_num_seqs=8, on_failure=failed.__setitem__)
        requests = [engine.add(*one) for one in zip(PROMPTS, PARAMS, strict=True)]
        error = make_error()
        with fault(llm, place, rng.randrange(6), error) as calls:
            drain(engine)
        called += calls[0]
        assert len(failed) <= 1
        assert all(isinstance(failure, EngineError) and failure.__cause__ is error for failure in failed.values())
        gone = {sample.prompt.id for sample in failed}
        for i, request in enumerate(requests):
            if request.prompt.id not in gone:
                assert [one.token_ids for one in request.completions()] == expected_tokens[i]
        assert llm.runner.pool.sequence_bytes == 0 and not llm.runner._open
        assert generate_request(llm, 0) == expected_tokens[0], "a following request works"
    assert called or place in ("select", "fork")


@pytest.mark.sampled
@pytest.mark.parametrize("method", ["on_kv", "reserve", "accept", "stats"])
def test_only_the_request_that_always_fails_is_ended(
    method: str, llm: LLM, expected_tokens: list[list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    if method == "on_kv" and llm.config.policy == "full":
        pytest.skip("policy 'full' keeps no state")
    failed: dict[Request, Exception] = {}
    engine = Engine(llm.runner, max_num_seqs=8, on_failure=failed.__setitem__)
    requests = [engine.add(*one) for one in zip(PROMPTS, PARAMS, strict=True)]
    culprit: Any = requests[3]

    def fail_later(original: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            if len(culprit.new_tokens) > 3:
                raise AssertionError("always")
            return original(*args, **named)

        return call

    def break_state() -> None:
        for sequence in culprit.sequences:
            state: PolicyState = sequence.state
            if not hasattr(state, "is_broken"):
                state.is_broken = True  # type: ignore[attr-defined]
                state.on_kv = fail_later(state.on_kv)  # type: ignore[method-assign]

    if method != "on_kv":
        setattr(culprit, method if method != "stats" else "finish", fail_later(getattr(culprit, method)))
    while not engine.idle:
        engine.step()
        engine.check_integrity()
        if method == "on_kv":
            break_state()
    assert list(failed) == [culprit]
    for i, request in enumerate(requests[:3]):
        assert [one.token_ids for one in request.completions()] == expected_tokens[i]
    assert llm.runner.pool.sequence_bytes == 0 and not llm.runner._open
    assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1, "logged once"


def test_memory_that_cannot_be_freed_ends_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(MODEL, host_memory="8MiB", policy="full", verify="off")
    failed: dict[Request, Exception] = {}
    engine = Engine(llm.runner, max_num_seqs=8, on_failure=failed.__setitem__)
    requests = [engine.add(PROMPTS[i], PARAMS[i]) for i in (0, 3)]

    def raise_error(*args: object) -> None:
        raise AssertionError("counts disagree")

    while len(engine.scheduler.running) < 2:
        engine.step()
    monkeypatch.setattr(llm.runner.pool, "release", raise_error)
    for _ in range(40):
        engine.step()
    assert engine.idle and set(failed) == set(requests)
    assert all("inconsistent" in str(error) for error in list(failed.values())[1:])
    with pytest.raises(EngineError, match="Load the model again"):
        llm.generate(PROMPTS[0], PARAMS[0])


def test_generate_raises_the_error_of_its_request(llm: LLM, expected_tokens: list[list[list[int]]]) -> None:
    with fault(llm, "finish", 1, KeyError("lost")), pytest.raises(EngineError, match=r"KeyError: 'lost'") as caught:
        llm.generate(PROMPTS, PARAMS)
    assert isinstance(caught.value.__cause__, KeyError)
    assert [generate_request(llm, i) for i in range(2)] == expected_tokens[:2] and llm.runner.pool.sequence_bytes == 0


async def run_requests_and_sessions(engine: AsyncLLM) -> list[Any]:
    async def answer(prompt: list[int], session: str | None) -> Any:
        params = SamplingParams(max_tokens=7, temperature=0)
        try:
            return [one async for one in engine.generate(prompt, params, session=session)][-1].outputs[0].token_ids
        except OffloadError as error:
            return error

    asked = [(tiny_prompt(80 + 9 * i, seed=i), f"s{i}" if i < 2 else None) for i in range(4)]
    return await asyncio.gather(*(answer(*one) for one in asked))


async def run_twice_with_fault_first(store: Path, place: str, call: int) -> tuple[list[Any], list[Any]]:
    """Return the results of a run with a fault and of a second run without one."""
    llm = LLM(MODEL, policy="infinigen", policy_options={"recent": 8}, host_memory="8MiB", verify="off")
    async with AsyncLLM(llm, store=store) as engine:
        with fault(llm, place, call, AssertionError("an invariant is broken")):
            first = await run_requests_and_sessions(engine)
        again = await run_requests_and_sessions(engine)
        assert engine._thread.is_alive()
        llm.runner.check_integrity()
    assert llm.runner.pool.sequence_bytes == 0
    return first, again


@pytest.fixture(scope="module")
def expected_results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return asyncio.run(run_twice_with_fault_first(tmp_path_factory.mktemp("store"), "start", 1000))[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", PLACES)
def test_other_clients_and_failed_sessions_continue(place: str, expected_results: list[Any], tmp_path: Path) -> None:
    first, again = asyncio.run(run_twice_with_fault_first(tmp_path, place, random.Random(place).randrange(4)))
    assert again == expected_results and sum(isinstance(one, Exception) for one in first) <= 1
    assert all(
        isinstance(one, EngineError) or one == result for one, result in zip(first, expected_results, strict=True)
    )


def test_an_error_of_an_idle_session_fails_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> list[int]:
        llm = LLM(MODEL, policy="full", host_memory="8MiB", verify="off")
        options = StoreOptions(ttl="1s")
        async with AsyncLLM(llm, store=tmp_path, store_options=options) as engine:
            async for _ in engine.generate(PROMPTS[0], PARAMS[0], session="idle"):
                pass
            await asyncio.sleep(1.1)
            # Between steps, the engine evicts the KV of idle sessions from host memory.
            with patch.object(SessionKV, "evict", side_effect=RuntimeError("a shape is wrong")):
                outputs = [output async for output in engine.generate(PROMPTS[1], PARAMS[1])]
            return outputs[-1].outputs[0].token_ids

    assert len(asyncio.run(run())) == PARAMS[1].max_tokens
    assert "a shape is wrong" in caplog.text
