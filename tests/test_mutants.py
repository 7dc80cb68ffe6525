"""The list of mutants fits the code: `make mutants` runs them, which takes minutes; here nothing is run."""

from __future__ import annotations

import re

from mutants.run import ROOT, load

ROOMS = {"core", "kernels", "models", "pool", "skewing", "select", "transfer", "forward", "planning", "storage"}
MUTANTS = load()


def test_every_line_is_there_once() -> None:
    for mutant in MUTANTS:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert mutant.applied(text) != text, mutant.name


def test_every_named_test_exists() -> None:
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, function = test.partition("::")
            function = function.rpartition("::")[2].partition("[")[0]
            text = (ROOT / file).read_text(encoding="utf-8")
            assert not function or re.search(rf"def {function}\(", text), f"{mutant.name}: {test}"


def test_all_rooms_are_covered_by_at_least_forty() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    assert {mutant.room for mutant in MUTANTS} >= ROOMS | {"engine", "sessions", "eval"}
