"""Choose the cases that `make test` runs of tests marked `sampled`. `make stress PART=sampled` runs all cases.

* `sampled(5)` takes every fifth case.
* `sampled` takes few cases with every value of every parameter.
* `sampled(pairs=True)` takes few cases with every pair of values of two parameters.
* `sampled(features=f)` takes few cases with every element of the sets `f(parameter=value, ...)`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import combinations
from typing import Any

import pytest

ALL_CASES = "OFFLOAD_RT_CELLS" in os.environ
"""Whether to run all cases of sampled tests, and all examples of property tests (`make stress`)."""


def examples(count: int, stress: int | None = None) -> int:
    """Return the number of examples of a property test.

    It is a third of `count` in `make test`, and `stress` in `make stress`, or `count` if `stress` is None.
    """
    return (count if stress is None else stress) if ALL_CASES else -(-count // 3)


def split(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the test items to run and those to leave out."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = {item for cases in tests.values() for item in set(cases).difference(_sample(cases))}
    return [item for item in items if item not in left], [item for item in items if item in left]


def _sample(cases: list[Any]) -> list[pytest.Item]:
    marker = cases[0].get_closest_marker("sampled")
    if marker.args:
        return cases[:: marker.args[0]]
    everywhere = [case for case in cases if case.get_closest_marker("simulated") or not case.get_closest_marker("gpu")]
    chosen = [everywhere[i] for i in cover([_features(case, **marker.kwargs) for case in everywhere])]
    return chosen + [case for case in cases if case not in everywhere]  # `make gpu` runs all cases


def _features(
    case: Any, features: Callable[..., Iterable[Hashable]] | None = None, pairs: bool = False
) -> set[Hashable]:
    parameters = case.callspec.params
    return values(parameters, pairs) if features is None else set(features(**parameters))


def values(parameters: Mapping[str, Any], pairs: bool = False) -> set[Hashable]:
    """Return the value of each parameter, or each pair of values."""
    each = [(name, repr(value)) for name, value in parameters.items()]
    return set(combinations(each, 2)) if pairs and len(each) > 1 else set(each)


def cover(wanted: list[set[Hashable]]) -> list[int]:
    """Return the indices of a few sets whose union is that of all sets.

    Greedy: the next set adds the most elements, and of these sets, its elements were added the fewest times.
    """
    chosen: list[int] = []
    times = Counter[Hashable]()
    missing = set[Hashable]().union(*wanted)
    while missing:
        best = max(
            range(len(wanted)), key=lambda i: (len(wanted[i] & missing), -sum(times[each] for each in wanted[i]))
        )
        chosen.append(best)
        times.update(wanted[best])
        missing -= wanted[best]
    return sorted(chosen)
