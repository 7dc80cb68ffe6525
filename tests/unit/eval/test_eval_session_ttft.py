"""Test the measured time to first token of resumed sessions: each run loads KV from its tier and computes the turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import tiny_model

from offload_rt import LLM
from offload_rt.engine.runner import Runner
from offload_rt.eval.speed import session_ttft
from offload_rt.sessions.host_tier import TierStats

HISTORY = 150


def test_repetitions_compute_only_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    counted: list[tuple[int, int]] = []
    begin, count, model = Runner.begin_prefill, TierStats.count, tiny_model("llama")

    def begin_prefill(self: Runner, sequence: Any, stop: int, **options: Any) -> Any:
        computed.append(stop - sequence.position)
        return begin(self, sequence, stop, **options)

    def count_tokens(self: TierStats, before: int, known: int, loaded: int) -> None:
        counted.append((known - loaded, loaded))
        count(self, before, known, loaded)

    monkeypatch.setattr(session_ttft, "VOCABULARY", 190)
    monkeypatch.setattr(Runner, "begin_prefill", begin_prefill)
    monkeypatch.setattr(TierStats, "count", count_tokens)
    rows = session_ttft.measure(lambda: LLM(model, policy="full", host_memory="16MiB"), HISTORY, 2, tmp_path)
    assert [row["source"] for row in rows] == ["recomputed", "host", "disk warm", "disk cold"]
    assert all(row["seconds"] > 0 and len(row["samples"]) == 2 for row in rows[1:])
    turn = session_ttft.TURN
    assert computed.count(HISTORY + turn) == 1, "recomputed: history and turn"
    assert computed.count(turn + 1) == 6, "two repetitions of three sources: the turn, and the last token before it"
    assert computed.count(turn) == 5, "a warm-up in each fresh runtime"
    assert [(host > 0, disk) for host, disk in counted[1:]] == [
        (True, HISTORY + 1 - 128), (False, HISTORY + 1), (False, HISTORY + 1)
    ] * 2, "whole blocks from host memory, or everything from disk"  # fmt: skip
