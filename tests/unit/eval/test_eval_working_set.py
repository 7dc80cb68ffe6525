"""The measurement of working sets: what is replayed is what the runtime does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny_models import tiny_prompt

from offload_rt.cli import main
from offload_rt.errors import InputError
from offload_rt.eval.simulate.working_set import SETUPS, Setup, Sweep, report


def test_replayed_and_repeated_runs_agree(tmp_path: Path) -> None:
    """Rule by rule against the run that keeps rows by the runtime's; with a dense layer, whose bytes are set aside."""
    setups = Setup("a", {"recent": 8, "dense_layers": (0,)}), Setup("b", {"recent": 8}, "int4")
    sweep = Sweep("reference", (tuple(tiny_prompt(150)),), 5, (0.1,), setups)
    runs, rules = report(sweep, {"model": "reference"}, tmp_path)
    for run in runs.rows:
        by_rule = {row["rule"]: row for row in rules.rows if row["setup"] == run["setup"]}
        assert run["same_tokens"] and run["rows_kept"] == by_rule["decay"]["rows_kept"] > 0
        assert run["link_bytes"] == by_rule["decay"]["link_bytes"] < run["link_bytes_without"]
        assert run["link_bytes_without"] == by_rule["decay"]["link_bytes_without"]
        least = min(row["link_bytes"] for row in by_rule.values())
        assert least == by_rule["optimal, knowing the future"]["link_bytes"]
    assert runs.rows[0]["ratio"] < runs.rows[0]["ratio_all_layers"] < 1
    assert json.loads((tmp_path / "working_set_rules.json").read_text())["about"] == {"model": "reference"}


def test_where_nothing_is_selected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing is selected of 53 tokens"):
        report(Sweep("reference", (tuple(tiny_prompt(50)),), 3, (0.1,), SETUPS[1:2]), {}, tmp_path)


def test_a_text_that_is_too_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    assert (
        main(("eval", "working-set", "reference", "--text", str(tmp_path / "short.txt"), "--out", str(tmp_path))) == 2
    )
    assert "too few for 2048" in capsys.readouterr().err
