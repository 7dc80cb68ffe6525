"""Test sessions that reach the limit of positions or host memory.

A conversation that would exceed the model's positions loses its oldest tokens. Idle sessions are evicted from host
memory to make room for other requests, and are later restored without loss.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import architecture
from support.disk_blocks import block_files
from support.outputs import completed
from support.pools import peak_of
from support.sessions import take_turn
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, InputError, ModelError, PoolFullError, SamplingParams
from offload_rt.sessions.truncate import SINKS, last_kept

SHORT = SamplingParams(max_tokens=6, temperature=0)
NAMES = ("ada", "bob", "cyd")
POSITIONS = 260
BLOCK_BYTES = 3 * 2 * 2 * 64 * 32 * 4
POLICIES: dict[str, dict[str, Any]] = {
    "infinigen": {"policy": "infinigen", "policy_options": {"recent": 16, "alpha": 2.0}},
    "full": {"policy": "full"},
    "int8 rows": {"policy": "full", "kv_cache_dtype": "int8"},
}


pytestmark = pytest.mark.usefixtures("no_fsync")


def make_llm(blocks: int = 200, *, name: str = "llama", positions: int = 4096, **options: Any) -> LLM:
    key = "n_positions" if name == "gpt2" else "max_position_embeddings"
    model = tiny_model(name, dtype=torch.float32, **{key: positions})
    size = LLM(model, dtype="float32", host_memory="1MiB", **({"policy": "full"} | options)).runner.pool.block_bytes
    return LLM(model, dtype="float32", host_memory=blocks * size, **({"policy": "full"} | options))


def turn(name: str, number: int) -> list[int]:
    return tiny_prompt(60 + 9 * number, seed=1000 * NAMES.index(name) + number)


answer = partial(take_turn, params=SHORT)


@contextmanager
def ignore_truncation_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "session .* would outgrow", UserWarning)
        yield


# ------------------------------------------------------------------------------------------------------------ overflow


def test_truncation_keeps_half_of_the_positions_or_fewer() -> None:
    assert last_kept(100, 60, 160) == 100, "everything fits"
    assert last_kept(101, 60, 160) == 80, "the older half is removed"
    assert last_kept(101, 120, 160) == 36, "more is removed if the turn needs the space"
    assert last_kept(101, 500, 160) == 80, "a turn that never fits does not remove all tokens"
    assert last_kept(80, 500, 160) == 80 and last_kept(84, 100, 160) == 56


def explicitly_truncated_answers(folder: Path, name: str, turns: int, **options: Any) -> list[list[int]]:
    """Return the answers of a session that is explicitly truncated before each turn that does not fit."""
    session, answers = make_llm(positions=POSITIONS, **options).session(name, folder, overflow="error"), []
    for i in range(turns):
        length, new = len(session.tokens), len(turn(name, i)) + 6
        if length + new > POSITIONS:
            with pytest.raises(
                ModelError, match=f"the limit is the context length of .*, {POSITIONS} tokens: call truncate"
            ):
                session.send(turn(name, i), SHORT)
            assert len(session.tokens) == length
            session.truncate(keep_last=min(POSITIONS // 2, POSITIONS - new - SINKS) - 1)  # the last token has no KV yet
        answers.append(answer(session, turn(name, i)))
    assert session.history.shift > 0
    session.close()
    return answers


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", [*POLICIES][::-1])
def test_automatic_truncation_equals_explicit_truncation(policy: str, tmp_path: Path) -> None:
    options = POLICIES[policy]
    expected = {name: explicitly_truncated_answers(tmp_path / "by hand", name, 5, **options) for name in NAMES}
    llm = make_llm(positions=POSITIONS, **options)
    session = llm.session("ada", tmp_path / "sent")
    for i in range(5):
        if i == 3:
            session.close()
            llm = make_llm(positions=POSITIONS, **options)
            session = llm.session("ada", tmp_path / "sent")
        outgrows = len(session.tokens) + len(turn("ada", i)) + 6 > POSITIONS
        with pytest.warns(UserWarning, match=r"its oldest \d+ tokens") if outgrows else ignore_truncation_warnings():
            assert answer(session, turn("ada", i)) == expected["ada"][i]
        assert len(session.tokens) <= POSITIONS
    session.close()
    queue = make_llm(11, positions=POSITIONS, **options).turns(tmp_path / "queue", max_num_seqs=3)
    queued = {(name, i): queue.add(name, turn(name, i), SHORT) for i in range(5) for name in NAMES}
    with ignore_truncation_warnings():
        while not queue.idle:
            queue.step()
            queue.check_integrity()
    for (name, i), queued_turn in queued.items():
        assert queued_turn.token_ids == expected[name][i] and queued_turn.finish_reason == "length", (name, i)
    assert queue.stats.evicted > 0 and queue.stats.computed_tokens == 0
    queue.close()


def test_preempted_turns_of_a_truncated_session_keep_their_tokens(tmp_path: Path) -> None:
    expected = explicitly_truncated_answers(tmp_path / "by hand", "ada", 5, **POLICIES["infinigen"])
    llm = make_llm(positions=POSITIONS, **POLICIES["infinigen"])
    queue = llm.turns(tmp_path / "queue")
    scheduler, preempted = queue._engine.scheduler, 0
    for i in range(5):
        queued = queue.add("ada", turn("ada", i), SHORT)
        with ignore_truncation_warnings():
            while not queue.idle:
                queue.step()
                if queued.turn is not None and queued.turn in scheduler.running and preempted == i:
                    scheduler.preempt(queued.turn)
                    preempted += 1
                    scheduler._full = False
                queue.check_integrity()
        assert queued.token_ids == expected[i], i
    assert preempted == 5 and queue.stats.computed_tokens == 0
    queue.close()


@pytest.mark.parametrize("lost", ["all", "one"])
def test_truncation_recomputes_kept_tokens_whose_kv_is_lost(lost: str, tmp_path: Path) -> None:
    session = make_llm(positions=POSITIONS).session("ada", tmp_path)
    tokens = tiny_prompt(200, seed=7)
    tokens += answer(session, tokens)
    session.close()
    for path in sorted(tmp_path.rglob("*.kv"))[: None if lost == "all" else 1]:
        path.unlink()
    session = make_llm(positions=POSITIONS).session("ada", tmp_path)
    with pytest.warns(UserWarning, match=f"its oldest {206 - POSITIONS // 2 - SINKS} tokens"):
        new_tokens = answer(session, turn("ada", 0))
    kept = [*tokens[:SINKS], *tokens[-(POSITIONS // 2) :]]
    assert session.tokens == [*kept, *turn("ada", 0), *new_tokens] and session.history.shift == 0
    assert new_tokens == completed(make_llm().generate([[*kept, *turn("ada", 0)]], SHORT))[0].token_ids
    session.close()


def test_overflow_is_an_error_for_models_with_absolute_positions(tmp_path: Path) -> None:
    session = make_llm(name="gpt2", positions=100).session("s", tmp_path / "gpt2")
    answer(session, tiny_prompt(60))
    with pytest.raises(ModelError, match="has 100"):
        session.send(tiny_prompt(60), SHORT)
    assert len(session.tokens) == 66
    session.close()
    with pytest.raises(ConfigError, match="did you mean 'error'"):
        make_llm().session("s", tmp_path, overflow="eror")


def test_failing_saver_reports_its_error_and_blocks_no_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_llm().session("ada", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("offload_rt.storage.saver.layer_data", lambda *args: 1 / 0)
        list(session.send(turn("ada", 0), SHORT))
        with pytest.raises(ZeroDivisionError):
            session.save()
    session.save()
    assert block_files(tmp_path) == 2 and session.context.saver._waiting == 0
    session.close()


# ---------------------------------------------------------------------------------------- host memory of idle sessions

LONG = tiny_prompt(500, seed=5)
KINDS: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: [c.token_ids for c in completed(llm.generate([LONG, [*LONG[:90], 3]], SHORT))],
    "samples": lambda llm: [
        c.token_ids for c in completed(llm.generate([LONG], SamplingParams(n=3, max_tokens=6, seed=1, temperature=0.9)))
    ],
    "beams": lambda llm: [
        c.token_ids for c in completed(llm.generate([LONG], SamplingParams(num_beams=3, max_tokens=6, temperature=0)))
    ],
    "stream": lambda llm: [event.token_id for event in llm.stream(LONG, SHORT)],
    "score": lambda llm: [score.logprobs for score in llm.score([LONG, LONG[:90]], [[3, 4], [5]])],
    "another policy": lambda llm: [c.token_ids for c in completed(llm.under("streaming").generate([LONG], SHORT))],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_idle_sessions_are_evicted_for_any_request_and_restored(kind: str, tmp_path: Path) -> None:
    llm, large_llm = make_llm(13), make_llm()
    pool = llm.runner.pool
    peak = peak_of(pool)
    sessions = {name: llm.session(name, tmp_path / "a") for name in NAMES}
    references = {name: large_llm.session(name, tmp_path / "roomy") for name in NAMES}
    for name, session in sessions.items():
        assert answer(session, turn(name, 0)) == answer(references[name], turn(name, 0))
    expected = KINDS[kind](make_llm(enable_prefix_caching=False))
    found = KINDS[kind](llm)
    assert found == expected if kind != "score" else torch.allclose(torch.tensor(found[0]), torch.tensor(expected[0]))
    pool.check_integrity()
    assert 0 < peak() <= pool.limit_bytes
    host = sessions["ada"].host
    assert host.stats.evicted > 0 and sessions["ada"].kv.sequence is None, "the least recently used one first"
    for name, session in sessions.items():
        assert answer(session, turn(name, 1)) == answer(references[name], turn(name, 1))
    assert host.stats.computed_tokens == 0, "nothing was lost"
    for session in [*sessions.values(), *references.values()]:
        session.close()


def test_sessions_are_evicted_for_turns_of_another_store(tmp_path: Path) -> None:
    llm = make_llm(9)
    session, other = llm.session("ada", tmp_path / "a"), llm.session("bob", tmp_path / "b")
    first = answer(session, tiny_prompt(300, seed=1))
    answer(other, tiny_prompt(300, seed=2))
    assert session.kv.sequence is None and other.kv.sequence is not None
    history = [*tiny_prompt(300, seed=1), *first, *turn("ada", 0)]
    assert answer(session, turn("ada", 0)) == completed(make_llm().generate([history], SHORT))[0].token_ids
    session.close()
    other.close()
    assert llm.runner.reclaimables == []


def test_unsaved_sessions_stay_and_the_error_names_them(tmp_path: Path) -> None:
    llm = make_llm(9)
    block = llm.runner.pool.block_bytes
    session = llm.session("ada", tmp_path, limit=2 * block)
    first = answer(session, tiny_prompt(250, seed=1))
    message = r"sessions use .*: 'ada' .* \(its KV cannot be stored: the store has reached its limit\)"
    with pytest.raises(PoolFullError, match=message):
        llm.generate([LONG], SHORT)
    assert session.kv.sequence is not None, "a request without a session evicts no session"
    llm.generate([LONG[:60]], SHORT)
    events = session.send(turn("ada", 0), SHORT)
    second = [next(events).token_id]
    with pytest.raises(PoolFullError, match=r"'ada' .* \(answering\)"):
        llm.generate([LONG], SHORT)
    second += [event.token_id for event in events]
    history = [*tiny_prompt(250, seed=1), *first, *turn("ada", 0)]
    assert second == completed(make_llm().generate([history], SHORT))[0].token_ids
    llm.runner.check_integrity()
    with pytest.warns(UserWarning, match="not saved completely"):
        session.close()
    llm.generate([LONG], SHORT)


def test_small_and_large_pools_give_the_same_answers(tmp_path: Path) -> None:
    rng, small_llm, large_llm = random.Random(4), make_llm(12), make_llm()
    peak = peak_of(small_llm.runner.pool)
    sessions = [
        {name: llm.session(name, tmp_path / str(i)) for name in NAMES} for i, llm in enumerate((small_llm, large_llm))
    ]
    for step in range(24):
        prompt = tiny_prompt(rng.randint(20, 120), seed=step)
        name = rng.choice([*NAMES, "", ""])
        if name:
            small_answer, large_answer = (answer(group[name], prompt) for group in sessions)
        else:
            small_answer, large_answer = (
                completed(llm.generate([prompt, prompt[:-3]], SHORT))[1].token_ids for llm in (small_llm, large_llm)
            )
        assert small_answer == large_answer, step
        if len(sessions[0][name].tokens if name else ()) > 320:
            for group in sessions:
                group[name].truncate(keep_last=100)
    assert sessions[0]["ada"].host.stats.evicted > 3 and 0 < peak() <= 12 * BLOCK_BYTES
    for group in sessions:
        for session in group.values():
            session.close()


def test_idle_sessions_free_sliding_window_blocks_for_a_turn(tmp_path: Path) -> None:
    model = architecture("gemma3", dtype=torch.float32)
    options: dict[str, Any] = {"policy": "full", "dtype": "float32", "verify": "off"}
    size = LLM(model, host_memory="4MiB", **options).runner.pool.block_bytes
    prompts = [[token % 90 + 1 for token in tiny_prompt(length, seed=length)] for length in (60, 61, 20)]
    with LLM(model, host_memory=7 * size, **options) as llm:  # leaves 1 block for the full-attention layers
        ada, bob = llm.session("ada", tmp_path), llm.session("bob", tmp_path)
        answer(ada, prompts[0], params=SamplingParams(max_tokens=1, temperature=0))
        answer(bob, prompts[1], params=SamplingParams(max_tokens=1, temperature=0))
        found = answer(ada, prompts[2])
        with LLM(model, host_memory="4MiB", enable_prefix_caching=False, **options) as large_llm:
            [expected] = completed(large_llm.generate([ada.tokens[: -len(found)]], SHORT))
        assert found == expected.token_ids
        ada.close()
        bob.close()


# ---------------------------------------------------------------------------------------------------------------- undo


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("reopened", [False, True])
def test_undone_turn_does_not_change_later_answers(tmp_path: Path, policy: str, reopened: bool) -> None:
    llm = make_llm(**POLICIES[policy])
    plain, undone = llm.session("plain", tmp_path), llm.session("undone", tmp_path)
    expected = [answer(plain, turn("ada", number)) for number in (0, 1)]
    assert answer(undone, turn("ada", 0)) == expected[0]
    answer(undone, turn("bob", 1))
    if reopened:
        undone.close()
        undone = llm.session("undone", tmp_path)
    assert undone.undo() == "" and len(undone.turns) == 2
    assert answer(undone, turn("ada", 1)) == expected[1] and undone.tokens == plain.tokens
    undone.undo(), undone.undo()
    assert not undone.tokens and not undone.turns
    with pytest.raises(InputError, match="no turn that can be undone"):
        undone.undo()
    assert answer(undone, turn("ada", 0)) == expected[0]
    llm.close()


def test_turns_before_and_after_a_truncation_are_undone(tmp_path: Path) -> None:
    llm = make_llm()
    with llm.session("s", tmp_path) as session:
        for number in range(3):
            answer(session, turn("ada", number))
        before = session.tokens
        session.truncate(keep_last=100)
        assert session.undo() == "" and session.tokens == [*before[:SINKS], *before[-101:]][: -len(turn("ada", 2)) - 6]
        answer(session, turn("bob", 0))
        for _ in range(3):
            session.undo()
        assert not session.tokens
        answer(session, turn("bob", 1))
    llm.runner.check_integrity()
    llm.close()
