"""Test snapshots of recurrent state that are needed by several sessions or prompts with the same text."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from support.hybrids import computed_tokens, make_llm, random_prompt, take_turn
from support.tiny_models import assert_greedy

from offload_rt import AsyncLLM, RequestOutput, SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.kv_cache.snapshot_table import SnapshotTable
from offload_rt.sessions.session import Session
from offload_rt.sessions.stored_states import StoredStates

TEXT, TURN = random_prompt(300, 1), random_prompt(20, 9)
GREEDY = SamplingParams(max_tokens=6, temperature=0)


def assert_continues(folder: Path, name: str) -> None:
    """Check that a session continues after a restart and recomputes at most its last block."""
    model, llm = make_llm("qwen3_5")
    with llm.session(name, folder) as session:
        before = session.tokens
        assert_greedy(model, [*before, *TURN], take_turn(session, TURN))
        assert computed_tokens(session) <= len(TURN) + BLOCK_SIZE


def replace_snapshots(session: Session) -> None:
    """Run turns until the session no longer needs any of its current snapshots."""
    before = set(session.history.states)
    for seed in (2, 3):
        take_turn(session, random_prompt(200, seed))
    assert before and not before & set(session.history.states)


def test_growing_session_keeps_states_of_another_session(tmp_path: Path) -> None:
    _, llm = make_llm("qwen3_5")
    with llm.session("a", tmp_path) as growing:
        with llm.session("b", tmp_path) as other:
            assert take_turn(growing, TEXT) == take_turn(other, TEXT)
        replace_snapshots(growing)
    assert_continues(tmp_path, "b")


def test_growing_session_keeps_states_of_a_prompt(tmp_path: Path) -> None:
    async def serve(*prompts: tuple[list[int], str | None]) -> RequestOutput:
        async with AsyncLLM(make_llm("qwen3_5")[1], store=tmp_path) as engine:
            for ids, session in prompts:
                output = [one async for one in engine.generate(ids, GREEDY, session=session)][-1]
            return output

    turns_of_a = [TEXT + random_prompt(200 * turns, 2) for turns in (1, 2, 3)]
    asyncio.run(serve((TEXT, None), (TEXT, "a"), *((ids, "a") for ids in turns_of_a)))
    assert asyncio.run(serve((TEXT, None))).num_cached_tokens == len(TEXT) // BLOCK_SIZE * BLOCK_SIZE


def test_undo_keeps_states_of_a_fork(tmp_path: Path) -> None:
    _, llm = make_llm("qwen3_5")
    with llm.session("a", tmp_path) as session:
        take_turn(session, TEXT)
        take_turn(session, random_prompt(200, 2))
        with session.fork("b"):
            session.undo()
    assert_continues(tmp_path, "b")
    assert_continues(tmp_path, "a")


def test_fork_keeps_a_pending_state_of_a_deleted_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = StoredStates._write

    def write(*args: Any, **named: Any) -> None:
        time.sleep(0.2)
        real_write(*args, **named)

    monkeypatch.setattr(StoredStates, "_write", write)
    _, llm = make_llm("qwen3_5")
    session = llm.session("a", tmp_path)
    take_turn(session, TEXT)
    fork = session.fork("b")
    session.discard()
    fork.close()
    assert_continues(tmp_path, "b")


def test_later_turn_loads_a_state_that_found_no_free_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, llm = make_llm("qwen3_5")
    with llm.session("a", tmp_path) as session:
        take_turn(session, TEXT)
    with make_llm("qwen3_5")[1].session("a", tmp_path) as session:
        for reused in (False, True):
            with monkeypatch.context() as patch:
                if not reused:
                    patch.setattr(SnapshotTable, "take", lambda _: None)
                before = session.tokens
                assert_greedy(model, [*before, *TURN], take_turn(session, TURN))
            assert (computed_tokens(session) < len(TEXT)) is reused
