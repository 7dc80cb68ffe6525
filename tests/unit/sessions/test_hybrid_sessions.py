"""Test sessions and stored prompts with hybrid models, whose recurrent state is restored from snapshots.

Tokens must equal those of the whole conversation when it is computed at once.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.architectures import architecture
from support.child_processes import fork_until_killed
from support.hybrids import FAMILIES, computed_tokens, make_llm, random_prompt, rotated_pairs, take_turn
from support.tiny_models import assert_greedy

from offload_rt import AsyncLLM, ModelError, RequestOutput, SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.sessions.session import Session
from offload_rt.sessions.stored_states import DISK_SLACK, StoredStates
from offload_rt.storage.disk_store import DiskStore

GREEDY = SamplingParams(max_tokens=6, temperature=0)
LONG = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
KILLS = int(os.environ.get("OFFLOAD_RT_STRESS", "8")) // 4


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "restarts"), rotated_pairs(FAMILIES, (False, True)))
def test_turns_continue_at_the_last_full_block(name: str, restarts: bool, tmp_path: Path) -> None:
    model, llm = make_llm(name)
    session = llm.session("s", tmp_path)
    for turn in (
        random_prompt(189, 1),
        random_prompt(20, 2),
        random_prompt(32, 3),
    ):  # the first and last answer fill a block
        before = session.tokens
        assert_greedy(model, [*before, *turn], take_turn(session, turn))
        assert computed_tokens(session) <= len(turn) + BLOCK_SIZE
        if restarts:
            session.close()
            session = make_llm(name)[1].session("s", tmp_path)
    session.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["qwen3_5", "granite_hybrid"])
def test_restart_does_not_change_the_text_of_a_sparse_policy(name: str, tmp_path: Path) -> None:
    """With selection, the recurrent state of decoded tokens is approximate. It must be restored, not recomputed."""
    options: dict[str, Any] = {"policy": "infinigen", "policy_options": {"recent": 4, "budget": 0.2}}
    found = []
    for restarts in (False, True):
        session = make_llm(name, **options)[1].session("s", tmp_path / str(restarts))
        for seed, length in ((1, 120), (2, 100), (3, 100)):  # the first two answers fill a block
            take_turn(session, random_prompt(length, seed), LONG)
            assert seed == 1 or computed_tokens(session) <= 100 + BLOCK_SIZE
            if restarts:
                session.close()
                session = make_llm(name, **options)[1].session("s", tmp_path / str(restarts))
        found.append(session.tokens)
        session.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("restarts", [False, True])
def test_undo_deletes_snapshots_and_the_session_continues(restarts: bool, tmp_path: Path) -> None:
    model, llm = make_llm("qwen3_5")
    session = llm.session("s", tmp_path)
    take_turn(session, random_prompt(200, 1), LONG)
    first, states = session.tokens, set(session.history.states)
    take_turn(session, random_prompt(300, 2), LONG)
    later = set(session.history.states) - states
    session.undo()
    assert session.tokens == first and later
    session.context.saver.flush()
    assert not any(bytes.fromhex(key) in session.context.storage for key in later)
    if restarts:
        session.close()
        session = make_llm("qwen3_5")[1].session("s", tmp_path)
    turn = random_prompt(30, 3)
    assert_greedy(model, [*first, *turn], take_turn(session, turn))
    assert computed_tokens(session) <= len(turn) + BLOCK_SIZE
    session.discard()
    assert not list(tmp_path.rglob("*.kv")), "the snapshots are deleted with the session"


@pytest.mark.parametrize("step", [0, 1, 12])
def test_session_continues_after_a_closed_stream_or_failed_step(step: int, tmp_path: Path) -> None:
    model, llm = make_llm("qwen3_5")
    session = llm.session("s", tmp_path)
    take_turn(session, random_prompt(130, 1))
    events = session.send(random_prompt(112, 2), LONG)  # the answer fills a block
    for _ in range(step):
        next(events)
    events.close()  # type: ignore[attr-defined]
    before, turn = session.tokens, random_prompt(10, 3)
    assert_greedy(model, [*before, *turn], take_turn(session, turn))
    with pytest.MonkeyPatch.context() as patch:
        calls, real_run = iter(range(1000)), session.kv.runner.steps.run

        def run(batch: Any) -> Any:
            if next(calls) == step:
                raise KeyboardInterrupt
            return real_run(batch)

        patch.setattr(session.kv.runner.steps, "run", run)
        with pytest.raises(KeyboardInterrupt):
            list(session.send(random_prompt(40, 4), LONG))
    before = session.tokens
    assert_greedy(model, [*before, *turn], take_turn(session, turn))
    session.close()


def test_forks_and_evicted_sessions_continue_correctly(tmp_path: Path) -> None:
    model, large_llm = make_llm("qwen3_5")
    assert large_llm.runner.pool.states is not None
    snapshots = 6 * large_llm.runner.pool.states.slot_bytes
    _, llm = make_llm(
        "qwen3_5", host_memory=snapshots + 12 * large_llm.runner.pool.block_bytes, snapshot_memory=snapshots
    )
    sessions = {name: llm.session(name, tmp_path) for name in "abc"}
    for seed in range(3):
        for name, session in list(sessions.items()):
            before, turn = session.tokens, random_prompt(100, seed + ord(name))
            assert_greedy(model, [*before, *turn], take_turn(session, turn))
        if seed == 1:
            sessions["d"] = sessions["a"].fork("d")
    for session in sessions.values():
        session.close()
    assert session.host.stats.evicted


def test_truncation_is_refused_and_overflow_recomputes(tmp_path: Path) -> None:
    model, llm = make_llm("qwen3_5")
    session = llm.session("s", tmp_path)
    take_turn(session, random_prompt(300, 1))
    with pytest.raises(ModelError, match="recurrent layers"):
        session.truncate(keep_last=100)
    most = session.kv.runner.adapter.geometry.max_positions
    with pytest.warns(UserWarning, match="would outgrow"):
        found = take_turn(session, random_prompt(most - 200, 2))
    assert len(session.tokens) <= most
    assert_greedy(model, session.tokens[: -len(found)], found)
    session.close()


def test_sessions_with_quantised_kv_are_recomputed(tmp_path: Path) -> None:
    """A snapshot would match the KV before quantisation, so no snapshots are taken."""
    session = make_llm("qwen3_5", kv_cache_dtype="int8")[1].session("s", tmp_path)
    take_turn(session, random_prompt(100, 1))
    take_turn(session, random_prompt(100, 2))
    assert computed_tokens(session) == 206
    session.close()


# --------------------------------------------------------------------------------------------------- damage and kills


def state_files(folder: Path, session: Session) -> list[Path]:
    return [path for path in folder.rglob("*.kv") if path.stem in session.history.states]


def test_bit_flip_in_a_stored_state_changes_no_token(tmp_path: Path) -> None:
    model, llm = make_llm("qwen3_5")
    session = llm.session("s", tmp_path)
    take_turn(session, random_prompt(1500, 1), LONG)
    session.close()
    before, files = session.tokens, state_files(tmp_path, session)
    turn, rng = random_prompt(20, 2), random.Random(1)
    assert len(files) >= 2
    contents = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"}
    for path in files:
        for place in (rng.randrange(24), rng.randrange(4096, len(contents[path]))):
            for other, data in contents.items():
                other.write_bytes(data)
            damaged = bytearray(contents[path])
            damaged[place] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            session = make_llm("qwen3_5")[1].session("s", tmp_path)
            assert_greedy(model, [*before, *turn], take_turn(session, turn))
            session.close()


def test_turn_continues_if_loading_a_state_evicts_a_snapshot_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, llm = make_llm("qwen3_5")
    session = llm.session("s", tmp_path)
    take_turn(session, random_prompt(300, 1), LONG)
    session.close()
    _, other = make_llm("qwen3_5")
    prefix = session.tokens[:130]
    other.generate([prefix], GREEDY)
    table = other.runner.pool.cached.snapshots
    assert table is not None and len(table) == len(table._kept) > 0
    real_take, evicted = table.take, list[int]()

    def take() -> int | None:
        evicted.extend(table._kept)
        table.forget(list(table._kept))
        return real_take()

    monkeypatch.setattr(table, "take", take)
    monkeypatch.setattr(StoredStates, "load", lambda *_: False)
    session, turn = other.session("s", tmp_path), random_prompt(9, 2)
    before = session.tokens
    assert_greedy(model, [*before, *turn], take_turn(session, turn))
    assert evicted
    session.close()


def test_flush_raises_a_saver_error_and_the_next_save_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm("qwen3_5")[1]
    session = llm.session("s", tmp_path)
    take_turn(session, random_prompt(300, 1))
    context, snapshots = session.context, llm.runner.snapshots
    name = session.kv.blocks.names(BLOCK_SIZE)[0].state()
    assert context.states is not None and snapshots is not None and name.key not in context.storage
    slot = snapshots.take()
    assert slot is not None

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no writer")

    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "begin", fail)
        assert context.states.save_slot(name, slot, 300)
        with pytest.raises(RuntimeError, match="no writer"):
            context.saver.flush()
    assert context.states._waiting == 0
    assert context.states.save_slot(name, slot, 300)
    context.saver.flush()
    assert name.key in context.storage and context.states.load(name, slot)
    snapshots.give_back(slot)
    session.close()


@pytest.mark.slow
def test_session_continues_after_a_kill_during_state_writes(tmp_path: Path) -> None:
    rng, model, continued = random.Random(2), architecture("qwen3_5"), 0
    llm = make_llm("qwen3_5")[1]
    for i in range(KILLS):
        child = fork_until_killed(run_turns(tmp_path / str(i)))
        time.sleep(rng.random() * 0.6)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        session = llm.session("s", tmp_path / str(i))
        before, turn = session.tokens, random_prompt(40, 999)
        session.context.storage.check_integrity()
        assert_greedy(model, [*before, *turn], take_turn(session, turn))
        continued += session.loaded_tokens > 0
        session.close()
    assert continued


def run_turns(folder: Path) -> Iterator[None]:
    """Run the turns of a session, and yield after each one."""
    session = make_llm("qwen3_5")[1].session("s", folder)
    for number in range(80):
        list(session.send(random_prompt(90, number), GREEDY))
        yield


# ---------------------------------------------------------------------------------------------------- stored prompts


async def final_output(engine: AsyncLLM, ids: list[int], params: SamplingParams = GREEDY) -> RequestOutput:
    return [output async for output in engine.generate(ids, params)][-1]


def run_prompts(store: Path, name: str, prompts: list[list[int]], **options: Any) -> list[RequestOutput]:
    """Run prompts one after another on a new engine that has a store."""

    async def run() -> list[RequestOutput]:
        async with AsyncLLM(make_llm(name, **options)[1], store=store) as engine:
            return [await final_output(engine, ids) for ids in prompts]

    return asyncio.run(run())


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("name", "policy"), rotated_pairs(FAMILIES, ("full", "infinigen")))
def test_repeated_continued_and_edited_prompts_reuse_stored_states(name: str, policy: str, tmp_path: Path) -> None:
    model = architecture(name)
    stem, edit = random_prompt(1500, 1), random_prompt(100, 3)
    edited = stem[: -len(edit)] + edit
    for prompt, cached in ((stem, 0), (stem, 1472), (stem + random_prompt(30, 2), 1472), (edited, None)):
        [output] = run_prompts(tmp_path, name, [prompt], policy=policy)
        if policy == "full":
            assert_greedy(model, prompt, output.outputs[0].token_ids)
        else:
            [expected] = run_prompts(tmp_path / "other", name, [prompt], policy=policy, enable_prefix_caching=False)
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        if cached is not None:
            assert output.num_cached_tokens == cached
        elif name == "lfm3":  # KV of sliding layers is stored only at the end of the text
            assert output.num_cached_tokens == 0
        else:
            assert len(prompt) - output.num_cached_tokens <= 2 * len(edit) + DISK_SLACK


class TestFaults:
    def test_wrong_restored_state_changes_tokens(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """If the restored state is replaced with zeros, `assert_greedy` must fail."""
        model, llm = make_llm("qwen3_5")
        session = llm.session("s", tmp_path)
        take_turn(session, random_prompt(1500, 1))
        session.close()

        def zeros(self: StoredStates, name: Any, slot: int) -> bool:
            self._pool.write(slot, memoryview(bytearray(self._pool.slot_bytes)))
            return True

        monkeypatch.setattr(StoredStates, "load", zeros)
        session, turn = make_llm("qwen3_5")[1].session("s", tmp_path), random_prompt(9, 2)
        before = session.tokens
        with pytest.raises(AssertionError):
            assert_greedy(model, [*before, *turn], take_turn(session, turn, LONG))
        session.close()
