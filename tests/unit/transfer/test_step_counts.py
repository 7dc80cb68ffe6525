"""Test that a decode step costs no more than `docs/pages/gpu.md` states."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from support.step_counts import CASES, PAGE, Case, count_step, on_page


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_costs_no_more_than_on_the_page(case: Case) -> None:
    """The step replays a graph if the page says so. If a count falls, `step_counts.py` writes the page again."""
    page, found = on_page()[case.name], count_step(case)
    assert found.replayed is page.replayed
    assert all(now <= stated for now, stated in zip(astuple(found), astuple(page), strict=True)), (found, page)


def test_every_case_is_on_the_page() -> None:
    assert list(on_page()) == [case.name for case in CASES], PAGE
