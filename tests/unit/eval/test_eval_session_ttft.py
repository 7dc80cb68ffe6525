"""The resumption's measurement: what is timed is the turn, computed anew each time, and rows lie where it is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from offload_rt import LLM
from offload_rt.engine.runner import Runner
from offload_rt.eval.speed.session_ttft import TURN, TimedModel, buffers, measure, shape_model
from offload_rt.sessions.host_tier import TierStats

HISTORY = 150


@pytest.fixture
def timed() -> TimedModel:
    model = shape_model(layers=2, hidden=64, heads=4, kv_heads=2)
    return TimedModel("tiny", lambda: LLM(model, policy="full", host_memory="16MiB"), [HISTORY])


def test_every_repetition_computes_the_turn_and_nothing_else(
    timed: TimedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    counted: list[tuple[int, int]] = []
    real, count = Runner.begin_prefill, TierStats.count

    def begin(self: Runner, sequence: Any, stop: int, **options: Any) -> Any:
        computed.append(stop - sequence.position)
        return real(self, sequence, stop, **options)

    def told(self: TierStats, before: int, known: int, loaded: int) -> None:
        counted.append((known - loaded, loaded))
        count(self, before, known, loaded)

    monkeypatch.setattr(Runner, "begin_prefill", begin)
    monkeypatch.setattr(TierStats, "count", told)
    rows = measure(timed, 2, tmp_path)
    assert [row["source"] for row in rows] == ["recomputed", "host", "disk warm", "disk cold"]
    assert all(row["seconds"] > 0 and len(row["samples"]) == 2 for row in rows[1:])
    assert computed.count(HISTORY + TURN) == 1, "recomputed: history and turn"
    assert computed.count(TURN + 1) == 6, "two repetitions of three sources: the turn, and the last token before it"
    assert computed.count(TURN) == 5, "a warm-up in each fresh runtime"
    forks = counted[1:]
    assert [(host > 0, disk) for host, disk in forks] == [
        (True, HISTORY + 1 - 128), (False, HISTORY + 1), (False, HISTORY + 1)
    ] * 2, "whole chunks from host memory, or everything from disk"  # fmt: skip


@pytest.mark.skipif("OFFLOAD_RT_STRESS" not in os.environ, reason="a slow disk: make stress PART=composition")
def test_a_throttled_reader_stalls_without_a_buffer_and_not_with_one(
    timed: TimedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload_rt.eval.speed.session_ttft.EARLY", 0.2)
    rows = {row["ahead"]: row for row in buffers(timed, HISTORY, tmp_path, [1e6])}
    reading = 2 * 2 * 2 * 16 * 4 * HISTORY / 1e6
    assert rows["0"]["stall"] > 0.9 * reading and rows["2"]["stall"] < 0.5 * reading
