"""Test look-ahead in queues of turns: prefetched and evicted sessions."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from support.turn_queues import BLOCK_BYTES, NAMES, SHORT, drain, make_llm, turn

from offload_rt.sessions.host_tier import HostTier
from offload_rt.sessions.session import Session
from offload_rt.sessions.session_kv import SessionKV
from offload_rt.sessions.turn import Turn

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["lookahead", "lru", "fifo"])
def test_look_ahead_prefetches_turns_and_evicts_the_last_one(policy: str, tmp_path: Path) -> None:
    """With round-robin turns, LRU and FIFO evict the session whose turn is next.

    Look-ahead evicts the session whose turn is last.
    """
    llm = make_llm(9)
    queue = llm.turns(tmp_path, max_num_seqs=1, policy=policy)
    starts = []

    def wait_for_prefetch(session: Session) -> None:
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
                wait_for_prefetch(session)
    stats, later, last = queue.stats, starts[len(NAMES) :], starts[-len(NAMES) :]
    if policy == "lookahead":
        assert all(in_memory and loaded for _, in_memory, loaded in later), later
        assert stats.disk_tokens == 0 and stats.fetched > 0 and stats.fetched_tokens > 0
    else:
        assert not any(in_memory for _, in_memory, _ in last) and stats.fetched == 0 and stats.disk_tokens > 0
    assert stats.evicted > 0 and stats.computed_tokens == 0
    queue.close()


def test_look_ahead_windows_equal_the_paper(tmp_path: Path) -> None:
    """L_pw = C_free / S_kv and L_ew = (C_mem + C_disk) / S_kv.

    C_mem is the size of the pool, C_disk is the limit of the store, and S_kv is the mean size of a session.
    """
    llm = make_llm(40)
    queue = llm.turns(tmp_path, limit=80 * BLOCK_BYTES)
    pool, sessions = llm.runner.pool, [queue.store.session(name) for name in NAMES]
    for session, blocks in zip(sessions, (2, 4, 6, 8), strict=True):
        session.history.tokens = [1] * 64 * blocks
    session_kv = [session.kv for session in sessions]
    capacity = pool.block_count
    assert queue.store.host.windows(session_kv) == (capacity // 5, (capacity + 80) // 5)
    table = pool.new_block_table(64 * (capacity - 12))
    assert queue.store.host.windows(session_kv)[0] == 12 // 5
    pool.release(table)
    for session in sessions:
        session.history.tokens = []
    queue.close()
    unlimited = llm.turns(tmp_path / "endless")
    assert unlimited.store.host.windows(session_kv)[1] == 4, "without a limit, the eviction window is the whole queue"
    unlimited.close()


def test_look_ahead_recomputes_fewer_tokens_than_lru_on_a_small_disk(tmp_path: Path) -> None:
    """Turns are round-robin, so LRU always evicts the session whose turn is next."""
    answers, computed = {}, {}
    for policy in ("lookahead", "lru"):
        queue = make_llm(7).turns(tmp_path / policy, max_num_seqs=1, policy=policy, limit=9 * (BLOCK_BYTES + 4096))
        queued = [queue.add(name, turn(name, i)[:64], SHORT) for i in range(3) for name in NAMES]
        for _ in drain(queue):
            assert queue.store.context.storage.bytes_used <= 9 * (BLOCK_BYTES + 4096)
        answers[policy] = [queued_turn.token_ids for queued_turn in queued]
        computed[policy] = queue.stats.computed_tokens
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # some session is not saved completely
            queue.close()
    assert answers["lookahead"] == answers["lru"]
    assert computed["lookahead"] < computed["lru"], computed


def test_look_ahead_without_waiting_turns_equals_lru(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evicted: dict[str, list[str]] = {"lookahead": [], "lru": []}
    real = HostTier._evict

    def evict(self: HostTier, kv: SessionKV) -> None:
        evicted[self._options.policy].append(kv.history.name)
        real(self, kv)

    monkeypatch.setattr(HostTier, "_evict", evict)
    for policy in evicted:
        llm = make_llm(7)
        sessions = {name: llm.session(name, tmp_path / policy, policy=policy, free_host=0) for name in NAMES}
        for name in ("ada", "bob", "cyd", "ada", "dan", "bob", "cyd"):
            list(sessions[name].send(turn(name, 0)[:64], SHORT))
        for session in sessions.values():
            session.close()
    assert evicted["lookahead"] == evicted["lru"] and len(set(evicted["lru"])) >= 3
