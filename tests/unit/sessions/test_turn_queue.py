"""Test a queue with turns of several sessions, with look-ahead eviction and prefetching (CachedAttention, §3.3)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import tiny_prompt
from support.turn_queues import NAMES, SHORT, drain, make_llm, turn

from offload_rt import ConfigError, InputError, SamplingParams
from offload_rt.errors import PoolFullError
from offload_rt.sessions.session import Session
from offload_rt.sessions.session_kv import SessionKV
from offload_rt.sessions.turn import Turn

POLICIES: dict[str, dict[str, Any]] = {
    "infinigen": {"policy": "infinigen", "policy_options": {"recent": 16, "alpha": 2.0}},
    "full": {"policy": "full"},
    "int8 rows": {"policy": "full", "kv_cache_dtype": "int8"},
}


pytestmark = pytest.mark.usefixtures("no_fsync")


def isolated_answers(folder: Path, names: tuple[str, ...], turns: int, **options: Any) -> dict[str, list[list[int]]]:
    """Return the answers of each session when it runs alone and uninterrupted. They are cached in `ANSWERS`."""
    assert turns <= 3
    answers = {}
    for name in names:
        if (key := f"{name} {options}") not in ANSWERS:
            session = make_llm(**options).session(name, folder / name)
            ANSWERS[key] = [[e.token_id for e in session.send(turn(name, i), SHORT)] for i in range(3)]
            session.close()
        answers[name] = ANSWERS[key][:turns]
    return answers


ANSWERS: dict[str, list[list[int]]] = {}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", [*POLICIES][::-1])
def test_concurrent_turns_equal_isolated_turns(policy: str, tmp_path: Path) -> None:
    options = POLICIES[policy]
    expected = isolated_answers(tmp_path / "alone", NAMES, 3, **options)
    queue = make_llm(21, **options).turns(tmp_path / "q", max_num_seqs=3)
    queued = {(name, i): queue.add(name, turn(name, i), SHORT) for i in range(3) for name in NAMES}
    for _ in drain(queue):
        pass
    for (name, i), queued_turn in queued.items():
        assert queued_turn.token_ids == expected[name][i] and queued_turn.finish_reason == "length", (name, i)
    stats = queue.stats
    assert stats.turns >= 12 and stats.computed_tokens == 0 and stats.host_tokens + stats.disk_tokens > 0
    queue.close()
    session = make_llm(**options).session("bob", tmp_path / "q")
    assert session.tokens[-SHORT.max_tokens :] == expected["bob"][2]
    session.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_preempted_turns_restart_with_the_same_answers(options: dict[str, Any], tmp_path: Path) -> None:
    names, lengths = NAMES[:3], [SHORT, SamplingParams(max_tokens=40, temperature=0)]
    expected = {}
    for name in names:
        session = make_llm(**options).session(name, tmp_path / name)
        expected[name] = [[e.token_id for e in session.send(turn(name, i), lengths[i])] for i in range(2)]
        session.close()
    queue = make_llm(11, **options).turns(tmp_path / "q", max_num_seqs=3)
    queued = {(name, i): queue.add(name, turn(name, i), lengths[i]) for i in range(2) for name in names}
    seen: dict[int, list[int]] = {}
    while not queue.idle:
        for event in queue.step():
            seen.setdefault(event.request_id, []).append(event.token_id)
        queue.check_integrity()
    assert queue._engine.scheduler.preemptions > 0
    for (name, i), queued_turn in queued.items():
        assert queued_turn.token_ids == expected[name][i] == seen[queued_turn.number], (name, i)
    queue.close()


def test_free_host_evicts_parked_sessions_before_a_turn(tmp_path: Path) -> None:
    llm = make_llm(20)
    queue = llm.turns(tmp_path, max_num_seqs=1, free_host=0.5)
    for name in NAMES:
        queue.add(name, tiny_prompt(200, seed=NAMES.index(name)), SHORT)
    for _ in drain(queue):
        pass
    pool, host = llm.runner.pool, queue.store.host
    host.look_ahead(())
    evicted, ada = host.stats.evicted, queue.store.session("ada").kv
    assert host.free_bytes >= 0.5 * pool.block_count * pool.block_bytes and evicted >= 1
    assert len(host.parked) == 4 - evicted and ada not in host.parked
    host.look_ahead([ada])
    assert ada in host.parked and host.stats.evicted == evicted, "prefetched sessions use the reserved memory"
    queue.close()


def test_parked_sessions_are_evicted_after_their_time_to_live(tmp_path: Path) -> None:
    now = 0.0
    llm = make_llm()
    session = llm.session("s", tmp_path, ttl=60)
    list(session.send(turn("ada", 0), SHORT))
    session.host._clock = lambda: now
    session.host._since[session.kv] = 0.0
    now = 59.0
    session.host.look_ahead(())
    assert session.kv.sequence is not None
    now = 61.0
    session.host.look_ahead(())
    assert session.kv.sequence is None and session.host.stats.evicted == 1
    expected = isolated_answers(tmp_path / "alone", ("ada",), 2)["ada"]
    assert [e.token_id for e in session.send(turn("ada", 1), SHORT)] == expected[1]
    session.close()


def test_idle_sessions_are_evicted_for_a_turn_without_a_queue(tmp_path: Path) -> None:
    llm = make_llm(10)
    sessions = [llm.session(name, tmp_path) for name in NAMES]
    expected = isolated_answers(tmp_path / "alone", NAMES, 2)
    for i in range(2):
        for name, session in zip(NAMES, sessions, strict=True):
            assert [e.token_id for e in session.send(turn(name, i), SHORT)] == expected[name][i]
            session.check_integrity()
    assert sessions[0].host.stats.evicted > 0
    for session in sessions:
        session.close()


@pytest.mark.parametrize("detected", ["before the turn", "meanwhile"])
def test_damaged_blocks_restart_the_turn(detected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = isolated_answers(tmp_path / "alone", NAMES[:2], 2)
    queue = make_llm().turns(tmp_path / "q")
    for name in NAMES[:2]:
        queue.add(name, turn(name, 0), SHORT)
    for _ in drain(queue):
        pass
    queue.close()
    for path in (tmp_path / "q").rglob("*.kv"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    if detected == "before the turn":
        real = SessionKV.fetch

        def fetch(self: SessionKV, *, all_layers: bool) -> None:
            real(self, all_layers=all_layers)
            if self.loader is not None:
                self.loader._thread.join(10)

        monkeypatch.setattr(SessionKV, "fetch", fetch)
    queue = make_llm().turns(tmp_path / "q")
    queued = {name: queue.add(name, turn(name, 1), SHORT) for name in NAMES[:2]}
    for _ in drain(queue):
        pass
    assert {name: queued_turn.token_ids for name, queued_turn in queued.items()} == {
        name: expected[name][1] for name in queued
    }
    assert queue.stats.computed_tokens > 0
    queue.close()


def test_turn_that_can_never_fit_leaves_the_queue(tmp_path: Path) -> None:
    queue = make_llm(10).turns(tmp_path)
    queue.add("ada", tiny_prompt(2000, seed=1), SHORT)
    other = queue.add("bob", turn("bob", 0), SHORT)
    again = queue.add("ada", turn("ada", 0), SHORT)
    with pytest.raises(PoolFullError):
        list(queue.run())
    list(queue.run())
    expected = isolated_answers(tmp_path / "alone", NAMES[:2], 1)
    assert other.token_ids == expected["bob"][0] and again.token_ids == expected["ada"][0]
    queue.close()


def test_unexpected_tokenizer_error_ends_all_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_llm(10).turns(tmp_path)
    turns = [queue.add(name, turn(name, 0), SHORT) for name in NAMES[:2]]

    def encode(session: Session, *_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(Session, "encode", encode)
        with pytest.raises(ZeroDivisionError):
            list(queue.run())
    assert [each.finish_reason for each in turns] == ["abort"] * 2
    again = queue.add(NAMES[0], turn(NAMES[0], 0), SHORT)
    list(queue.run())
    assert again.token_ids
    queue.close()


def test_waiting_turn_keeps_its_kv_and_failed_turn_frees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = isolated_answers(tmp_path / "alone", NAMES[:2], 2)
    llm = make_llm()
    queue = llm.turns(tmp_path / "q", max_num_seqs=2)
    for name in NAMES[:2]:
        queue.add(name, turn(name, 0), SHORT)
    list(queue.run())
    real, refused = llm.runner.pool.check_spare, []

    def refuse(blocks: int) -> None:
        if len(refused) < 2:
            refused.append(blocks)
            raise PoolFullError("not now")
        real(blocks)

    with monkeypatch.context() as patch:
        patch.setattr(llm.runner.pool, "check_spare", refuse)
        queued = {name: queue.add(name, turn(name, 1), SHORT) for name in NAMES[:2]}
        for _ in drain(queue):
            pass
    assert refused and {name: queued_turn.token_ids for name, queued_turn in queued.items()} == {
        n: expected[n][1] for n in queued
    }
    assert queue.stats.disk_tokens == 0, "the KV stayed in host memory"
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "adopt", lambda *args, **options: (_ for _ in ()).throw(PoolFullError("never")))
        queue.store.session("ada").kv.evict()
        queue.store.host.unpark(queue.store.session("ada").kv)
        failed = queue.add("ada", turn("ada", 2), SHORT)
        with pytest.raises(PoolFullError, match="never"):
            list(queue.run())
    session = queue.store.session("ada")
    assert failed.finish_reason == "abort" and not session.busy and queue.idle
    session.check_integrity()
    again = queue.add("ada", turn("ada", 2), SHORT)
    list(queue.run())
    assert len(again.token_ids) == SHORT.max_tokens
    queue.close()


@pytest.mark.parametrize("outcome", ["waits", "is cancelled"])
def test_turn_dropped_before_its_first_layer_frees_the_cached_prefix(
    outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, prompt = make_llm(), turn("ada", 0)
    llm.generate([prompt], SHORT)
    queue = llm.turns(tmp_path / "q")
    kv, dropped = queue.store.session("ada").kv, []
    real = Turn.start

    def start(self: Turn, runner: Any) -> Any:
        prefill = real(self, runner)
        if not dropped:
            assert kv.sequence is not None and kv.sequence.position == 64
            self.drop(runner) if outcome == "waits" else self.finish(runner, "abort")
            dropped.append(kv.sequence)
            raise PoolFullError("not now")
        return prefill

    monkeypatch.setattr(Turn, "start", start)
    queue.add("ada", prompt, SHORT)
    with suppress(PoolFullError):
        list(queue.run())
    assert dropped == [None]
    kv.check_integrity()
    again = queue.add("ada", prompt, SHORT)
    list(queue.run())
    assert again.token_ids == isolated_answers(tmp_path / "alone", ("ada",), 1)["ada"][0]
    llm.runner.pool.check_integrity()
    queue.close()


def test_turns_interrupted_between_layers_keep_their_tokens(tmp_path: Path) -> None:
    for options in POLICIES.values():
        llm = make_llm(**options)
        session = llm.session("ada", tmp_path / str(options))
        list(session.send(turn("ada", 0), SHORT))
        adapter, steps = llm.runner.adapter, 0
        real = type(adapter).after_attention

        def interrupt(self: Any, layer: int, *rest: Any, real: Any = real) -> Any:
            nonlocal steps
            steps += layer == 1
            if layer == 1 and steps == 5:
                raise KeyboardInterrupt
            return real(self, layer, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(adapter), "after_attention", interrupt)
            with pytest.raises(KeyboardInterrupt):
                list(session.send(turn("ada", 1), SHORT))
        session.check_integrity()
        kept = session.tokens
        answer = [e.token_id for e in session.send(turn("ada", 2), SHORT)]
        session.close()
        uninterrupted = make_llm(**options).session("ada", tmp_path / f"{options} straight")
        list(uninterrupted.send(turn("ada", 0), SHORT))
        new_tokens = len(kept) - len(uninterrupted.tokens) - len(turn("ada", 1))
        assert 0 < new_tokens < SHORT.max_tokens
        list(uninterrupted.send(turn("ada", 1), SamplingParams(max_tokens=new_tokens, temperature=0)))
        assert uninterrupted.tokens == kept
        assert [e.token_id for e in uninterrupted.send(turn("ada", 2), SHORT)] == answer
        uninterrupted.close()


def test_waiting_turns_of_a_deleted_session_are_refused(tmp_path: Path) -> None:
    llm = make_llm()
    queue = llm.turns(tmp_path)
    turns = [queue.add("s", turn("ada", number), SHORT) for number in range(2)]
    turns[0].session.discard()
    for queued in turns:
        with pytest.raises(InputError, match="is closed"):
            queue.step()
        assert queued.finish_reason == "abort"
    again = queue.add("s", turn("ada", 0), SHORT)
    list(queue.run())
    assert queue.idle and again.finish_reason == "length"
    queue.close()
    llm.runner.check_integrity()


def test_invalid_calls_are_refused(tmp_path: Path) -> None:
    llm = make_llm()
    with pytest.raises(ConfigError, match="did you mean 'lookahead'"):
        llm.turns(tmp_path, policy="lookahed")
    with pytest.raises(ConfigError, match="ttl=0"):
        llm.session("s", tmp_path, ttl=0)
    with pytest.raises(ConfigError, match="free_host"):
        llm.turns(tmp_path, free_host=1.0)
    session = llm.session("s", tmp_path)
    events = session.send(turn("ada", 0), SHORT)
    next(events)
    queue = llm.turns(tmp_path)
    with pytest.raises(InputError, match="answering elsewhere"):
        queue.add("s", [1])
    events.close()  # type: ignore[attr-defined]
    queue.add("s", [1], SHORT)
    queue.step()
    with pytest.raises(InputError, match="is answering"):
        session.send([1])
    queue.cancel()
    session.close()
    queue.close()
