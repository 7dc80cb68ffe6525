"""Test `AsyncLLM`: concurrent requests get the same tokens as single requests, and aborted requests free their KV."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.outputs import completed
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, AsyncLLM, InputError, PoolFullError, QueueFullError, SamplingParams
from offload_rt.core import BLOCK_SIZE

GREEDY = SamplingParams(max_tokens=12, temperature=0)
LONG = SamplingParams(max_tokens=400, temperature=0)
BLOCK_BYTES = 2 * 2 * 2 * 32 * BLOCK_SIZE * 4
"""Size of a block in bytes: K and V, two layers, two KV heads, head size 32, float32."""


def make_llm(blocks: int = 40, **options: Any) -> LLM:
    model = tiny_model("llama", num_hidden_layers=2, max_position_embeddings=1024)
    return LLM(model, policy="full", host_memory=blocks * BLOCK_BYTES, **options)


@pytest.fixture(scope="module")
def generate_alone() -> Iterator[Callable[[list[int], SamplingParams], list[list[int]]]]:
    with make_llm() as llm:
        known: dict[str, list[list[int]]] = {}

        def generate(prompt: list[int], params: SamplingParams) -> list[list[int]]:
            if (key := f"{prompt} {params}") not in known:
                known[key] = [one.token_ids for one in completed(llm.generate(prompt, params))]
            return known[key]

        yield generate


def run_and_check_cleanup(
    send_requests: Callable[[AsyncLLM], Coroutine[Any, Any, Any]], llm: LLM | None = None, **options: Any
) -> Any:
    async def run() -> Any:
        async with AsyncLLM(llm or make_llm(), **options) as engine:
            found = await asyncio.wait_for(send_requests(engine), 30)
            runner = engine.llm.runner
        assert engine._engine.idle and not engine._clients and not engine._by_number
        assert (engine.load().waiting, engine.load().running) == (0, 0)
        runner.check_integrity()
        assert runner.pool.sequence_bytes == 0
        return found

    return asyncio.run(run())


async def aenumerate(items: Any) -> AsyncIterator[tuple[int, Any]]:
    """Number the items from 1. Close the iterator `items` even if the caller stops early."""
    count = 0
    async with aclosing(items):
        async for item in items:
            count += 1
            yield count, item


async def generate_tokens(
    engine: AsyncLLM, prompt: Any, params: SamplingParams = GREEDY, **more: Any
) -> list[list[int]]:
    """Return the tokens of all completions. Check that every output extends the previous output."""
    before: list[list[int]] = []
    async for output in engine.generate(prompt, params, **more):
        found = [one.token_ids for one in output.outputs]
        assert all(new[: len(old)] == old for new, old in zip(found, before, strict=False))
        assert output.finished == all(one.finish_reason is not None for one in output.outputs)
        before = found
    assert output.finished
    return before


def test_concurrent_requests_get_the_tokens_of_each_alone(generate_alone: Any) -> None:
    kinds = [GREEDY, SamplingParams(max_tokens=9, seed=5), SamplingParams(max_tokens=7, seed=1, n=3)]
    kinds.append(SamplingParams(max_tokens=6, temperature=0, num_beams=3, n=2))
    asked = [(tiny_prompt(20 + 9 * i, seed=i // 3), kinds[i % 4]) for i in range(16)]

    async def send_requests(engine: AsyncLLM) -> Any:
        found = await asyncio.gather(*(generate_tokens(engine, prompt, params) for prompt, params in asked))
        return found, engine.load()

    found, load = run_and_check_cleanup(send_requests, make_llm(12, max_num_seqs=6))
    assert found == [generate_alone(prompt, params) for prompt, params in asked]
    assert load.generated_tokens == sum(len(tokens) for one in found for tokens in one)
    assert load.prompt_tokens == sum(len(prompt) for prompt, _ in asked)
    assert load.cached_tokens > 0 and load.pool_limit_bytes == 12 * BLOCK_BYTES


def test_the_load_contains_the_transfers_of_all_beams() -> None:
    async def send_requests(engine: AsyncLLM) -> Any:
        params = SamplingParams(max_tokens=9, temperature=0, num_beams=3)
        [output] = [output async for output in engine.generate(tiny_prompt(20), params)]
        return output.outputs[0].stats.h2d_bytes, engine.load().h2d_bytes

    of_one_beam, total = run_and_check_cleanup(send_requests)
    assert total == 3 * of_one_beam > 0


def test_an_abort_ends_only_its_request(generate_alone: Any) -> None:
    async def send_requests(engine: AsyncLLM) -> Any:
        other = asyncio.create_task(generate_tokens(engine, tiny_prompt(70, seed=3)))
        outputs = []
        async for output in engine.generate(tiny_prompt(70), LONG, request_id="mine"):
            outputs.append(output)
            if len(outputs) == 3:
                await engine.abort("mine")
                await engine.abort("nobody's")
        return outputs[-1], await other

    last, other = run_and_check_cleanup(send_requests)
    assert last.request_id == "mine" and last.finished
    [done] = last.outputs
    assert done.finish_reason == "abort" and 3 <= len(done.token_ids) < 400 and done.stats is not None
    assert done.token_ids == generate_alone(tiny_prompt(70), LONG)[0][: len(done.token_ids)]
    assert other == generate_alone(tiny_prompt(70, seed=3), GREEDY)


@pytest.mark.parametrize("how", ["break", "cancel", "before it starts"])
def test_a_cancelled_request_frees_its_kv(how: str, generate_alone: Any) -> None:
    async def send_requests(engine: AsyncLLM) -> Any:
        if how == "break":
            async for _ in engine.generate(tiny_prompt(70), LONG):
                break
        else:
            task = asyncio.create_task(generate_tokens(engine, tiny_prompt(70), LONG))
            while how == "cancel" and not engine.load().generated_tokens:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        while engine._clients:
            await asyncio.sleep(0)
        found = await generate_tokens(engine, tiny_prompt(30))
        assert engine.load().running == 0, "the cancelled request no longer runs"
        return found

    assert run_and_check_cleanup(send_requests) == generate_alone(tiny_prompt(30), GREEDY)


CLIENTS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.integers(0, 3),
        st.integers(0, 8),
        st.sampled_from(["stays", "breaks", "aborts", "cancels"]),
        st.integers(1, 6),
    ),
    min_size=1,
    max_size=9,
)
"""For each request: prompt, parameters, event loop turns before it starts, how it ends, and after how many outputs."""


@settings(
    max_examples=2000 if "OFFLOAD_RT_STRESS" in os.environ else 5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(clients=CLIENTS, blocks=st.integers(4, 16), batch=st.integers(1, 4))
def test_clients_may_start_and_leave_at_any_time(clients: Any, blocks: int, batch: int, generate_alone: Any) -> None:
    kinds = [GREEDY, SamplingParams(max_tokens=9, seed=5), SamplingParams(max_tokens=7, seed=1, n=2)]
    kinds.append(SamplingParams(max_tokens=50, temperature=0))

    async def run_client(engine: AsyncLLM, number: int, client: Any) -> None:
        which, kind, delay, ends, after = client
        prompt, params = tiny_prompt(10 + 30 * which, seed=which), kinds[kind]
        for _ in range(delay):
            await asyncio.sleep(0)
        got: list[list[int]] = []

        async def read() -> None:
            outputs = engine.generate(prompt, params, request_id=str(number))
            async for count, output in aenumerate(outputs):
                got[:] = [list(each.token_ids) for each in output.outputs]
                if count == after and ends == "breaks":
                    return
                if count == after and ends == "aborts":
                    await engine.abort(str(number))

        task = asyncio.create_task(read())
        while ends == "cancels" and not task.done():
            if len(got) and sum(map(len, got)) >= after:
                task.cancel()
            await asyncio.sleep(0)
        refused = False
        try:
            await task
        except asyncio.CancelledError:
            assert ends == "cancels"
        except PoolFullError:
            refused = True
            assert params.n * -(-(len(prompt) + params.max_tokens) // BLOCK_SIZE) > blocks, (
                "a request is refused only if it may not fit alone"
            )
        expected = generate_alone(prompt, params)
        for tokens, whole in zip(got, expected, strict=False):
            assert tokens == whole[: len(tokens)]
        if ends == "stays" and not refused:
            assert got == expected

    async def send_requests(engine: AsyncLLM) -> None:
        await asyncio.gather(*(run_client(engine, number, client) for number, client in enumerate(clients)))
        while engine._clients:
            await asyncio.sleep(0)

    run_and_check_cleanup(send_requests, make_llm(blocks, max_num_seqs=batch))


def test_an_error_fails_only_its_request(generate_alone: Any) -> None:
    async def send_requests(engine: AsyncLLM) -> Any:
        other = asyncio.create_task(
            generate_tokens(engine, tiny_prompt(100), SamplingParams(max_tokens=60, temperature=0))
        )
        with pytest.raises(PoolFullError):
            await generate_tokens(engine, tiny_prompt(5 * BLOCK_SIZE))
        with pytest.raises(InputError, match="vocabulary"):
            await generate_tokens(engine, [3, 99999])
        with pytest.raises(InputError, match="no tokenizer"):
            await generate_tokens(engine, "text")
        with pytest.raises(InputError, match="empty"):
            await generate_tokens(engine, [])
        with pytest.raises(InputError, match="request_id=3 is int"):
            await generate_tokens(engine, [3], request_id=3)
        first = asyncio.create_task(generate_tokens(engine, tiny_prompt(9), LONG, request_id="twice"))
        await asyncio.sleep(0)
        with pytest.raises(InputError, match="'twice' is already running"):
            await generate_tokens(engine, tiny_prompt(9), request_id="twice")
        first.cancel()
        return await other

    assert run_and_check_cleanup(send_requests, make_llm(4)) == generate_alone(
        tiny_prompt(100), SamplingParams(max_tokens=60, temperature=0)
    )


def test_a_failed_step_fails_running_requests_but_not_later_ones(generate_alone: Any) -> None:
    async def send_requests(engine: AsyncLLM) -> Any:
        step, runner = engine._engine.step, engine.llm.runner
        engine._engine.step = lambda: (step(), 1 / 0)  # type: ignore[method-assign, assignment, return-value]
        found = await asyncio.gather(
            *(generate_tokens(engine, tiny_prompt(n)) for n in (9, 70)), return_exceptions=True
        )
        assert [type(one) for one in found] == [ZeroDivisionError] * 2
        del engine._engine.step
        runner.check_integrity()
        return await generate_tokens(engine, tiny_prompt(70))

    assert run_and_check_cleanup(send_requests) == generate_alone(tiny_prompt(70), GREEDY)


def test_a_request_beyond_the_queue_limit_is_refused() -> None:
    async def send_requests(engine: AsyncLLM) -> None:
        with engine.llm.runner.pool.lock:  # prevents the engine from starting requests
            tasks = [asyncio.create_task(generate_tokens(engine, tiny_prompt(70, seed=i), LONG)) for i in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match=r"the queue is full \(3 requests, max_waiting=3\)"):
                await generate_tokens(engine, tiny_prompt(9))
        while engine.load().waiting:
            await asyncio.sleep(0.001)
        assert len((await generate_tokens(engine, tiny_prompt(9)))[0]) == 12
        for task in tasks:
            task.cancel()

    run_and_check_cleanup(send_requests, max_waiting=3)
    with pytest.raises(InputError, match="max_waiting=0"):
        AsyncLLM(make_llm(), max_waiting=0)
    with pytest.raises(InputError, match=r"llm='reference' is str; it must be an LLM"):
        AsyncLLM("reference")  # type: ignore[arg-type]


def test_clients_may_use_several_event_loops(generate_alone: Any) -> None:
    prompts = [tiny_prompt(30 + n, seed=n) for n in range(4)]

    async def send_requests(engine: AsyncLLM) -> Any:
        found: dict[int, Any] = {}
        threads = [
            threading.Thread(target=lambda i=i: found.update({i: asyncio.run(generate_tokens(engine, prompts[i]))}))
            for i in range(1, 4)
        ]
        lost = threading.Thread(target=abandon_event_loop, args=(engine,))
        for thread in (*threads, lost):
            thread.start()
        found[0] = await generate_tokens(engine, prompts[0])
        for thread in (*threads, lost):
            await asyncio.to_thread(thread.join)
        return [found[i] for i in range(4)]

    assert run_and_check_cleanup(send_requests) == [generate_alone(prompt, GREEDY) for prompt in prompts]


def abandon_event_loop(engine: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    outputs = engine.generate(tiny_prompt(20), LONG)
    loop.run_until_complete(anext(outputs))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    while any(len(client.ids) == 20 for client in list(engine._clients.values())):
        time.sleep(0.001)
    assert engine.load().generated_tokens < 400


PROGRAM_WITHOUT_CLOSE = """
import asyncio, sys
from support.tiny_models import tiny_model
from offload_rt import LLM, AsyncLLM, SamplingParams

model = tiny_model("llama", num_hidden_layers=2, eos_token_id=None)
engine = AsyncLLM(LLM(model, policy="full", host_memory="16MiB"))
outputs = engine.generate([3] * 30, SamplingParams(max_tokens=10_000, temperature=0))
asyncio.new_event_loop().run_until_complete(anext(outputs))
"""


@pytest.mark.skipif("OFFLOAD_RT_STRESS" not in os.environ, reason="needs a separate process: make stress PART=requests")
def test_a_process_ends_without_close() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM_WITHOUT_CLOSE],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_closing_ends_running_requests_and_refuses_new_ones() -> None:
    async def run() -> None:
        engine = AsyncLLM(make_llm())
        outputs = engine.generate(tiny_prompt(70), LONG)
        await anext(outputs)
        await engine.close()
        assert [one.outputs[0].finish_reason async for one in outputs][-1] == "abort"
        with pytest.raises(InputError, match="closed"):
            await anext(engine.generate(tiny_prompt(9)))
        with pytest.raises(InputError, match="closed"):
            engine.llm.generate(tiny_prompt(9))
        await engine.close()
        assert not engine._thread.is_alive() and engine.llm.runner.pool.sequence_bytes == 0

    asyncio.run(run())
