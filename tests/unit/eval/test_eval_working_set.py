"""Test hit rates of working sets that are computed from recorded selections."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload_rt.errors import ConfigError
from offload_rt.eval.core.model_under_test import Evaluation, ModelUnderTest
from offload_rt.eval.core.variants import Variant
from offload_rt.eval.quality.perplexity import PerplexityConfig, cut_windows
from offload_rt.eval.quality.working_set import measure, run_working_set

BOOK = Path(__file__).parents[3] / "offload_rt" / "data" / "black_arrow.txt"
TEXT = BOOK.read_text(encoding="utf-8")[:40_000]
CONFIG = PerplexityConfig(384, 1, 372)
OPTIONS = {"recent": 16, "budget": 0.1, "dense_layers": (0,)}


def test_hit_rate_is_that_of_the_runtime() -> None:
    tested = ModelUnderTest("reference")
    text, capacities = cut_windows(tested, TEXT, CONFIG)[0].text, [20, 60]
    replayed = measure(tested, Variant("infinigen", OPTIONS), text, capacities)
    for capacity, hits in zip(capacities, replayed["hits"], strict=True):
        llm = tested.llm(Variant("infinigen", OPTIONS, {"working_set": capacity}))
        prompt, target = text.tokens[: text.scored_from], text.tokens[text.scored_from :]
        [score] = llm.score([list(prompt)], [list(target)], text.decode_from)
        assert 0 < hits / replayed["entries"] == pytest.approx(score.stats.working_set_hit_rate)


def test_report_has_a_row_for_each_size(tmp_path: Path) -> None:
    job = Evaluation(ModelUnderTest("reference"), TEXT, "book", tmp_path)
    report = run_working_set(job, [Variant("infinigen", OPTIONS)], CONFIG, (0.02, 1.0))
    small, all_tokens = report.rows
    assert small["hit_rate"] < all_tokens["hit_rate"] < 1
    assert all_tokens["transferred"] == pytest.approx(all_tokens["selected"] * (1 - all_tokens["hit_rate"]))
    assert run_working_set(job, [Variant("infinigen", OPTIONS)], CONFIG, (0.02, 1.0)).rows == report.rows
    with pytest.raises(ConfigError, match="full selects no tokens of a text this short: raise --context"):
        run_working_set(job, [Variant("full")], CONFIG, (0.02,))
