"""Test the benchmark of thread counts: each case has a row with ratios to policy "full" and to one thread."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny_checkpoint

from offload_rt.cli import main
from offload_rt.eval.speed import threads

TEXT = "The river was high that spring, and nobody crossed it. " * 20


@pytest.fixture(autouse=True)
def no_child_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    count = torch.get_num_threads()
    monkeypatch.setattr(threads, "_in_a_process", threads.measure_case)
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama", num_hidden_layers=2)


def measured(model: str, tmp_path: Path, context: int, *more: str) -> int:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    flags = ["--text", str(text), "--out", str(tmp_path / "out"), "--context", str(context), "--tokens", "3", *more]
    return main(["eval", "threads", model, *flags, "--threads", "1,2", "--busy", "0.5", "--policies", "full,auto"])


@pytest.mark.parametrize("interface", ["llm", "offload"])
def test_each_case_has_a_row_and_its_ratios(interface: str, model: str, tmp_path: Path) -> None:
    assert measured(model, tmp_path, 100, "--interface", interface) == 0
    rows = json.loads((tmp_path / "out" / "threads.json").read_text())["rows"]
    assert [(row["threads"], row["policy"]) for row in rows] == [(1, "full"), (1, "auto"), (2, "full"), (2, "auto")]
    for row in rows:
        full, one = (
            next(other for other in rows if (other["threads"], other["policy"]) == key)
            for key in ((row["threads"], "full"), (1, row["policy"]))
        )
        assert row["to_full"] == row["median"] / full["median"] and row["to_one"] == row["median"] / one["median"]


def test_a_text_that_is_too_short_is_an_error(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measured(model, tmp_path, 5_000) == 2
    assert "5,000 are needed: give a longer one" in capsys.readouterr().err
