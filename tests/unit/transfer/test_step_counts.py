"""Test that a decode step does not cost more than the table in `CONTRIBUTING.md` states."""

from __future__ import annotations

import os
from dataclasses import astuple

import pytest
from support.step_counts import CASES, PAGE, Case, count_step, documented_counts

ALL = os.environ.get("OFFLOAD_RT_SCHEDULES") == "all"
DAILY = ("default", "working set", "full attention, KV on the device")


@pytest.mark.parametrize("case", [case for case in CASES if ALL or case.name in DAILY], ids=str)
def test_step_costs_at_most_the_documented_counts(case: Case) -> None:
    page, found = documented_counts()[case.name], count_step(case)
    assert found.replayed is page.replayed
    assert all(now <= stated for now, stated in zip(astuple(found), astuple(page), strict=True)), (found, page)


def test_every_case_is_documented() -> None:
    assert list(documented_counts()) == [case.name for case in CASES], PAGE
