"""Test perplexity: windows, bootstrap intervals, reports, and resumed measurements."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_models import tiny_checkpoint

from offload_rt.errors import ConfigError, InputError
from offload_rt.eval.core.model_under_test import Evaluation, ModelUnderTest, encode_text
from offload_rt.eval.core.report import Column, Report, RowStore
from offload_rt.eval.core.stats import Interval, paired_bootstrap, perplexity_change, ratio_error, share_error
from offload_rt.eval.core.variants import Scored, Text, Variant, grid
from offload_rt.eval.quality.perplexity import CHUNK, PerplexityConfig, _chunks, costs, cut_windows, run_perplexity
from offload_rt.models.loading import load_model
from offload_rt.policies.options import InfiniGenOptions

BOOK = Path(__file__).parents[3] / "offload_rt" / "data" / "black_arrow.txt"


def test_bootstrap_interval_covers_and_pairs() -> None:
    rng = np.random.default_rng(3)
    base = rng.normal(300, 40, size=60)
    weights = np.full(60, 100.0)
    worse = base + rng.normal(2, 1, size=60)
    interval = paired_bootstrap(worse, base, weights, change=perplexity_change)
    true = math.expm1((worse - base).mean() / 100)
    assert interval.value == pytest.approx(true, rel=1e-12)
    assert interval.low < true < interval.high
    assert interval.low > 0  # unpaired windows differ twenty times more than the policies do
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * 0.01 / math.sqrt(60), rel=0.25)
    again = paired_bootstrap(worse, base, weights, change=perplexity_change)
    assert again == interval
    assert paired_bootstrap(base, base, weights) == Interval(0.0, 0.0, 0.0)
    alone = paired_bootstrap([3.0], [1.0], [2.0])
    assert alone == Interval(1.0, 1.0, 1.0)


def test_decoding_blocks_are_means_of_whole_blocks() -> None:
    assert _chunks([1.0, 3.0] * (CHUNK // 2) + [5.0] * CHUNK + [9.0] * 10) == [2.0, 5.0]
    assert _chunks([2.0, 4.0]) == [3.0]


def test_costs_are_means_over_texts() -> None:
    dense = Scored([1.0], [True], 1.0, 0.9, 0.0, 0.0, None, None)
    sparse = [Scored([1.0], [True], 0.2, 0.1, 0.15, 0.05, m, 2 * m) for m in (0.1, 0.2)]
    found = costs([dense, *sparse])
    assert (found["missed"], found["missed_worst"]) == pytest.approx((0.15, 0.3))
    assert (found["attended"], found["fetched"]) == pytest.approx((1.4 / 3, 1.1 / 3))
    assert (found["sparse_attended"], found["sparse_fetched"]) == pytest.approx((0.1, 0.1 / 3))
    assert costs([dense])["missed"] is None


def test_standard_errors() -> None:
    values = np.random.default_rng(0).normal(5, 2, size=400)
    assert ratio_error(values, np.ones(400)) == pytest.approx(values.std(ddof=1) / 20, rel=1e-9)
    assert ratio_error([3.0], [1.0]) == 0.0
    assert share_error(50, 100) == pytest.approx(0.05)
    assert 0 < share_error(100, 100) < 0.01
    assert share_error(0, 0) == 0.0


def test_grid_begins_with_full() -> None:
    made = grid(["full", "infinigen", "h2o"], [0.05, 0.1], {"recent": 8})
    assert [v.label for v in made] == [
        "full",
        "infinigen recent=8 budget=0.05",
        "infinigen recent=8 budget=0.1",
        "h2o recent=8 budget=0.05",
        "h2o recent=8 budget=0.1",
    ]
    assert [v.label for v in grid(["infinigen"], [])] == ["full", "infinigen"]


def test_windows_are_equal_parts_with_their_bytes() -> None:
    tested = ModelUnderTest("reference")
    text = "“Naïve — café”, said he. " * 80
    config = PerplexityConfig(context=64, windows=3, decode_from=40, margin=0)
    windows = cut_windows(tested, text, config)
    ids, ends, lead = encode_text(tested, text)
    assert ends[-1] == len(text.encode())
    assert lead == ()
    assert windows[0].text == Text(tuple(ids[:64]), 40, 41)
    assert windows[-1].text.tokens == tuple(ids[-64:])
    assert windows[0].bytes == ends[63] - ends[40]
    assert windows[-1].bytes == ends[-1] - ends[len(ids) - 64 + 40]


def test_windows_omit_the_margins() -> None:
    tested, text = ModelUnderTest("reference"), "“Naïve — café”, said he. " * 80
    ids = encode_text(tested, text)[0]
    edge = int(0.1 * len(ids))
    windows = cut_windows(tested, text, PerplexityConfig(context=64, windows=3, decode_from=40, margin=0.1))
    assert windows[0].text.tokens == tuple(ids[edge : edge + 64])
    assert windows[-1].text.tokens == tuple(ids[len(ids) - edge - 64 : len(ids) - edge])
    whole = PerplexityConfig(context=len(ids) - 1, windows=3, decode_from=40, margin=0.1)
    assert cut_windows(tested, text, whole)[0].text.tokens == tuple(ids[:-1])


def test_text_too_short_is_refused() -> None:
    with pytest.raises(InputError, match="fewer than one window of 64"):
        cut_windows(ModelUnderTest("reference"), "short", PerplexityConfig(context=64, windows=1))


@pytest.mark.parametrize("wrong", [{"context": 1}, {"windows": 0}, {"context": 10, "decode_from": 9}, {"margin": 0.5}])
def test_wrong_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(reversed(wrong)))):
        PerplexityConfig(**wrong)


def test_report_is_complete_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=2)
    text = BOOK.read_text(encoding="utf-8")[:6_000]
    config = PerplexityConfig(context=128, windows=3, decode_from=96)
    variants = grid(["infinigen", "streaming"], [0.2], {"recent": 8, "dense_layers": [0]})
    monkeypatch.setattr("sys.argv", ["/bin/eval", "--text", str(BOOK), "--windows", "3"])
    report = run_perplexity(Evaluation(ModelUnderTest(model), text, "arrow", tmp_path), variants, config)
    record = json.loads((tmp_path / "perplexity.json").read_text())
    assert record["rows"] == json.loads(json.dumps(report.rows))
    assert record["about"]["fingerprint"] == load_model(model).fingerprint
    assert record["environment"]["versions"]["torch"] == torch.__version__
    assert record["environment"]["command"] == f"eval --text {BOOK.name} --windows 3"
    full, ours, streaming = record["rows"]
    assert full["sparse_attended"] == 0
    assert full["attended"] == 1
    assert ours["sparse_attended"] == pytest.approx(0.2, abs=0.01)
    assert (
        ours["against_full_perplexity_low"] <= ours["against_full_perplexity"] <= ours["against_full_perplexity_high"]
    )
    assert streaming["against_infinigen_perplexity"] == pytest.approx(
        (1 + streaming["against_full_perplexity"]) / (1 + ours["against_full_perplexity"]) - 1
    )
    with (tmp_path / "perplexity.csv").open() as file:
        assert [row["policy"] for row in csv.DictReader(file)] == ["full", "infinigen", "streaming"]
    assert "streaming recent=8 dense_layers=0 budget=0.2" in (tmp_path / "perplexity.md").read_text()
    assert (tmp_path / "perplexity_by_attended_share.png").read_bytes()[:4] == b"\x89PNG"

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(ModelUnderTest, "score", forbidden)
    again = run_perplexity(Evaluation(ModelUnderTest(model), text, "arrow", tmp_path), variants, config)
    assert again.rows == report.rows
    with pytest.raises(AssertionError, match="measured again"):
        run_perplexity(Evaluation(ModelUnderTest(model), text + "x", "arrow", tmp_path), variants, config)


def test_row_is_identified_by_its_option_values() -> None:
    """Rows that were measured with different default values must be measured again."""
    tested = ModelUnderTest("reference")
    plain, recent = (tested.key(Variant("infinigen", options)) for options in ({}, {"recent": 5}))
    named = tested.key(Variant("infinigen", {"recent": InfiniGenOptions().recent}))
    assert plain["provenance"] == named["provenance"] != recent["provenance"]
    assert tested.key(Variant("full"))["provenance"] == "exact"


def test_rows_are_complete_or_absent(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.put({"a": 1, "b": [1, 2]}, {"x": 0.5})
    assert store.get({"b": [1, 2], "a": 1}) == {"x": 0.5}
    assert store.get({"a": 1, "b": [1, 3]}) is None
    measured = RowStore(tmp_path / "timed").once({"c": 1}, lambda: {"y": 2})
    assert measured.pop("seconds") >= 0.0 and measured == {"y": 2}
    (path,) = (tmp_path / "rows").iterdir()
    path.write_text(path.read_text()[:20])
    assert store.get({"a": 1, "b": [1, 2]}) is None
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot use"):
        RowStore(tmp_path / "file")


def test_tables_show_missing_rows(tmp_path: Path) -> None:
    report = Report("t", "T", {"seed": 1}, (Column("a", "a", ".1%"), Column("b", "b")), [{"a": 0.5}, {"b": []}])
    assert "| 50.0% | – |\n| – | none |" in report.markdown()
    assert [path.name for path in report.write(tmp_path)] == ["t.json", "t.csv", "t.md"]
