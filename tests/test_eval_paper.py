"""`make paper` in small: every picture is drawn, with its data beside it, and a second run measures nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload_rt.eval.paper import Paper, Size, main
from offload_rt.eval.subject import Subject

BOOK = Path(__file__).parents[1] / "offload_rt" / "data" / "black_arrow.txt"
TINY = Size(context=320, windows=1, length=256, passages=1, budgets=(0.2,), limit=1, timed_tokens=3)

PICTURES = {
    "attention_similarity_along_the_text.png",
    "attention_weight_of_tokens_over_steps.png",
    "caught_mass_by_part_at_10_percent.png",
    "caught_mass_by_part_at_20_percent.png",
    "needles_and_cost_by_alpha_and_ratio.png",
    "needles_found_by_attended_share.png",
    "needles_found_by_kind.png",
    "needles_found_with_and_without_skewing.png",
    "perplexity_along_the_text.png",
    "perplexity_by_attended_share.png",
    "perplexity_by_context_with_64_tokens.png",
    "queries_that_need_few_keys_by_length.png",
    "recall_of_heaviest_tokens_by_partial_ratio.png",
    "tokens_needed_for_90_percent_of_attention.png",
}
TABLES = {
    "ablation.md",
    "analysis.md",
    "perplexity.md",
    "perplexity_by_context.md",
    "perplexity_with_a_bounded_pool.md",
    "retrieval.md",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_table_and_figure_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    book = BOOK.read_text(encoding="utf-8")
    Paper(Subject("reference", batch=1), book, "arrow", TINY, tmp_path, said.append).run(tasks=False)
    assert {path.name for path in tmp_path.glob("*.png")} == PICTURES
    assert all((tmp_path / name).with_suffix(".json").is_file() for name in PICTURES)
    assert {path.name for path in tmp_path.glob("*.md")} == TABLES
    assert (tmp_path / "needles_with_a_bounded_pool" / "retrieval.md").is_file()
    monkeypatch.setattr(Paper, "attention", lambda self: None)  # pictures are drawn anew each time, from the text
    monkeypatch.setattr(Subject, "score", lambda *a, **k: pytest.fail("measured again"))
    monkeypatch.setattr(Subject, "llm", lambda *a: pytest.fail("timed again"))
    Paper(Subject("reference", batch=1), book, "arrow", TINY, tmp_path, said.append).run(tasks=False)


def test_a_missing_book_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--book", str(tmp_path / "none.txt"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("paper: ")
