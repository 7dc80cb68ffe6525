"""Drafts of every kind measured: rows say what was accepted and what it took, and other texts' rows stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload_rt.cli import main
from offload_rt.errors import ConfigError, InputError
from offload_rt.eval.speed.drafts import DraftsConfig, run_drafts

PAGE = (Path(__file__).parents[3] / "offload_rt" / "data" / "black_arrow.txt").read_text(encoding="utf-8")[:3000]


def test_rows_say_what_is_accepted_and_what_it_took(tmp_path: Path) -> None:
    """A page twice: what is looked up is right, and a pass gives several tokens for one reading of the rows."""
    config = DraftsConfig((300,), 10, (0.0,), ("lookup", "sparse-4"), "float32")
    for name, text in (("twice", PAGE + PAGE), ("once", PAGE)):
        report = run_drafts("reference", name, text, config, tmp_path, lambda line: None)
    full, lookup, sparse = report.rows[3:]
    assert [row["text"] for row in report.rows] == ["once"] * 3 + ["twice"] * 3
    assert full["accepted"] is None and full["bytes_share"] == full["ratio"] == 1
    assert {row["same"] for row in report.rows} == {"all"}
    for row in (lookup, sparse):
        assert row["accepted"] > 0 and row["length"] > 1 and row["bytes_share"] < 1
        assert row["ratio"] == pytest.approx(full["milliseconds"] / row["milliseconds"])
    again = run_drafts("reference", "once", PAGE, config, tmp_path, lambda line: None)
    assert len(again.rows) == 6 == len(json.loads((tmp_path / "drafts.json").read_text())["rows"])


def test_its_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="drafts='spars' is unknown; did you mean 'sparse'"):
        DraftsConfig(kinds=("spars",))
    with pytest.raises(InputError, match="the text has"):
        run_drafts("reference", "short", "short", DraftsConfig(dtype="float32"), tmp_path, print)
    assert main(["eval", "drafts", "reference", "--text", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err
