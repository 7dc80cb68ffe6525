"""Needles: they stand where they are said to stand, no name was ever trained on, and policies that drop lose them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload_rt.errors import ConfigError, InputError
from offload_rt.eval.needles import KINDS, NAMES, Haystack
from offload_rt.eval.retrieval import RetrievalConfig, accuracies, against, make_passages, run_retrieval
from offload_rt.eval.subject import Subject, Variant

ROOT = Path(__file__).parents[1]
BOOK = (ROOT / "offload_rt" / "data" / "black_arrow.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject("reference")


@pytest.fixture(scope="module")
def haystack(subject: Subject) -> Haystack:
    return Haystack(subject, BOOK)


@pytest.mark.parametrize("kind", list(KINDS))
def test_needles_stand_where_they_are_said_to(subject: Subject, haystack: Haystack, kind: str) -> None:
    tokenizer: Any = subject.loaded.tokenizer
    for seed in range(10):
        passage = haystack.hide(np.random.default_rng(seed), kind, 512)
        text = passage.text
        assert len(text.tokens) == 512
        assert text.scored_from == text.decode_from + 1
        whole = tokenizer.decode(text.tokens)
        asked = tokenizer.decode(text.tokens[text.scored_from :])
        told = tokenizer.decode(text.tokens[: text.scored_from])
        assert whole == told + asked
        for sentence in asked.split(". ")[:-1]:
            assert f"{sentence.strip()}." in told  # asked in the words it was told in
        for question in passage.questions:
            first = question.answers[0]
            answer = tokenizer.decode([text.tokens[i] for i in question.answers[:1]])
            assert tokenizer.decode(text.tokens[:first]).endswith((" is", " in", " a", " comes"))
            assert first - question.distance >= 0
            started = tokenizer.decode(text.tokens[first - question.distance :][:60])
            assert any(started.startswith(f" {name}") or name in started[:40] for name in NAMES)
            assert answer.startswith(" ")


def test_names_are_nobody_s_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    reference_data = pytest.importorskip("reference_data")
    assert len(NAMES) == len(set(NAMES))
    assert not set(NAMES) & {*reference_data.names(True), *reference_data.names(False)}
    sys.modules.pop("reference_data")


def test_passages_of_a_length_do_not_depend_on_other_lengths(haystack: Haystack) -> None:
    one = make_passages(haystack, RetrievalConfig(lengths=(256,), passages=2), 256)
    both = make_passages(haystack, RetrievalConfig(lengths=(512, 256), passages=2), 256)
    assert one == both
    assert [p.kind for p in one] == [kind for kind in KINDS for _ in range(2)]


def test_what_does_not_fit_is_refused(subject: Subject, haystack: Haystack) -> None:
    with pytest.raises(InputError, match="does not fit into 64 tokens"):
        haystack.hide(np.random.default_rng(0), "chain", 64)
    with pytest.raises(InputError, match="no sentences"):
        Haystack(subject, "word " * 50)
    with pytest.raises(ConfigError, match="did you mean 'single'"):
        RetrievalConfig(kinds=("singel",))
    with pytest.raises(ConfigError, match="at least 64"):
        RetrievalConfig(lengths=(10,))


def test_accuracies_by_kind_and_distance() -> None:
    found = accuracies([("single", 50, True), ("single", 200, False), ("chain", 130, True), ("chain", 700, True)])
    assert (found["right"], found["asked"]) == (0.75, 4)
    assert (found["right single"], found["right chain"]) == (0.5, 1.0)
    assert (found["right at 128-255"], found["asked at 128-255"]) == (0.5, 2)
    assert (found["right at 512-1023"], found["asked at 0-127"]) == (1.0, 1)
    assert "right at 256-511" not in found
    row = {"samples": [["a", 1, False]] * 50 + [["a", 1, True]] * 50}
    base = {"samples": [["a", 1, True]] * 100}
    assert against(row, base)["against_full_shown"].startswith("-50.0 [-60.0, -4")


@pytest.mark.slow
def test_policies_that_drop_lose_what_full_finds(subject: Subject, tmp_path: Path) -> None:
    """4 sinks and 16 recent tokens see no needle; selecting 20 % finds about what full finds."""
    options = {"budget": 0.2, "recent": 16}
    variants = [Variant("full"), Variant("infinigen", options), Variant("streaming", options)]
    config = RetrievalConfig(lengths=(256,), passages=12, kinds=("single", "several queries"))
    report = run_retrieval(subject, BOOK, "arrow", variants, config, tmp_path)
    full, ours, streaming = report.rows
    assert full["asked"] == 12 + 48
    if full["right"] < 0.4:
        pytest.skip(f"the shipped checkpoint finds {full['right']:.0%} of these needles itself: nothing to compare")
    assert ours["right"] > full["right"] - 0.1
    assert streaming["right"] < full["right"] - 0.25
    assert streaming["against_full_interval"][1] < 0
    assert {p.name for p in tmp_path.iterdir()} >= {
        "retrieval.json",
        "retrieval.csv",
        "retrieval.md",
        "needles_found_by_kind.png",
        "needles_found_by_attended_share.png",
        "needles_found_by_attended_share.json",
    }
