"""Test `AsyncLLM` with a session store: requests contain whole prompts, and a session runs one turn at a time."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import pytest
from support.tiny_models import VOCAB, tiny_model

from offload_rt import LLM, AsyncLLM, InputError, RequestOutput, SamplingParams, SessionBusyError, StoreError
from offload_rt.engine.swap import Swap
from offload_rt.model_runner.prefill import Prefill
from offload_rt.sessions import request_factory
from offload_rt.sessions.request_factory import tokens_of_prompt
from offload_rt.sessions.session import Session
from offload_rt.storage.documents import DocumentStore

PARAMS = SamplingParams(max_tokens=5, temperature=0)


def prompt(tokens: int, seed: int = 1) -> list[int]:
    return [(7 * i * seed + i // 3) % VOCAB for i in range(tokens)]


async def last(engine: AsyncLLM, ids: list[int], **named: object) -> RequestOutput:
    return [output async for output in engine.generate(ids, PARAMS, **named)][-1]  # type: ignore[arg-type]


def make(store: Path | None = None) -> AsyncLLM:
    return AsyncLLM(LLM(tiny_model("llama"), policy="full", host_memory="16MiB"), store=store)


def test_a_prompt_keeps_the_common_prefix_of_a_session() -> None:
    for held, given, expected in (
        ([], [1, 2], (0, 0, (1, 2))),
        ([1, 2, 3], [1, 2, 3, 4], (3, 0, (4,))),
        ([1, 2, 3], [1, 2, 3], (3, 1, (3,))),
        ([1, 2, 3], [1, 5], (3, 2, (5,))),
        ([1, 2, 3], [9], (3, 3, (9,))),
    ):
        found = tokens_of_prompt(held, given)
        assert (found.tokens_before, found.dropped, found.added) == expected


def test_changed_prompts_of_a_session_answer_as_without_one(tmp_path: Path) -> None:
    """Cover longer, shorter and changed prompts. Each answer equals that of the prompt without a session."""
    asked = [prompt(150), prompt(210), prompt(150), prompt(100) + prompt(90, 5), prompt(40)]

    async def run(engine: AsyncLLM, session: str | None) -> list[list[int]]:
        async with engine:
            return [(await last(engine, ids, session=session)).outputs[0].token_ids for ids in asked]

    expected = asyncio.run(run(make(), None))
    assert asyncio.run(run(make(tmp_path), "one")) == expected
    assert asyncio.run(run(make(tmp_path), "one")) == expected, "again, from disk"
    llm = LLM(tiny_model("llama"), policy="full", host_memory="16MiB")
    with llm.session("one", tmp_path) as session, pytest.raises(InputError, match="no turn that can be undone"):
        session.undo()  # the tokens of the turns before an edit are lost


def test_a_session_has_one_answer_at_a_time(tmp_path: Path) -> None:
    async def run() -> None:
        async with make(tmp_path) as engine:
            first = engine.generate(prompt(80), SamplingParams(max_tokens=400, temperature=0), session="a")
            await anext(first)
            with pytest.raises(SessionBusyError):
                await last(engine, prompt(80), session="a")
            with pytest.raises(SessionBusyError):
                await engine.delete_session("a")
            assert (await last(engine, prompt(80), session="b")).finished
            await first.aclose()  # the client disconnects, which frees the session
            assert (await last(engine, prompt(90), session="a")).num_cached_tokens >= 64
            await engine.delete_session("a")
            await engine.delete_session("never was")
            with pytest.raises(InputError):
                async for _ in engine.generate(prompt(9), SamplingParams(n=2), session="a"):
                    pass
        async with make() as engine:
            with pytest.raises(InputError, match="store"):
                await last(engine, prompt(9), session="a")

    asyncio.run(run())


def test_a_turn_that_cannot_be_saved_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Saving an aborted turn and a finished one fails. All requests still get their answers."""

    async def run() -> list[RequestOutput]:
        async with make(tmp_path) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(DocumentStore, "put", refuse)
                long = engine.generate(prompt(80), SamplingParams(max_tokens=400, temperature=0), "it", session="a")
                await anext(long)
                beside = asyncio.create_task(last(engine, prompt(60)))
                await engine.abort("it")
                aborted = [output async for output in long][-1]
                return [aborted, await beside, await last(engine, prompt(40), session="b")]

    finished = asyncio.run(run())
    assert [each.outputs[0].finish_reason for each in finished] == ["abort", "length", "length"]
    assert [len(each.outputs[0].token_ids) for each in finished[1:]] == [5, 5]
    assert caplog.text.count("a session could not be saved: no room") == 2


def test_an_unsaved_evicted_session_fails_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The session limit closes one session at the end of a turn of another one. Saving it fails."""
    monkeypatch.setattr(request_factory, "MOST_OPEN", 1)

    async def run() -> list[RequestOutput]:
        async with make(tmp_path) as engine:
            first = await last(engine, prompt(20), session="a")
            with monkeypatch.context() as patch:
                patch.setattr(Session, "close", lambda session: refuse(session, "", b""))
                asked = last(engine, prompt(80)), last(engine, prompt(20), session="b")
                return [first, *await asyncio.wait_for(asyncio.gather(*asked), 20)]

    assert all(each.finished for each in asyncio.run(run()))
    assert caplog.text.count("a session could not be saved: no room") == 1


def test_only_the_oldest_sessions_above_the_limit_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_factory, "MOST_OPEN", 4)

    async def run() -> None:
        async with make(tmp_path) as engine:
            for count, name in enumerate("abcdef", start=1):
                await last(engine, prompt(20), session=name)
                assert engine._sessions is not None
                assert "".join(engine._sessions._opened) == "abcdef"[max(0, count - 4) : count]

    asyncio.run(run())


def test_a_deletion_completes_without_its_client(tmp_path: Path) -> None:
    """The event loop of the deletion request is closed. The session is deleted, and other requests succeed."""

    async def leave(engine: AsyncLLM) -> None:
        asking = asyncio.ensure_future(engine.delete_session("a"))
        await asyncio.sleep(0)
        assert not asking.done()

    async def run() -> RequestOutput:
        async with make(tmp_path) as engine:
            await last(engine, prompt(20), session="a")
            with engine.llm.runner.pool.lock:  # blocks the engine
                other = asyncio.create_task(last(engine, prompt(80)))
                await asyncio.to_thread(asyncio.run, leave(engine))
            found = await other
            assert engine._sessions is not None and not engine._sessions.store.exists("a")
            return found

    assert asyncio.run(run()).finished


def test_a_preempted_turn_frees_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `swap`, KV of preempted session turns is not swapped, because the session store contains it."""
    monkeypatch.setattr(Swap, "_recompute_seconds", lambda self, sequence, batch: math.inf)
    model, params = tiny_model("llama", num_hidden_layers=2), SamplingParams(max_tokens=60, temperature=0)
    prompts = [prompt(100, seed) for seed in (1, 2, 3, 4)]
    roomy = LLM(model, policy="full", host_memory="8MiB").generate(prompts, params)
    llm = LLM(model, policy="full", host_memory="256KiB", swap=tmp_path / "swap")  # 8 blocks; each request needs 3

    async def answer(engine: AsyncLLM, number: int) -> list[int]:
        outputs = engine.generate(prompts[number], params, session=f"s{number}")
        return [output async for output in outputs][-1].outputs[0].token_ids

    async def run() -> list[list[int]]:
        async with AsyncLLM(llm, store=tmp_path / "store") as engine:
            return await asyncio.gather(*(answer(engine, number) for number in range(4)))

    assert asyncio.run(run()) == [each.outputs[0].token_ids for each in roomy]
    llm.runner.check_integrity()
    assert llm.runner.pool.sequence_bytes == 0


def refuse(store: object, name: str, data: bytes) -> None:
    raise StoreError("no room")


def test_times_of_a_request() -> None:
    async def run() -> RequestOutput:
        async with make() as engine:
            return await last(engine, prompt(30))

    begun = time.time()
    metrics = asyncio.run(run()).metrics
    assert metrics is not None and metrics.finished_time is not None and metrics.time_in_queue is not None
    times = [
        begun, metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time,
        metrics.last_token_time, metrics.finished_time, time.time(),
    ]  # fmt: skip
    assert times == sorted(times) and times[3] < times[4]  # type: ignore[type-var, operator]


def test_a_prefill_is_aborted_at_once() -> None:
    """The layers that are left are not computed."""
    llm = LLM(tiny_model("llama", num_hidden_layers=32), policy="full", verify="off", host_memory="256MiB")
    advance, layers = llm.runner.advance_prefill, 0

    def counted(prefill: Prefill) -> None:
        nonlocal layers
        layers += 1
        advance(prefill)

    llm.runner.advance_prefill = counted  # type: ignore[method-assign]

    async def run() -> int:
        async with AsyncLLM(llm) as engine:
            watched = engine.generate(prompt(3000), PARAMS, trace=True)
            first = await anext(watched)
            assert first.trace is not None and 0 < first.trace.layers_prefilled < 32
            await watched.aclose()
            while engine.load().running:
                await asyncio.sleep(0.001)
            return engine.load().prompt_tokens

    assert asyncio.run(run()) == 3000
    assert layers < 32
