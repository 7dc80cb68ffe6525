"""Test `AsyncLLM` with a session store. Requests contain whole prompts, and each session runs one turn at a time."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import VOCAB, tiny_model

from offload_rt import LLM, AsyncLLM, InputError, RequestOutput, SamplingParams, SessionBusyError, StoreError
from offload_rt.engine.swap import Swap, SwappedSequence
from offload_rt.model_runner.prefill import Prefill
from offload_rt.sessions import request_factory
from offload_rt.sessions.chat_template import tokens_of_prompt
from offload_rt.sessions.session import Session
from offload_rt.storage.documents import DocumentStore

PARAMS = SamplingParams(max_tokens=5, temperature=0)


def prompt(tokens: int, seed: int = 1) -> list[int]:
    return [(7 * i * seed + i // 3) % VOCAB for i in range(tokens)]


async def final_output(engine: AsyncLLM, ids: list[int], **named: object) -> RequestOutput:
    return [output async for output in engine.generate(ids, PARAMS, **named)][-1]  # type: ignore[arg-type]


def make_engine(store: Path | None = None) -> AsyncLLM:
    return AsyncLLM(LLM(tiny_model("llama"), policy="full", host_memory="16MiB"), store=store)


def test_prompt_keeps_the_common_prefix_of_a_session() -> None:
    for held, given, expected in (
        ([], [1, 2], (0, 0, (1, 2))),
        ([1, 2, 3], [1, 2, 3, 4], (3, 0, (4,))),
        ([1, 2, 3], [1, 2, 3], (3, 1, (3,))),
        ([1, 2, 3], [1, 5], (3, 2, (5,))),
        ([1, 2, 3], [9], (3, 3, (9,))),
    ):
        found = tokens_of_prompt(held, given)
        assert (found.tokens_before, found.dropped, found.added) == expected


def test_changed_prompts_get_equal_answers_with_and_without_session(tmp_path: Path) -> None:
    prompts = [prompt(150), prompt(210), prompt(150), prompt(100) + prompt(90, 5), prompt(40)]

    async def run(engine: AsyncLLM, session: str | None) -> list[list[int]]:
        async with engine:
            return [(await final_output(engine, ids, session=session)).outputs[0].token_ids for ids in prompts]

    expected = asyncio.run(run(make_engine(), None))
    assert asyncio.run(run(make_engine(tmp_path), "one")) == expected
    assert asyncio.run(run(make_engine(tmp_path), "one")) == expected, "again, from disk"
    llm = LLM(tiny_model("llama"), policy="full", host_memory="16MiB")
    with llm.session("one", tmp_path) as session, pytest.raises(InputError, match="no turn that can be undone"):
        session.undo()  # the tokens of the turns before an edit are lost


def test_session_has_one_answer_at_a_time(tmp_path: Path) -> None:
    async def run() -> None:
        async with make_engine(tmp_path) as engine:
            first = engine.generate(prompt(80), SamplingParams(max_tokens=400, temperature=0), session="a")
            await anext(first)
            with pytest.raises(SessionBusyError):
                await final_output(engine, prompt(80), session="a")
            with pytest.raises(SessionBusyError):
                await engine.delete_session("a")
            assert (await final_output(engine, prompt(80), session="b")).finished
            await first.aclose()  # the client disconnects, which frees the session
            assert (await final_output(engine, prompt(90), session="a")).num_cached_tokens >= 64
            await engine.delete_session("a")
            await engine.delete_session("never was")
            with pytest.raises(InputError):
                async for _ in engine.generate(prompt(9), SamplingParams(n=2), session="a"):
                    pass
        async with make_engine() as engine:
            with pytest.raises(InputError, match="store"):
                await final_output(engine, prompt(9), session="a")

    asyncio.run(run())


def test_requests_are_answered_if_saving_turns_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> list[RequestOutput]:
        async with make_engine(tmp_path) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(DocumentStore, "put", raise_store_error)
                long = engine.generate(prompt(80), SamplingParams(max_tokens=400, temperature=0), "it", session="a")
                await anext(long)
                other = asyncio.create_task(final_output(engine, prompt(60)))
                await engine.abort("it")
                aborted = [output async for output in long][-1]
                return [aborted, await other, await final_output(engine, prompt(40), session="b")]

    finished = asyncio.run(run())
    assert [each.outputs[0].finish_reason for each in finished] == ["abort", "length", "length"]
    assert [len(each.outputs[0].token_ids) for each in finished[1:]] == [5, 5]
    assert caplog.text.count("a session could not be saved: no room") == 2


def test_failed_save_at_the_session_limit_fails_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_factory, "MOST_OPEN", 1)

    async def run() -> list[RequestOutput]:
        async with make_engine(tmp_path) as engine:
            first = await final_output(engine, prompt(20), session="a")
            with monkeypatch.context() as patch:
                patch.setattr(Session, "close", lambda session: raise_store_error(session, "", b""))
                requests = final_output(engine, prompt(80)), final_output(engine, prompt(20), session="b")
                return [first, *await asyncio.wait_for(asyncio.gather(*requests), 20)]

    assert all(each.finished for each in asyncio.run(run()))
    assert caplog.text.count("a session could not be saved: no room") == 1


def test_only_the_oldest_sessions_above_the_limit_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_factory, "MOST_OPEN", 4)

    async def run() -> None:
        async with make_engine(tmp_path) as engine:
            for count, name in enumerate("abcdef", start=1):
                await final_output(engine, prompt(20), session=name)
                assert engine._sessions is not None
                assert "".join(engine._sessions._opened) == "abcdef"[max(0, count - 4) : count]

    asyncio.run(run())


def test_session_deletion_completes_after_its_event_loop_is_closed(tmp_path: Path) -> None:
    async def start_deletion(engine: AsyncLLM) -> None:
        deletion = asyncio.ensure_future(engine.delete_session("a"))
        await asyncio.sleep(0)
        assert not deletion.done()

    async def run() -> RequestOutput:
        async with make_engine(tmp_path) as engine:
            await final_output(engine, prompt(20), session="a")
            with engine.llm.runner.pool.lock:  # blocks the engine
                other = asyncio.create_task(final_output(engine, prompt(80)))
                await asyncio.to_thread(asyncio.run, start_deletion(engine))
            output = await other
            assert engine._sessions is not None and not engine._sessions.store.exists("a")
            return output

    assert asyncio.run(run()).finished


def test_preempted_session_turn_frees_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV of session turns is in the session store, so `swap` does not store it again."""
    swapped, swap_out = [], Swap.swap_out

    def record_swap_out(swap: Swap, *args: Any) -> SwappedSequence | None:
        swapped.append(swap_out(swap, *args))
        return swapped[-1]

    monkeypatch.setattr(Swap, "swap_out", record_swap_out)
    monkeypatch.setattr(Swap, "_recompute_seconds", lambda self, sequence, batch: math.inf)
    model, params = tiny_model("llama", num_hidden_layers=2), SamplingParams(max_tokens=60, temperature=0)
    prompts = [prompt(100, seed) for seed in (1, 2, 3, 4)]
    expected = LLM(model, policy="full", host_memory="8MiB").generate(prompts, params)
    llm = LLM(model, policy="full", host_memory="320KiB", swap=tmp_path / "swap")  # 5 blocks; each request needs 3

    async def answer(engine: AsyncLLM, number: int) -> list[int]:
        outputs = engine.generate(prompts[number], params, session=f"s{number}")
        return [output async for output in outputs][-1].outputs[0].token_ids

    async def run() -> list[list[int]]:
        async with AsyncLLM(llm, store=tmp_path / "store") as engine:
            answers = await asyncio.gather(*(answer(engine, number) for number in range(4)))
            assert engine._engine.scheduler.preemptions
            return answers

    assert asyncio.run(run()) == [each.outputs[0].token_ids for each in expected]
    assert not swapped
    llm.runner.check_integrity()
    assert llm.runner.pool.sequence_bytes == 0


def raise_store_error(store: object, name: str, data: bytes) -> None:
    raise StoreError("no room")


def test_request_times_are_ordered() -> None:
    async def run() -> RequestOutput:
        async with make_engine() as engine:
            return await final_output(engine, prompt(30))

    begun = time.time()
    metrics = asyncio.run(run()).metrics
    assert metrics is not None and metrics.finished_time is not None and metrics.time_in_queue is not None
    times = [
        begun, metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time,
        metrics.last_token_time, metrics.finished_time, time.time(),
    ]  # fmt: skip
    assert times == sorted(times) and times[3] < times[4]  # type: ignore[type-var, operator]


def test_aborted_prefill_skips_the_remaining_layers() -> None:
    llm = LLM(tiny_model("llama", num_hidden_layers=32), policy="full", verify="off", host_memory="256MiB")
    advance, layers = llm.runner.advance_prefill, 0

    def count_layer(prefill: Prefill) -> None:
        nonlocal layers
        layers += 1
        advance(prefill)

    llm.runner.advance_prefill = count_layer  # type: ignore[method-assign]

    async def run() -> int:
        async with AsyncLLM(llm) as engine:
            outputs = engine.generate(prompt(3000), PARAMS, trace=True)
            first = await anext(outputs)
            assert first.trace is not None and 0 < first.trace.layers_prefilled < 32
            await outputs.aclose()
            while engine.load().running:
                await asyncio.sleep(0.001)
            return engine.load().prompt_tokens

    assert asyncio.run(run()) == 3000
    assert layers < 32
