"""Test the prefix cache for prompts without a session: in host memory, on disk, and after a restart."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from support.architectures import architecture
from support.disk_blocks import block_files
from support.serving import wait_until
from support.tiny_models import VOCAB, tiny_model

from offload_rt import LLM, AsyncLLM, InputError, RequestOutput, SamplingParams
from offload_rt.cli import main
from offload_rt.core import BLOCK_SIZE
from offload_rt.errors import StoreInUseError
from offload_rt.sessions import context
from offload_rt.sessions.deletion import Removed
from offload_rt.sessions.request_factory import StoredRequestFactory
from offload_rt.sessions.store import SessionStore
from offload_rt.storage.disk_store import DiskStore
from offload_rt.storage.files import read_prompt_mark
from offload_rt.storage.folder import StoreFolder
from offload_rt.storage.options import StoreOptions
from offload_rt.storage.saver import Saver

PARAMS = SamplingParams(max_tokens=5, temperature=0)
T = TypeVar("T")

HEADS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}  # head_dim 32
MODELS = {"llama": HEADS, "qwen2": HEADS | {"use_sliding_window": True, "max_window_layers": 1}}


def prompt(tokens: int, seed: int = 1) -> list[int]:
    return [(7 * i * seed + i // 3) % VOCAB for i in range(tokens)]


async def final_output(
    engine: AsyncLLM, ids: list[int], params: SamplingParams = PARAMS, **named: Any
) -> RequestOutput:
    return [output async for output in engine.generate(ids, params, **named)][-1]


def make_engine(
    store: Path | None,
    family: str = "llama",
    *,
    read_only: bool = False,
    store_options: StoreOptions | None = None,
    **options: Any,
) -> AsyncLLM:
    chosen = {"policy": "full", "host_memory": "16MiB"} | options
    llm = LLM(tiny_model(family, **MODELS[family]), **chosen)
    return AsyncLLM(llm, store=store, store_options=store_options, read_only=read_only)


def run_engine(engine: AsyncLLM, task: Callable[[AsyncLLM], Awaitable[T]], *, parked: bool = False) -> T:
    """Run `task` and close the engine. Check that the KV pool is then empty, unless sessions are `parked`."""

    async def run() -> T:
        async with engine:
            result = await task(engine)
            await asyncio.to_thread(wait_until, lambda: parked or engine.load().pool_used_bytes == 0)
            engine.llm.runner.check_integrity()
            return result

    return asyncio.run(run())


@pytest.mark.parametrize(("family", "policy"), [("llama", "full"), ("qwen2", "infinigen")])
def test_restarted_server_reuses_prompts_with_equal_tokens(
    family: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "SEGMENT_SECONDS", 0.0)  # one slice per segment
    options = {"policy": policy, "prefill_chunk_size": 64}
    turns = [prompt(300)]
    for seed in (2, 3):
        output = run_engine(make_engine(None, family, **options), lambda engine: final_output(engine, turns[-1]))
        turns.append([*turns[-1], *output.outputs[0].token_ids, *prompt(70, seed)])
    expected = [
        run_engine(make_engine(None, family, **options), lambda engine, t=t: final_output(engine, t)) for t in turns
    ]  # type: ignore[misc]
    cached = []
    for turn, expected_output in zip(turns, expected, strict=True):
        found = run_engine(
            make_engine(tmp_path, family, **options), lambda engine, turn=turn: final_output(engine, turn)
        )  # type: ignore[misc]
        assert found.outputs[0].token_ids == expected_output.outputs[0].token_ids
        cached.append(found.num_cached_tokens)
    assert cached[0] == 0 and cached[1] >= 256 and cached[2] >= 320, cached


def test_conversations_larger_than_host_memory_are_cached_on_disk(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, host_memory="768KiB")
    first, second = prompt(500), prompt(500, 3)
    assert engine.llm.runner.pool.block_count < 16

    async def alternate(engine: AsyncLLM) -> list[int]:
        return [(await final_output(engine, ids)).num_cached_tokens for ids in (first, second, first, second)]

    assert run_engine(engine, alternate) == [0, 0, 448, 448]
    assert engine.load().disk_hit_tokens > 300


def test_second_server_continues_a_cancelled_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "SEGMENT_SECONDS", 0.0)
    options, ids = {"prefill_chunk_size": 64}, prompt(900)
    expected = run_engine(make_engine(None, **options), lambda engine: final_output(engine, ids))

    async def cancel_prefill(engine: AsyncLLM) -> int:
        runner = engine.llm.runner
        request = asyncio.ensure_future(final_output(engine, ids))
        await asyncio.to_thread(
            wait_until, lambda: any(sequence.position >= 128 for sequence in list(runner._open.values()))
        )
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await asyncio.to_thread(wait_until, lambda: engine.load().running == 0)
        return len(runner.pool.cached) * 64

    stored_tokens = run_engine(make_engine(tmp_path, **options), cancel_prefill)
    output = run_engine(make_engine(tmp_path, **options), lambda engine: final_output(engine, ids))
    assert 128 <= stored_tokens < 896 and output.num_cached_tokens == stored_tokens
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_store_does_not_change_beams_samples_logprobs_and_salts(tmp_path: Path) -> None:
    greedy = {"max_tokens": 5, "temperature": 0}
    requests: list[tuple[SamplingParams, str]] = [
        (SamplingParams(**greedy), ""),
        (SamplingParams(max_tokens=5, temperature=1, seed=1, n=2), ""),
        (SamplingParams(**greedy, num_beams=2), ""),
        (SamplingParams(**greedy, prompt_logprobs=0), ""),
        (SamplingParams(**greedy), "other"),
    ]

    async def run(engine: AsyncLLM) -> list[tuple[list[list[int]], int]]:
        outputs = [await final_output(engine, prompt(200), params, cache_salt=salt) for params, salt in requests]
        return [
            ([completion.token_ids for completion in output.outputs], output.num_cached_tokens) for output in outputs
        ]

    expected = run_engine(make_engine(None), run)
    assert run_engine(make_engine(tmp_path), run) == expected
    again = run_engine(make_engine(tmp_path), run)
    assert [token_ids for token_ids, _ in again] == [token_ids for token_ids, _ in expected]
    assert [cached for _, cached in again] == [192, 192, 192, 0, 192]


def test_second_engine_reads_blocks_and_writes_none(tmp_path: Path) -> None:
    async def read_beside_writer(writer: AsyncLLM) -> tuple[int, int]:
        await final_output(writer, prompt(200))
        with pytest.raises(StoreInUseError):
            make_engine(tmp_path)
        await asyncio.to_thread(wait_until, lambda: writer.load().pool_used_bytes == 0)
        before = files(tmp_path)
        async with make_engine(tmp_path, read_only=True) as reader:
            cached = [(await final_output(reader, ids)).num_cached_tokens for ids in (prompt(200), prompt(300, 5))]
            with pytest.raises(InputError, match="writable"):
                await final_output(reader, prompt(9), session="a")
            with pytest.raises(InputError, match="for writing"):
                await reader.delete_session("a")
            with pytest.raises(InputError, match="already open for reading only"):
                reader.llm.session("a", tmp_path)
        assert files(tmp_path) == before
        return cached[0], cached[1]

    assert run_engine(make_engine(tmp_path), read_beside_writer) == (192, 0)


def test_session_deletion_keeps_blocks_of_prompts(tmp_path: Path) -> None:
    async def run_and_delete(engine: AsyncLLM) -> None:
        await final_output(engine, prompt(200))
        await final_output(engine, prompt(130, 3), session="a")
        await final_output(engine, prompt(130, 5), session="b")
        await final_output(engine, prompt(130, 7), session="c")
        assert engine._sessions is not None
        await asyncio.to_thread(engine._sessions.store.context.saver.flush)
        stored = files(tmp_path)
        assert not await engine.delete_session("unknown") and files(tmp_path) == stored
        await engine.delete_session("a")

    run_engine(make_engine(tmp_path), run_and_delete, parked=True)
    assert kv_file_count(tmp_path) == 3 + 2 * 3, (
        "three blocks of the prompt, two and a partial one of each session left"
    )
    assert main(["sessions", "delete", "b", "--store", str(tmp_path)]) == 0
    assert kv_file_count(tmp_path) == 3 + 3
    assert run_engine(make_engine(tmp_path), lambda engine: final_output(engine, prompt(200))).num_cached_tokens == 192
    # A prompt that repeats the text of a session uses its blocks.
    assert (
        run_engine(make_engine(tmp_path), lambda engine: final_output(engine, prompt(130, 7))).num_cached_tokens == 128
    )
    assert main(["sessions", "delete", "c", "--store", str(tmp_path)]) == 0
    assert kv_file_count(tmp_path) == 3 + 2
    assert main(["sessions", "clear", "--store", str(tmp_path)]) == 0
    assert files(tmp_path) == ["lock"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("moment", ["before", "loading", "decoding", "after"])
def test_session_deletion_keeps_only_blocks_of_an_equal_prompt(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: the prompt used to store some deleted blocks again, but without a prompt mark."""
    monkeypatch.setattr(context, "SEGMENT_SECONDS", 0.0)
    long = SamplingParams(max_tokens=60, temperature=0)
    text = run_engine(make_engine(None), lambda engine: final_output(engine, prompt(300), long)).outputs[0].token_ids

    async def run(engine: AsyncLLM) -> RequestOutput:
        await final_output(engine, prompt(300), long, session="a")
        await engine.reset_prefix_cache()
        if moment == "before":
            await engine.delete_session("a")
        outputs = engine.generate([*prompt(300), *text[:30]], long, trace=True)
        found = await anext(outputs)
        while not found.finished and (moment == "after" or (moment == "decoding" and not found.outputs[0].token_ids)):
            found = await anext(outputs)
        if moment != "before":
            await engine.delete_session("a")
        return [found, *[output async for output in outputs]][-1]

    found = run_engine(make_engine(tmp_path, prefill_chunk_size=64), run)
    assert found.num_cached_tokens == 320 and len(found.outputs[0].token_ids) == 60
    assert kv_file_count(tmp_path) == (330 + 60 - 1) // 64
    whole = [*prompt(300), *text[:30], *found.outputs[0].token_ids]
    again = run_engine(make_engine(tmp_path), lambda engine: final_output(engine, whole))
    assert again.num_cached_tokens == 384
    assert main(["sessions", "clear", "--store", str(tmp_path)]) == 0
    assert files(tmp_path) == ["lock"]


def test_slow_writes_do_not_block_other_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_writes, later_writes, written, finish = (
        threading.Event(),
        threading.Event(),
        itertools.count(),
        StoreFolder.finish,
    )

    def slow_finish(folder: StoreFolder, *args: Any, **named: Any) -> None:
        assert (first_writes if next(written) < 3 else later_writes).wait(60)
        finish(folder, *args, **named)

    monkeypatch.setattr(StoreFolder, "finish", slow_finish)

    async def run(engine: AsyncLLM) -> int:
        await final_output(engine, prompt(200))
        outputs = engine.generate(prompt(200, 3), SamplingParams(max_tokens=300, temperature=0))
        try:
            await anext(outputs)
            first_writes.set()
            output = await asyncio.wait_for(last_of(outputs), 20)
            assert kv_file_count(tmp_path) == 3, "the engine has not waited for the blocks of the second request"
        finally:
            later_writes.set()
        return len(output.outputs[0].token_ids)

    async def last_of(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
        return [output async for output in outputs][-1]

    assert run_engine(make_engine(tmp_path), run) == 300
    assert kv_file_count(tmp_path) == 3 + 499 // 64


def test_decoding_frees_window_blocks_that_wait_for_the_store(tmp_path: Path) -> None:
    pool = make_engine(None, "qwen2").llm.runner.pool
    memory = pool.groups.blocks(170 + 100) * pool.block_bytes
    params = SamplingParams(max_tokens=100, temperature=0)
    expected = run_engine(make_engine(None, "qwen2"), lambda engine: final_output(engine, prompt(170), params))
    found = run_engine(
        make_engine(tmp_path, "qwen2", host_memory=memory), lambda engine: final_output(engine, prompt(170), params)
    )
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("restarts", [False, True])
def test_prompt_with_a_cached_prefix_fits_in_a_small_pool(restarts: bool, tmp_path: Path) -> None:
    """Prefilling all new tokens at once would need three sliding-window blocks, but the pool has only two."""
    model, ids = architecture("gemma3", dtype=torch.float32), [token % 97 for token in prompt(200)]

    def engine(store: Path | None, memory: int | str = "4MiB") -> AsyncLLM:
        return AsyncLLM(LLM(model, policy="full", dtype="float32", host_memory=memory, verify="off"), store=store)

    async def run(engine: AsyncLLM) -> RequestOutput:
        if not restarts:
            await final_output(engine, ids[:130])
        return await final_output(engine, ids)

    large_engine = engine(None)
    pool = large_engine.llm.runner.pool
    memory = pool.groups.blocks(len(ids) + 5) * pool.block_bytes
    expected = run_engine(large_engine, lambda engine: final_output(engine, ids))
    if restarts:
        run_engine(engine(tmp_path), lambda engine: final_output(engine, ids[:130]))
    found = run_engine(engine(tmp_path, memory), run)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.num_cached_tokens == 128


@pytest.mark.parametrize("seconds_per_token", [0.0, 1e-9, 1e-3, 0.017, 1.0])
def test_segments_are_whole_prefill_chunks_at_any_speed(seconds_per_token: float, tmp_path: Path) -> None:
    """If a segment ended inside a prefill chunk, rounding would change, and thus the sampled text."""
    engine = make_engine(tmp_path, prefill_chunk_size=64)
    assert engine._sessions is not None
    shared = engine._sessions.store.context
    shared.compute_rate = seconds_per_token
    lengths = [shared.segment_stop(start, 4096 + start) - start for start in (0, 64, 192)]
    assert all(length % 64 == 0 < length for length in lengths)
    asyncio.run(engine.close())


@pytest.mark.parametrize("at_once", [True, False], ids=["closed at once", "released"])
def test_blocks_that_exceed_the_write_buffer_are_written(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Saver.__init__, "__defaults__", (1 << 18,))  # two blocks
    if at_once:
        monkeypatch.setattr(StoredRequestFactory, "_release", lambda prompts, request: None)
    run_engine(make_engine(tmp_path), lambda engine: final_output(engine, prompt(500)), parked=at_once)
    assert kv_file_count(tmp_path) == 7


def kv_file_count(folder: Path) -> int:
    return sum(name.endswith(".kv") for name in files(folder))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_short_requests_do_not_evict_a_long_conversation(tmp_path: Path) -> None:
    run_engine(make_engine(tmp_path), lambda engine: final_output(engine, prompt(450)))
    limit = sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) * 9 // 7

    async def turns(engine: AsyncLLM) -> list[int]:
        found = []
        for seed in (2, 4, 6):
            found.append((await final_output(engine, prompt(450))).num_cached_tokens)
            for short in (prompt(130, seed), prompt(130, seed + 1)):
                await final_output(engine, short)
            await asyncio.to_thread(wait_until, lambda: engine.load().pool_used_bytes == 0)
            await engine.reset_prefix_cache()
            assert 0 < engine.load().store_bytes <= limit
        return found

    options = StoreOptions(limit=limit)
    assert run_engine(make_engine(tmp_path, store_options=options), turns) == [448] * 3
    assert run_engine(make_engine(tmp_path, store_options=options), turns) == [448] * 3, "after a restart"


def test_session_deletion_waits_until_the_saver_thread_writes_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, deleting, threads, marked = prompt(300), threading.Event(), set[str](), list[bool]()
    mark, retain, delete_stored = DiskStore.mark_for_prompts, DiskStore.retain, SessionStore.delete_stored
    run_engine(make_engine(tmp_path), lambda engine: final_output(engine, ids, session="s"), parked=True)

    def mark_late(self: DiskStore, keys: Iterable[bytes]) -> None:
        threads.add(threading.current_thread().name)
        assert deleting.wait(20)
        mark(self, keys)

    def recording_retain(self: DiskStore, *args: Any, **named: Any) -> int:
        marked.extend(read_prompt_mark(path) for path in tmp_path.rglob("*.kv"))
        return retain(self, *args, **named)

    def delete_soon(self: SessionStore, name: str) -> Removed:
        threading.Timer(0.3, deleting.set).start()
        return delete_stored(self, name)

    monkeypatch.setattr(DiskStore, "mark_for_prompts", mark_late)
    monkeypatch.setattr(DiskStore, "retain", recording_retain)
    monkeypatch.setattr(SessionStore, "delete_stored", delete_soon)

    async def use(engine: AsyncLLM) -> None:
        await final_output(engine, ids)
        assert await engine.delete_session("s")

    run_engine(make_engine(tmp_path), use)
    assert marked.count(True) == len(ids) // BLOCK_SIZE == block_files(tmp_path) and threads == {"offload-rt saver"}
