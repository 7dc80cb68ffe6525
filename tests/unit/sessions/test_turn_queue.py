"""Test turns of several sessions in one queue, with look-ahead eviction and prefetching (CachedAttention, §3.3)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, InputError, SamplingParams
from offload_rt.errors import PoolFullError
from offload_rt.sessions.host_tier import HostTier
from offload_rt.sessions.session import Session
from offload_rt.sessions.session_kv import SessionKV
from offload_rt.sessions.turn import Turn
from offload_rt.sessions.turn_queue import TurnQueue

SHORT = SamplingParams(max_tokens=12, temperature=0)
NAMES = ("ada", "bob", "cyd", "dan")
POLICIES: dict[str, dict[str, Any]] = {
    "infinigen": {"policy": "infinigen", "policy_options": {"recent": 16, "alpha": 2.0}},
    "full": {"policy": "full"},
    "int8 rows": {"policy": "full", "kv_cache_dtype": "int8"},
}
LAYERS = 3
BLOCK_BYTES = LAYERS * 2 * 2 * 64 * 32 * 4
MODEL = tiny_model("llama", dtype=torch.float32, num_hidden_layers=LAYERS)


pytestmark = pytest.mark.usefixtures("no_fsync")


def make_llm(blocks: int = 400, **options: Any) -> LLM:
    chosen = {"policy": "full"} | options
    size = BLOCK_BYTES
    if "kv_cache_dtype" in options:
        size = LLM(MODEL, dtype="float32", host_memory="1MiB", **chosen).runner.pool.block_bytes
    llm = LLM(MODEL, dtype="float32", host_memory=blocks * size, **chosen)
    assert llm.runner.pool.block_count == blocks
    return llm


def turn(name: str, number: int) -> list[int]:
    """Return the prompt of a turn. Sessions differ from the first token on."""
    return tiny_prompt(70 + 10 * number, seed=1000 * NAMES.index(name) + number)


def alone(folder: Path, names: tuple[str, ...], turns: int, **options: Any) -> dict[str, list[list[int]]]:
    """Return the answers of each session without other sessions or interruptions. They are cached in `ALONE`."""
    assert turns <= 3
    found = {}
    for name in names:
        if (key := f"{name} {options}") not in ALONE:
            session = make_llm(**options).session(name, folder / name)
            ALONE[key] = [[e.token_id for e in session.send(turn(name, i), SHORT)] for i in range(3)]
            session.close()
        found[name] = ALONE[key][:turns]
    return found


ALONE: dict[str, list[list[int]]] = {}


def drain(queue: TurnQueue) -> Iterator[None]:
    while not queue.idle:
        queue.step()
        queue.check_integrity()
        yield


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", [*POLICIES][::-1])
def test_concurrent_turns_equal_turns_alone(policy: str, tmp_path: Path) -> None:
    """Four sessions of three turns run in batches of three, in a pool too small for all sessions."""
    options = POLICIES[policy]
    right = alone(tmp_path / "alone", NAMES, 3, **options)
    queue = make_llm(21, **options).turns(tmp_path / "q", max_num_seqs=3)
    queued = {(name, i): queue.add(name, turn(name, i), SHORT) for i in range(3) for name in NAMES}
    for _ in drain(queue):
        pass
    for (name, i), one in queued.items():
        assert one.token_ids == right[name][i] and one.finish_reason == "length", (name, i)
    stats = queue.stats
    assert stats.turns >= 12 and stats.computed_tokens == 0 and stats.host_tokens + stats.disk_tokens > 0
    queue.close()
    session = make_llm(**options).session("bob", tmp_path / "q")
    assert session.tokens[-12:] == right["bob"][2]
    session.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", POLICIES.values(), ids=POLICIES)
def test_preempted_turns_restart_with_the_same_answers(options: dict[str, Any], tmp_path: Path) -> None:
    """Three turns together exceed the pool. The preempted turn restarts without changed or repeated tokens."""
    names, lengths = NAMES[:3], [SHORT, SamplingParams(max_tokens=40, temperature=0)]
    right = {}
    for name in names:
        session = make_llm(**options).session(name, tmp_path / name)
        right[name] = [[e.token_id for e in session.send(turn(name, i), lengths[i])] for i in range(2)]
        session.close()
    queue = make_llm(11, **options).turns(tmp_path / "q", max_num_seqs=3)
    queued = {(name, i): queue.add(name, turn(name, i), lengths[i]) for i in range(2) for name in names}
    seen: dict[int, list[int]] = {}
    while not queue.idle:
        for event in queue.step():
            seen.setdefault(event.request_id, []).append(event.token_id)
        queue.check_integrity()
    assert queue._engine.scheduler.preemptions > 0
    for (name, i), one in queued.items():
        assert one.token_ids == right[name][i] == seen[one.number], (name, i)
    queue.close()


@pytest.mark.parametrize("policy", ["lookahead", "lru", "fifo"])
def test_look_ahead_prefetches_and_evicts_the_last_turn(policy: str, tmp_path: Path) -> None:
    """Turns are round-robin, with host memory for two or three of four sessions.

    LRU and FIFO always evict the session of the next turn, look-ahead that of the last one. Look-ahead also prefetches
    evicted sessions before their turns.
    """
    llm = make_llm(9)
    queue = llm.turns(tmp_path, max_num_seqs=1, policy=policy)
    starts = []

    def wait_for_reading(session: Session) -> None:
        """Wait until the prefetch is complete, as if computation took longer than loading."""
        loader = session.kv.loader
        if loader is not None and loader._ahead == queue.store.context.storage.layers:
            loader._thread.join(10)

    real = Turn.start

    def start(self: Turn, runner: Any) -> Any:
        loader = self.kv.loader
        starts.append((self.kv.history.name, self.kv.sequence is not None, loader is None or loader.finished))
        return real(self, runner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Turn, "start", start)
        for i in range(3):
            for name in NAMES:
                queue.add(name, turn(name, i)[:64], SHORT)
        for _ in drain(queue):
            for session in queue._opened.values():
                wait_for_reading(session)
    stats, later, last = queue.stats, starts[len(NAMES) :], starts[-len(NAMES) :]
    if policy == "lookahead":
        assert all(there and arrived for _, there, arrived in later), later
        assert stats.disk_tokens == 0 and stats.fetched > 0 and stats.fetched_tokens > 0
    else:
        assert not any(there for _, there, _ in last) and stats.fetched == 0 and stats.disk_tokens > 0
    assert stats.evicted > 0 and stats.computed_tokens == 0
    queue.close()


def test_look_ahead_windows_equal_the_paper(tmp_path: Path) -> None:
    """L_pw = C_free / S_kv and L_ew = (C_mem + C_disk) / S_kv.

    C_mem is the size of the pool, C_disk the limit of the store, and S_kv the mean size of a session.
    """
    llm = make_llm(40)
    queue = llm.turns(tmp_path, limit=80 * BLOCK_BYTES)
    pool, sessions = llm.runner.pool, [queue.store.session(name) for name in NAMES]
    for session, blocks in zip(sessions, (2, 4, 6, 8), strict=True):
        session.history.tokens = [1] * 64 * blocks
    rows = [session.kv for session in sessions]
    capacity = pool.block_count
    assert queue.store.host.windows(rows) == (capacity // 5, (capacity + 80) // 5)
    table = pool.new_block_table(64 * (capacity - 12))
    assert queue.store.host.windows(rows)[0] == 12 // 5
    pool.release(table)
    for session in sessions:
        session.history.tokens = []
    queue.close()
    endless = llm.turns(tmp_path / "endless")
    assert endless.store.host.windows(rows)[1] == 4, "without a limit the whole queue is spared"
    endless.close()


def test_a_part_of_host_memory_stays_free(tmp_path: Path) -> None:
    """Parked sessions are evicted early, so that the fraction `free_host` of the pool is free before a turn."""
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
    right = alone(tmp_path / "alone", ("ada",), 2)["ada"]
    assert [e.token_id for e in session.send(turn("ada", 1), SHORT)] == right[1]
    session.close()


def test_idle_sessions_are_evicted_for_a_running_one(tmp_path: Path) -> None:
    """The turn runs without a queue."""
    llm = make_llm(10)
    sessions = [llm.session(name, tmp_path) for name in NAMES]
    right = alone(tmp_path / "alone", NAMES, 2)
    for i in range(2):
        for name, session in zip(NAMES, sessions, strict=True):
            assert [e.token_id for e in session.send(turn(name, i), SHORT)] == right[name][i]
            session.check_integrity()
    assert sessions[0].host.stats.evicted > 0
    for session in sessions:
        session.close()


@pytest.mark.parametrize("found", ["before the turn", "meanwhile"])
def test_damaged_blocks_restart_the_turn(found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = alone(tmp_path / "alone", NAMES[:2], 2)
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
    if found == "before the turn":
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
    assert {name: one.token_ids for name, one in queued.items()} == {name: right[name][1] for name in queued}
    assert queue.stats.computed_tokens > 0
    queue.close()


def test_a_turn_that_can_never_fit_leaves_the_queue(tmp_path: Path) -> None:
    queue = make_llm(10).turns(tmp_path)
    queue.add("ada", tiny_prompt(2000, seed=1), SHORT)
    other = queue.add("bob", turn("bob", 0), SHORT)
    again = queue.add("ada", turn("ada", 0), SHORT)
    with pytest.raises(PoolFullError):
        list(queue.run())
    list(queue.run())
    right = alone(tmp_path / "alone", NAMES[:2], 1)
    assert other.token_ids == right["bob"][0] and again.token_ids == right["ada"][0]
    queue.close()


def test_an_unexpected_tokenizer_error_ends_all_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_waiting_turn_keeps_its_kv_and_a_failed_one_frees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = alone(tmp_path / "alone", NAMES[:2], 2)
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
    assert refused and {name: one.token_ids for name, one in queued.items()} == {n: right[n][1] for n in queued}
    assert queue.stats.disk_tokens == 0, "the KV stayed in host memory"
    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "adopt", lambda *args, **options: (_ for _ in ()).throw(PoolFullError("never")))
        queue.store.session("ada").kv.evict()
        queue.store.host.unpark(queue.store.session("ada").kv)
        lost = queue.add("ada", turn("ada", 2), SHORT)
        with pytest.raises(PoolFullError, match="never"):
            list(queue.run())
    session = queue.store.session("ada")
    assert lost.finish_reason == "abort" and not session.busy and queue.idle
    session.check_integrity()
    again = queue.add("ada", turn("ada", 2), SHORT)
    list(queue.run())
    assert len(again.token_ids) == 12
    queue.close()


@pytest.mark.parametrize("then", ["waits", "is cancelled"])
def test_a_dropped_turn_frees_the_cached_prefix(then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a turn is dropped before its first layer, its session must free the cached KV of the prompt."""
    llm, prompt = make_llm(), turn("ada", 0)
    llm.generate([prompt], SHORT)
    queue = llm.turns(tmp_path / "q")
    kv, dropped = queue.store.session("ada").kv, []
    real = Turn.start

    def start(self: Turn, runner: Any) -> Any:
        prefill = real(self, runner)
        if not dropped:
            assert kv.sequence is not None and kv.sequence.position == 64
            self.drop(runner) if then == "waits" else self.finish(runner, "abort")
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
    assert again.token_ids == alone(tmp_path / "alone", ("ada",), 1)["ada"][0]
    llm.runner.pool.check_integrity()
    queue.close()


def test_the_disk_keeps_what_waiting_turns_need(tmp_path: Path) -> None:
    """Turns are round-robin, with a disk for 2.5 of four sessions and host memory for 1.5.

    LRU always evicts the session of the next turn, and look-ahead recomputes fewer tokens. Answers are equal.
    """
    answers, again = {}, {}
    for policy in ("lookahead", "lru"):
        queue = make_llm(7).turns(tmp_path / policy, max_num_seqs=1, policy=policy, limit=9 * (BLOCK_BYTES + 4096))
        queued = [queue.add(name, turn(name, i)[:64], SHORT) for i in range(3) for name in NAMES]
        for _ in drain(queue):
            assert queue.store.context.storage.bytes_used <= 9 * (BLOCK_BYTES + 4096)
        answers[policy] = [one.token_ids for one in queued]
        again[policy] = queue.stats.computed_tokens
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # some session is not saved completely
            queue.close()
    assert answers["lookahead"] == answers["lru"]
    assert again["lookahead"] < again["lru"], again


def test_interrupted_turns_keep_their_tokens(tmp_path: Path) -> None:
    """A decode step is interrupted between two layers. Resident KV and policy state are rebuilt from the pool."""
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
        straight = make_llm(**options).session("ada", tmp_path / f"{options} straight")
        list(straight.send(turn("ada", 0), SHORT))
        got = len(kept) - len(straight.tokens) - len(turn("ada", 1))
        assert 0 < got < 12
        list(straight.send(turn("ada", 1), SamplingParams(max_tokens=got, temperature=0)))
        assert straight.tokens == kept
        assert [e.token_id for e in straight.send(turn("ada", 2), SHORT)] == answer
        straight.close()


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


def test_look_ahead_without_waiting_turns_equals_lru(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: dict[str, list[str]] = {"lookahead": [], "lru": []}
    real = HostTier._evict

    def evict(self: HostTier, kv: SessionKV) -> None:
        gone[self._options.policy].append(kv.history.name)
        real(self, kv)

    monkeypatch.setattr(HostTier, "_evict", evict)
    for policy in gone:
        llm = make_llm(7)
        sessions = {name: llm.session(name, tmp_path / policy, policy=policy, free_host=0) for name in NAMES}
        for name in ("ada", "bob", "cyd", "ada", "dan", "bob", "cyd"):
            list(sessions[name].send(turn(name, 0)[:64], SHORT))
        for session in sessions.values():
            session.close()
    assert gone["lookahead"] == gone["lru"] and len(set(gone["lru"])) >= 3
