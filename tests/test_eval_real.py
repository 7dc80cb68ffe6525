"""`offload-rt eval real`: its tables come from what is there, a second run measures nothing, late parts begin nothing;
and RULER's haystack that needs no download."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from offload_rt.cli import main
from offload_rt.eval.core.model_under_test import ModelUnderTest, Variant
from offload_rt.eval.quality.tasks.haystack import sentences
from offload_rt.eval.suites.real import PARTS, Real, RealSize, compared, estimated

ROOT = Path(__file__).parents[1]
BOOK = ROOT / "offload_rt" / "data" / "black_arrow.txt"
MODEL = ROOT / "offload_rt" / "reference" / "llama"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A held-out novel and Wikipedia, both short."""
    folder, text = tmp_path_factory.mktemp("data"), BOOK.read_text("utf-8")[20_000:32_000]
    for name in ("books/war_and_peace.txt", "wikitext-2/valid_raw.txt"):
        (folder / name).parent.mkdir()
        (folder / name).write_text(text)
    return folder


def rows(path: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(path.read_text())["rows"]
    return found


def test_a_part_goes_on_where_it_stopped(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tested, said = ModelUnderTest(str(MODEL)), list[str]()
    late = Real(tested, RealSize(1, 8, 1, 1, (96,)), tmp_path, data, time.monotonic() - 1, said.append)
    PARTS["bytes"](late)
    assert rows(tmp_path / "bytes.json") == [] and said == []
    part = Real(tested, late.size, tmp_path, data, time.monotonic() + 600, said.append)
    PARTS["bytes"](part)
    first = rows(tmp_path / "bytes.json")
    names = [row["variant"] for row in first]
    assert names[:4] == ["full", "full kv_format=int8", "full kv_format=int4", "full kv_format=int2"]
    assert len(said) == len(first) - 1 == 8
    assert all(row["context"] == 96 and row["text"] == "war_and_peace.txt" for row in first)
    monkeypatch.setattr(ModelUnderTest, "score", lambda *arguments: pytest.fail("measured again"))
    PARTS["bytes"](part)
    assert rows(tmp_path / "bytes.json") == first


def test_what_is_compared() -> None:
    labels = [variant.label for variant in compared()]
    assert labels[0] == "full" and len(set(labels)) == len(labels)
    for budget in ("0.05", "0.02"):
        sized = f"sinks=4 recent=16 dense_layers= budget={budget}"
        assert {f"infinigen {sized} tail={tail}" for tail in ("off", "int4", "int2")} <= set(labels)
        assert f"oracle {sized}" in labels
    assert {f"{policy} sinks=4 recent=16 dense_layers= budget=0.05" for policy in ("quest", "h2o", "streaming")} <= set(
        labels
    )
    assert {f"infinigen preset={name}" for name in ("tail", "default", "paper")} <= set(labels)
    assert estimated(Variant("infinigen", {"tail": "int4", "budget": 0.1}), 0.125) == 0.875
    assert estimated(Variant("infinigen", {"tail": "off"}), 0.125) == 0.0
    assert estimated(Variant("infinigen", {"preset": "paper"}), 0.125) == 0.0
    assert estimated(Variant("quest", {"budget": 0.1}), 0.125) == 0.0


def test_mistakes_are_one_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(data), "--out", str(tmp_path)]
    assert main(["eval", "real", "--models", str(tmp_path / "none"), *flags]) == 2
    assert "there is no model in" in capsys.readouterr().err
    assert main(["eval", "real", "--models", str(MODEL), "--parts", "perplexty", *flags]) == 2
    assert "did you mean 'perplexity'" in capsys.readouterr().err


def test_sentences_are_cut_behind_their_marks() -> None:
    text = 'He came. "Who?" said she. It cost 3.50 in all! Then\nhe went.'
    assert sentences(text) == ["He came.", '"Who?" said she.', "It cost 3.50 in all!", "Then\nhe went."]
    assert " ".join(sentences(text)) == text
