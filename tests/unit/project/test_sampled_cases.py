"""Test the choice of cases that `make test` runs of sampled tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.sampling import ALL_CASES, cover, examples, split, values

CASES = [{"name": name, "dtype": dtype, "size": size} for name in "abc" for dtype in ("f4", "f8") for size in (1, 2)]


@pytest.mark.parametrize(("pairs", "most"), [(False, 3), (True, 7)])
def test_sample_has_every_value_or_pair_of_values(pairs: bool, most: int) -> None:
    wanted = [values(case, pairs) for case in CASES]
    chosen = cover(wanted)
    assert set().union(*(wanted[i] for i in chosen)) == set().union(*wanted)
    assert chosen == sorted(set(chosen)) == cover(wanted) and len(chosen) <= most


class Item:
    def __init__(self, at: int, parameters: dict[str, Any], *markers: pytest.MarkDecorator) -> None:
        self.nodeid, self.callspec = f"test.py::test[{at}]", SimpleNamespace(params=parameters)
        self.markers = {marker.name: marker for marker in markers}

    def get_closest_marker(self, name: str) -> pytest.MarkDecorator | None:
        return self.markers.get(name)


@pytest.mark.parametrize(
    ("marker", "kept"),
    [
        (pytest.mark.sampled(5), [0, 5, 10]),
        (pytest.mark.sampled, [0, 7, 8]),
        (pytest.mark.sampled(features=lambda name, **others: {name > "a"}), [0, 4]),
        (pytest.mark.slow, list(range(12))),
    ],
)
def test_marker_chooses_the_cases(marker: pytest.MarkDecorator, kept: list[int]) -> None:
    items: list[Any] = [Item(i, case, marker) for i, case in enumerate(CASES)]
    run, left = split(items)
    assert run == [items[i] for i in kept] and sorted(items.index(item) for item in run + left) == list(range(12))


def test_all_cases_for_a_gpu_are_kept_and_do_not_replace_others() -> None:
    items: list[Any] = [
        Item(i, {"device": device}, pytest.mark.sampled, *([pytest.mark.gpu] if device == "cuda" else []))
        for i, device in enumerate(["cuda", "cpu", "cpu", "cuda"])
    ]
    assert split(items)[0] == [items[0], items[1], items[3]]


def test_property_tests_run_a_third_of_their_examples() -> None:
    assert [examples(count) for count in (1, 30, 100)] == ([1, 30, 100] if ALL_CASES else [1, 10, 34])
