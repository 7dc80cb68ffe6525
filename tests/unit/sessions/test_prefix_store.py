"""Test the prefix cache of prompts without a session: in host memory, on disk, and after a restart."""

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


async def last(engine: AsyncLLM, ids: list[int], params: SamplingParams = PARAMS, **named: Any) -> RequestOutput:
    return [output async for output in engine.generate(ids, params, **named)][-1]


def make(
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


def served(engine: AsyncLLM, use: Callable[[AsyncLLM], Awaitable[T]], *, parked: bool = False) -> T:
    """Run `use` with an engine. Afterwards, check that no memory is in use, unless sessions are `parked`."""

    async def run() -> T:
        async with engine:
            found = await use(engine)
            await asyncio.to_thread(wait_until, lambda: parked or engine.load().pool_used_bytes == 0)
            engine.llm.runner.check_integrity()
            return found

    return asyncio.run(run())


@pytest.mark.parametrize(("family", "policy"), [("llama", "full"), ("qwen2", "infinigen")])
def test_prompts_are_found_again_after_a_restart(
    family: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers get the turns of a stateless client in turn. All tokens equal those without a cache."""
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


def test_a_full_host_memory_is_refilled_from_disk(tmp_path: Path) -> None:
    """Two conversations alternate in host memory for one. All their full blocks are cached."""
    engine = make(tmp_path, host_memory="768KiB")
    first, second = prompt(500), prompt(500, 3)
    assert engine.llm.runner.pool.block_count < 16

    async def alternate(engine: AsyncLLM) -> list[int]:
        return [(await last(engine, ids)).num_cached_tokens for ids in (first, second, first, second)]

    assert served(engine, alternate) == [0, 0, 448, 448]
    assert engine.load().disk_hit_tokens > 300


def test_a_cancelled_prefill_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second server continues from the last computed segment."""
    monkeypatch.setattr(context, "SEGMENT_SECONDS", 0.0)
    options, ids = {"prefill_chunk_size": 64}, prompt(900)
    expected = served(make(None, **options), lambda engine: last(engine, ids))

    async def leave(engine: AsyncLLM) -> int:
        runner = engine.llm.runner
        request = asyncio.ensure_future(last(engine, ids))
        await asyncio.to_thread(wait_until, lambda: any(one.position >= 128 for one in list(runner._open.values())))
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await asyncio.to_thread(wait_until, lambda: engine.load().running == 0)
        return len(runner.pool.cached) * 64

    kept = served(make(tmp_path, **options), leave)
    found = served(make(tmp_path, **options), lambda engine: last(engine, ids))
    assert 128 <= kept < 896 and found.num_cached_tokens == kept
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_beams_samples_logprobs_and_salts_with_a_store(tmp_path: Path) -> None:
    """Beam searches, several samples, prompt log-probabilities and salted prompts give the same results as without a
    store.
    """
    usual = {"max_tokens": 5, "temperature": 0}
    asked: list[tuple[SamplingParams, str]] = [
        (SamplingParams(**usual), ""),
        (SamplingParams(max_tokens=5, temperature=1, seed=1, n=2), ""),
        (SamplingParams(**usual, num_beams=2), ""),
        (SamplingParams(**usual, prompt_logprobs=0), ""),
        (SamplingParams(**usual), "other"),
    ]

    async def run(engine: AsyncLLM) -> list[tuple[list[list[int]], int]]:
        found = [await last(engine, prompt(200), params, cache_salt=salt) for params, salt in asked]
        return [([each.token_ids for each in one.outputs], one.num_cached_tokens) for one in found]

    expected = served(make(None), run)
    assert served(make(tmp_path), run) == expected
    again = served(make(tmp_path), run)
    assert [answers for answers, _ in again] == [answers for answers, _ in expected]
    assert [cached for _, cached in again] == [192, 192, 192, 0, 192]


def test_a_reader_beside_a_writer(tmp_path: Path) -> None:
    """A second engine on the same store reads blocks and writes none."""

    async def both(writer: AsyncLLM) -> tuple[int, int]:
        await last(writer, prompt(200))
        with pytest.raises(StoreInUseError):
            make(tmp_path)
        await asyncio.to_thread(wait_until, lambda: writer.load().pool_used_bytes == 0)
        before = files(tmp_path)
        async with make(tmp_path, read_only=True) as reader:
            found = [(await last(reader, ids)).num_cached_tokens for ids in (prompt(200), prompt(300, 5))]
            with pytest.raises(InputError, match="writable"):
                await last(reader, prompt(9), session="a")
            with pytest.raises(InputError, match="for writing"):
                await reader.delete_session("a")
            with pytest.raises(InputError, match="already open for reading only"):
                reader.llm.session("a", tmp_path)
        assert files(tmp_path) == before
        return found[0], found[1]

    assert served(make(tmp_path), both) == (192, 0)


def test_a_deleted_session_leaves_the_kv_of_prompts(tmp_path: Path) -> None:
    """One session is deleted while the server runs, others after a restart. Then the store is cleared."""

    async def delete(engine: AsyncLLM) -> None:
        await last(engine, prompt(200))
        await last(engine, prompt(130, 3), session="a")
        await last(engine, prompt(130, 5), session="b")
        await last(engine, prompt(130, 7), session="c")
        assert engine._sessions is not None
        await asyncio.to_thread(engine._sessions.store.context.saver.flush)
        stored = files(tmp_path)
        assert not await engine.delete_session("unknown") and files(tmp_path) == stored
        await engine.delete_session("a")

    served(make(tmp_path), delete, parked=True)
    assert kv_files(tmp_path) == 3 + 2 * 3, "three blocks of the prompt, two and a partial one of each session left"
    assert main(["sessions", "delete", "b", "--store", str(tmp_path)]) == 0
    assert kv_files(tmp_path) == 3 + 3
    assert served(make(tmp_path), lambda engine: last(engine, prompt(200))).num_cached_tokens == 192
    # A prompt that repeats the text of a session uses its blocks.
    assert served(make(tmp_path), lambda engine: last(engine, prompt(130, 7))).num_cached_tokens == 128
    assert main(["sessions", "delete", "c", "--store", str(tmp_path)]) == 0
    assert kv_files(tmp_path) == 3 + 2
    assert main(["sessions", "clear", "--store", str(tmp_path)]) == 0
    assert files(tmp_path) == ["lock"]


@pytest.mark.parametrize("moment", ["before", "loading", "decoding", "after"])
def test_a_session_is_deleted_beside_a_prompt_of_the_same_text(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of the prompt stay stored, and no other data of the text.

    Regression test: a prompt stored some deleted blocks again, without an owner.
    """
    monkeypatch.setattr(context, "SEGMENT_SECONDS", 0.0)
    long = SamplingParams(max_tokens=60, temperature=0)
    text = served(make(None), lambda engine: last(engine, prompt(300), long)).outputs[0].token_ids

    async def run(engine: AsyncLLM) -> RequestOutput:
        await last(engine, prompt(300), long, session="a")
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

    found = served(make(tmp_path, prefill_chunk_size=64), run)
    assert found.num_cached_tokens == 320 and len(found.outputs[0].token_ids) == 60
    assert kv_files(tmp_path) == (330 + 60 - 1) // 64
    whole = [*prompt(300), *text[:30], *found.outputs[0].token_ids]
    again = served(make(tmp_path), lambda engine: last(engine, whole))
    assert again.num_cached_tokens == 384
    assert main(["sessions", "clear", "--store", str(tmp_path)]) == 0
    assert files(tmp_path) == ["lock"]


def test_the_engine_continues_while_blocks_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished request is freed although the disk blocks writes of another request, which still computes."""
    own, others, written, finish = threading.Event(), threading.Event(), itertools.count(), StoreFolder.finish

    def slow(folder: StoreFolder, *given: Any, **named: Any) -> None:
        assert (own if next(written) < 3 else others).wait(60)
        finish(folder, *given, **named)

    monkeypatch.setattr(StoreFolder, "finish", slow)

    async def run(engine: AsyncLLM) -> int:
        await last(engine, prompt(200))
        outputs = engine.generate(prompt(200, 3), SamplingParams(max_tokens=300, temperature=0))
        try:
            await anext(outputs)
            own.set()
            ended = await asyncio.wait_for(last_of(outputs), 20)
            assert kv_files(tmp_path) == 3, "the engine has not waited for the blocks of the second request"
        finally:
            others.set()
        return len(ended.outputs[0].token_ids)

    async def last_of(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
        return [output async for output in outputs][-1]

    assert served(make(tmp_path), run) == 300
    assert kv_files(tmp_path) == 3 + 499 // 64


def test_a_prompt_that_fits_alone_is_answered(tmp_path: Path) -> None:
    """Windows that are kept for the store are freed if the answer needs their memory."""
    pool = make(None, "qwen2").llm.runner.pool
    memory = pool.groups.blocks(170 + 100) * pool.block_bytes
    params = SamplingParams(max_tokens=100, temperature=0)
    expected = served(make(None, "qwen2"), lambda engine: last(engine, prompt(170), params))
    found = served(make(tmp_path, "qwen2", host_memory=memory), lambda engine: last(engine, prompt(170), params))
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("restarts", [False, True])
def test_a_prompt_that_fits_alone_is_answered_after_a_cached_prefix(restarts: bool, tmp_path: Path) -> None:
    """Prefilling all new tokens at once would need three blocks of sliding layers, and the pool has two."""
    model, ids = architecture("gemma3", dtype=torch.float32), [token % 97 for token in prompt(200)]

    def engine(store: Path | None, memory: int | str = "4MiB") -> AsyncLLM:
        return AsyncLLM(LLM(model, policy="full", dtype="float32", host_memory=memory, verify="off"), store=store)

    async def run(engine: AsyncLLM) -> RequestOutput:
        if not restarts:
            await last(engine, ids[:130])
        return await last(engine, ids)

    roomy = engine(None)
    pool = roomy.llm.runner.pool
    memory = pool.groups.blocks(len(ids) + 5) * pool.block_bytes
    expected = served(roomy, lambda engine: last(engine, ids))
    if restarts:
        served(engine(tmp_path), lambda engine: last(engine, ids[:130]))
    found = served(engine(tmp_path, memory), run)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.num_cached_tokens == 128


@pytest.mark.parametrize("seconds_per_token", [0.0, 1e-9, 1e-3, 0.017, 1.0])
def test_segments_are_whole_prefill_chunks_at_any_speed(seconds_per_token: float, tmp_path: Path) -> None:
    """Segments that end within a chunk would change the rounding, and so the text of a seed."""
    engine = make(tmp_path, prefill_chunk_size=64)
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
    served(make(tmp_path), lambda engine: last(engine, prompt(500)), parked=at_once)
    assert kv_files(tmp_path) == 7


def kv_files(folder: Path) -> int:
    return sum(name.endswith(".kv") for name in files(folder))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_short_requests_do_not_evict_a_long_conversation(tmp_path: Path) -> None:
    """Two short requests run between turns of a conversation that nearly fills the store."""
    served(make(tmp_path), lambda engine: last(engine, prompt(450)))
    limit = sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) * 9 // 7

    async def turns(engine: AsyncLLM) -> list[int]:
        found = []
        for seed in (2, 4, 6):
            found.append((await last(engine, prompt(450))).num_cached_tokens)
            for short in (prompt(130, seed), prompt(130, seed + 1)):
                await last(engine, short)
            await asyncio.to_thread(wait_until, lambda: engine.load().pool_used_bytes == 0)
            await engine.reset_prefix_cache()
            assert 0 < engine.load().store_bytes <= limit
        return found

    options = StoreOptions(limit=limit)
    assert served(make(tmp_path, store_options=options), turns) == [448] * 3
    assert served(make(tmp_path, store_options=options), turns) == [448] * 3, "after a restart"


def test_the_saver_thread_writes_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt uses blocks of a session that is then deleted. The deletion waits until they are marked as used by the
    prompt.
    """
    ids, deleting, threads, marked = prompt(300), threading.Event(), set[str](), list[bool]()
    mark, retain, forget = DiskStore.mark_for_prompts, DiskStore.retain, SessionStore.delete_stored
    served(make(tmp_path), lambda engine: last(engine, ids, session="s"), parked=True)

    def claim_late(self: DiskStore, keys: Iterable[bytes]) -> None:
        threads.add(threading.current_thread().name)
        assert deleting.wait(20)
        mark(self, keys)

    def retain_seen(self: DiskStore, *args: Any, **named: Any) -> int:
        marked.extend(read_prompt_mark(path) for path in tmp_path.rglob("*.kv"))
        return retain(self, *args, **named)

    def forget_soon(self: SessionStore, name: str) -> Removed:
        threading.Timer(0.3, deleting.set).start()
        return forget(self, name)

    monkeypatch.setattr(DiskStore, "mark_for_prompts", claim_late)
    monkeypatch.setattr(DiskStore, "retain", retain_seen)
    monkeypatch.setattr(SessionStore, "delete_stored", forget_soon)

    async def use(engine: AsyncLLM) -> None:
        await last(engine, ids)
        assert await engine.delete_session("s")

    served(make(tmp_path), use)
    assert marked.count(True) == len(ids) // BLOCK_SIZE == block_files(tmp_path) and threads == {"offload-rt saver"}
