"""Run the randomised adversary tests: one case of each part here, ADVERSARY_SECONDS of each in `make stress
PART=adversary`."""

from __future__ import annotations

import os
import time

import pytest
from adversary.run import CASES_PER_SEED, PARTS, run_part

STRESS = "OFFLOAD_RT_STRESS" in os.environ
SECONDS = float(os.environ.get("ADVERSARY_SECONDS", "600"))


@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("part", PARTS)
def test_adversary_finds_nothing(part: str) -> None:
    """Each run in `make stress` starts at another seed, which a failure prints."""
    first = int(time.time()) * CASES_PER_SEED if STRESS else 0
    seeds = range(first, first + (CASES_PER_SEED if STRESS else 1))
    done, failed = run_part(part, iter(seeds), SECONDS)
    commands = "\n".join(f"python tests/adversary/run.py {part} --case {seed}" for seed in failed)
    assert not failed, f"{len(failed)} of {done['cases']} cases failed:\n{commands}"
    assert done.total() > done["cases"] >= 1
