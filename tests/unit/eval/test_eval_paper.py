"""Test `make paper` with small settings: it writes every figure and its data, and a second run measures nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.tiny_models import tiny_checkpoint

from offload_rt.cli import main
from offload_rt.errors import OffloadError
from offload_rt.eval.core.model_under_test import Evaluation, ModelUnderTest
from offload_rt.eval.suites.paper import CONTEXTS, POLICIES, STEPS, Paper, PaperJob, PaperSize, run_jobs
from offload_rt.models.loading import load_model

BOOK = Path(__file__).parents[3] / "offload_rt" / "data" / "black_arrow.txt"
TINY = PaperSize(320, 1, (0.2,), 1, 1, (256,), 1, 1, 3)
MADE = [step for step in STEPS if step != "tasks"]

PICTURES = {
    "needles_and_cost_by_alpha_and_ratio.png",
    "needles_found_by_attended_share.png",
    "needles_found_by_kind.png",
    "needles_found_with_and_without_skewing.png",
    "perplexity_along_the_text.png",
    "perplexity_by_attended_share.png",
    "perplexity_by_context_with_64_tokens.png",
}
TABLES = {
    "analysis.md",
    "perplexity.md",
    "perplexity_by_context.md",
    "perplexity_with_a_bounded_pool.md",
    "retrieval.md",
}


@pytest.mark.skipif("OFFLOAD_RT_STRESS" not in os.environ, reason="all of make paper: make stress PART=composition")
@pytest.mark.timeout(900)
def test_every_table_and_figure_is_made_once(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    tmp_path, model = (
        tmp_path_factory.mktemp("paper"),
        tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=3),
    )
    book = BOOK.read_text(encoding="utf-8")[:20_000]
    Paper(Evaluation(ModelUnderTest(model, batch=1), book, "arrow", tmp_path, said.append), TINY).run(MADE)
    assert {path.name for path in tmp_path.glob("*.png")} == PICTURES
    assert all(json.loads((tmp_path / name).with_suffix(".json").read_text())["data"] for name in PICTURES)
    assert {path.name for path in tmp_path.glob("*.md")} == TABLES
    assert (tmp_path / "needles_with_a_bounded_pool" / "retrieval.md").is_file()
    monkeypatch.setattr(ModelUnderTest, "score", lambda *a, **k: pytest.fail("measured again"))
    monkeypatch.setattr(ModelUnderTest, "llm", lambda *a: pytest.fail("timed again"))
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *a, **k: None)
    Paper(Evaluation(ModelUnderTest(model, batch=1), book, "arrow", tmp_path, said.append), TINY).run(MADE)


@pytest.mark.skipif("OFFLOAD_RT_STRESS" not in os.environ, reason="own processes: make stress PART=composition")
def test_steps_run_in_separate_processes(tmp_path: Path) -> None:
    book = tmp_path / "arrow.txt"
    book.write_text(BOOK.read_text(encoding="utf-8")[:6000], encoding="utf-8")
    size = PaperSize(256, 1, (0.3,), 1, 1, (64,), 1, 1, 3)
    jobs = [PaperJob(model, "lengths", size, book, tmp_path) for model in ("reference-opt", "no/such/model/at/all")]
    with pytest.raises(OffloadError, match="no/such/model"):
        run_jobs(jobs, 2)
    rows = json.loads((tmp_path / "reference-opt" / "perplexity_by_context.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["full", *POLICIES]  # the only context that fits
    assert {row["fingerprint"] for row in rows} == {load_model("reference-opt").fingerprint}
    assert {row["context"] for row in rows} == {CONTEXTS[0]}
    data = json.loads((tmp_path / "reference-opt" / "perplexity_by_context_with_64_tokens.json").read_text())["data"]
    assert data == {row["policy"]: [[row["context"], row["perplexity"]]] for row in rows}


def test_missing_book_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "paper", "--book", str(tmp_path / "none.txt"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("offload-rt: cannot read")
