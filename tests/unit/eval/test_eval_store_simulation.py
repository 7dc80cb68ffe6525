"""The store simulator: what can be computed by hand, and the order that policies must come in."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from offload_rt.errors import ConfigError, InputError
from offload_rt.eval.simulate.store import BLOCK, Outcome, Replay, StoreMachine, TraceRequest, read_trace, simulate
from offload_rt.eval.simulate.store_report import findings, write_report

TOKEN = 1000


def machine(host: int, disk: int = 0, **options: float) -> StoreMachine:
    """Sizes in blocks."""
    size = BLOCK * TOKEN
    return StoreMachine(host * size, disk * size, token_bytes=TOKEN, **options)  # type: ignore[arg-type]


def request(arrival: float, *blocks: int, tokens: int | None = None) -> TraceRequest:
    return TraceRequest(arrival, tokens or len(blocks) * BLOCK, 10, blocks)


def run(requests: list[TraceRequest], where: StoreMachine, policy: str, speed: float = 1.0) -> Outcome:
    return Replay(requests, where, policy, speed).run()


def workload(count: int = 300, *, seed: int = 0, gap: float = 0.05) -> list[TraceRequest]:
    """Conversations that go on: each request is an earlier one with one to three more blocks, or a new one."""
    rng, fresh, sessions, found = random.Random(seed), iter(range(10**6)), [], []
    for i in range(count):
        if not sessions or rng.random() < 0.2:
            sessions.append([next(fresh)])
        session = rng.choice(sessions[-40:])
        session += [next(fresh) for _ in range(rng.randint(1, 3))]
        found.append(request(i * gap, *session))
    return found


@pytest.mark.parametrize("policy", ["lookahead", "lru", "fifo", "belady"])
def test_a_second_turn_reuses_all_but_what_is_new(policy: str) -> None:
    outcome = run([request(0, 1, 2), request(100, 1, 2, 3)], machine(10), policy)
    assert outcome.tokens_saved == 2 * BLOCK and outcome.host_hit == pytest.approx(2 / 5) and outcome.disk_hit == 0
    assert outcome.prefill_seconds == pytest.approx(3 * BLOCK / 20_000)
    assert outcome.stall_seconds == 0 and outcome.mean_wait == 0
    again = run([request(0, 1, 2), request(100, 1, 2)], machine(10), policy)
    assert again.tokens_saved == 2 * BLOCK - 1, "the last token is always computed"


def test_only_leading_blocks_count() -> None:
    outcome = run([request(0, 1, 2, 3), request(9, 8, 2, 3)], machine(10), "lru")
    assert outcome.tokens_saved == 0


def test_stalls_are_what_reading_takes_longer_than_computing() -> None:
    """Four blocks on a slow disk, one new: computing the new one hides a part of the reading."""
    first, other, again = request(0, 1, 2, 3, 4), request(50, *range(10, 15)), request(99, 1, 2, 3, 4, 5)
    slow = machine(5, 10, disk_bandwidth=4 * BLOCK * TOKEN, prefill_rate=BLOCK / 2)  # a quarter second, 2 seconds
    outcome = run([first, other, again], slow, "lru")
    assert outcome.disk_hit == pytest.approx(4 / 14) and outcome.stall_seconds == 0
    reading = machine(5, 10, disk_bandwidth=2 * BLOCK * TOKEN, prefill_rate=BLOCK)  # half a second, one second
    assert run([first, other, again], reading, "lru").stall_seconds == pytest.approx(4 / 2 - 1)


def test_reading_stops_where_computing_is_quicker() -> None:
    never = machine(5, 10, disk_bandwidth=1, prefill_rate=BLOCK)
    outcome = run([request(0, 1, 2), request(50, *range(10, 15)), request(99, 1, 2, 3)], never, "lru")
    assert outcome.tokens_saved == 0 and outcome.stall_seconds == 0


def test_look_ahead_spares_what_waits_and_fetches_it() -> None:
    """Host memory for four blocks: while request 1 runs, request 2 waits for blocks that LRU would have dropped."""
    trace = [request(0, 1, 2), request(0, 3, 4, 5, 7), request(0, 1, 2, 6)]
    assert run(trace, machine(4), "lru").tokens_saved == 0
    assert run(trace, machine(4), "lookahead").tokens_saved == 2 * BLOCK
    assert run(trace, machine(4), "belady").tokens_saved == 2 * BLOCK
    tiers = machine(4, 8, free_share=0.9)
    assert run(trace, tiers, "lru").disk_hit > 0
    ahead = run(trace, tiers, "lookahead")
    assert ahead.disk_hit == 0 and ahead.host_hit == pytest.approx(2 / 9)


@pytest.mark.parametrize("seed", range(3))
def test_policies_come_in_their_order(seed: int) -> None:
    trace = workload(seed=seed)
    for where in (machine(40), machine(120)):
        hits = {policy: run(trace, where, policy).host_hit for policy in ("lookahead", "lru", "fifo", "belady")}
        assert hits["belady"] >= max(hits.values()) and hits["lookahead"] >= hits["lru"]


@pytest.mark.parametrize("disk", [0, 200])
def test_without_a_queue_look_ahead_is_lru(disk: int) -> None:
    trace = workload(gap=1000)
    ahead, lru = (run(trace, machine(60, disk), policy) for policy in ("lookahead", "lru"))
    assert (ahead.host_hit, ahead.disk_hit, ahead.stall_seconds) == (lru.host_hit, lru.disk_hit, lru.stall_seconds)
    assert ahead.longest_queue == 0 and ahead.prefetched_bytes == 0


@pytest.mark.parametrize("policy", ["lookahead", "lru", "fifo", "belady"])
def test_no_tier_ever_holds_more_than_its_size_nor_a_block_twice(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(workload(), machine(30, 90), policy, 3.0)
    real = replay._use

    def checked(number: int, one: TraceRequest) -> None:
        real(number, one)
        assert len(replay._host.blocks) <= 30 and len(replay._disk.blocks) <= 90
        assert not replay._host.blocks & replay._disk.blocks

    monkeypatch.setattr(replay, "_use", checked)
    assert replay.run().hit > 0


def test_windows_are_the_papers() -> None:
    """L_pw = C_free / S_kv, L_ew = (C_mem + C_disk) / S_kv, S_kv the mean KV of a request."""
    replay = Replay([request(0, 1, 2), request(0, 1, 2, 3, 4)], machine(60, 90, free_share=0.1), "lookahead", 1.0)
    assert (replay.prefetch_window, replay.eviction_window) == (60 * 0.1 / 3, (60 + 90) / 3)


def test_costs_follow_the_prices() -> None:
    where = machine(10, 100, gpu_price=7.0, host_price=2.0, disk_price=3.0)
    outcome = run([request(0, 1), request(3600, 2)], where, "lru")
    assert outcome.dollars_gpu == pytest.approx(7 * 2 * BLOCK / 20_000 / 3600)
    hours = outcome.makespan / 3600
    assert outcome.dollars_storage == pytest.approx((where.host * 2 + where.disk * 3) / 1e9 * hours)


def test_traces_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    row = {"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    file.write_text(json.dumps(row) + "\n")
    assert read_trace(file) == [TraceRequest(1.5, 600, 5, (1, 2))]
    file.write_text("".join(json.dumps(row | {"timestamp": t}) + "\n" for t in (0, 0, 3000, 3000, 3000)))
    assert [one.arrival for one in read_trace(file)] == [0, 1.5, 3, 3, 3], "ticks are spread"
    for bad in ("", "[1]", "{}", "text", json.dumps(row | {"hash_ids": [1]})):
        file.write_text(bad)
        with pytest.raises(InputError):
            read_trace(file)
    with pytest.raises(InputError, match="cannot read"):
        read_trace(tmp_path / "none")
    with pytest.raises(ConfigError):
        machine(1, prefill_rate=0)
    with pytest.raises(ConfigError, match="speed"):
        run([request(0, 1)], machine(1), "lru", 0)


def test_report_says_where_gains_vanish(tmp_path: Path) -> None:
    rows = simulate(workload(), [machine(40), machine(40, 200)], speeds=(0.001, 20.0))
    notes = findings(rows)
    assert any("gains less than 1 %" in note and "x0.001" in note for note in notes)
    paths = write_report(rows, {"trace": "made up"}, tmp_path)
    assert {path.name for path in paths} == {
        "store.json", "store.csv", "store.md", "store_sizes.png", "store_load.png"
    }  # fmt: skip
    assert "look" in (tmp_path / "store.md").read_text().lower()
