"""Run one case of each part of the adversary tests. `make stress PART=adversary` runs each for `ADVERSARY_SECONDS`."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest
from adversary import run
from adversary.run import CASES_PER_SEED, PARTS, command, run_part

STRESS = "OFFLOAD_RT_STRESS" in os.environ
SECONDS = float(os.environ.get("ADVERSARY_SECONDS", "600"))
SEEDS = {"interleavings": 6}
"""Seeds of quick cases in which much happens: ten requests, of which one fails, and three preemptions. Other parts use
seed 0."""


@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("part", PARTS)
def test_random_cases_find_no_failure(part: str) -> None:
    first = int(time.time()) * CASES_PER_SEED
    seeds = range(first, first + CASES_PER_SEED) if STRESS else [SEEDS.get(part, 0)]
    done, failed = run_part(part, iter(seeds), SECONDS)
    commands = "\n".join(command(part, seed) for seed in failed)
    assert not failed, f"{len(failed)} of {done['cases']} cases failed:\n{commands}"
    assert done.total() > done["cases"] >= 1


def test_failing_cases_are_listed_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def case(seed: int) -> Counter[str]:
        assert seed != 7, "the case is wrong"
        return Counter(work=1)

    monkeypatch.setattr(run, "load", lambda part: case)
    monkeypatch.setattr(run, "FAILURES", tmp_path / "out" / "failures.txt")
    for _ in range(2):
        assert run_part("names", iter(range(6, 9)), 60)[1] == [7]
    listed = run.FAILURES.read_text()
    assert listed.count(f"{command('names', 7)}\n") == 2 and listed.count("AssertionError: the case is wrong") == 2
