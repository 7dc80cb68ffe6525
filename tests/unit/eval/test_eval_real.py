"""Test `offload-rt eval real`: tables built from existing rows, resumed runs, the time limit, and RULER's haystack."""

from __future__ import annotations

import json
import sysconfig
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.tiny_models import tiny_checkpoint

from offload_rt.cli import main
from offload_rt.errors import InputError
from offload_rt.eval.core.model_under_test import ModelUnderTest
from offload_rt.eval.core.needles import KINDS
from offload_rt.eval.core.variants import Variant
from offload_rt.eval.quality.tasks.haystack import sentences
from offload_rt.eval.suites.real import PARTS, Real, RealSize, compared, looked_up, model_paths

ROOT = Path(__file__).parents[3]
BOOK = ROOT / "offload_rt" / "data" / "black_arrow.txt"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, text = tmp_path_factory.mktemp("data"), BOOK.read_text("utf-8")[20_000:32_000]
    for name in ("books/war_and_peace.txt", "wikitext-2/valid_raw.txt"):
        (folder / name).parent.mkdir()
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def short_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the files of the standard library that are used as a text, because tokenizing them takes a second."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("argparse", "tarfile", "typing", "subprocess", "ast"):
        (tmp_path / f"{name}.py").write_text((library / f"{name}.py").read_text("utf-8")[:3000], "utf-8")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})


def rows(path: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(path.read_text())["rows"]
    return found


def test_a_part_resumes_where_it_stopped(
    short_library: None, model: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    variants = [Variant("full"), *(Variant("streaming", {"budget": budget}) for budget in (0.25, 0.5))]
    part = make_real(model, data, tmp_path, messages.append, *variants)
    PARTS["perplexity"](replace(part, until=0.0))
    assert rows(tmp_path / "perplexity.json") == [] and messages == []
    PARTS["perplexity"](part)
    first = rows(tmp_path / "perplexity.json")
    texts = ("war_and_peace.txt", "standard library (Python)", "wikitext-2 valid_raw.txt")
    assert [(row["text"], row["variant"]) for row in first] == [(t, v.label) for t in texts for v in variants]
    assert len(messages) == 3 * 2 and all(row["context"] == 96 for row in first)
    monkeypatch.setattr(ModelUnderTest, "score", lambda *arguments: pytest.fail("measured again"))
    PARTS["perplexity"](replace(part, until=0.0))
    assert rows(tmp_path / "perplexity.json") == first, "measured rows are shown, late or not"


def test_compared_variants_are_complete() -> None:
    labels = [variant.label for variant in compared()]
    assert labels[0] == "full" and len(set(labels)) == len(labels)
    for budget in ("0.05", "0.02"):
        sized = f"sinks=4 recent=16 dense_layers= budget={budget}"
        assert {f"infinigen {sized} approximate_kv={tail}" for tail in ("off", "int4", "int2")} <= set(labels)
        assert f"oracle {sized}" in labels
    assert {f"{policy} sinks=4 recent=16 dense_layers= budget=0.05" for policy in ("quest", "h2o", "streaming")} <= set(
        labels
    )
    assert {f"infinigen preset={name}" for name in ("default", "rows", "paper")} <= set(labels)
    assert {variant.label for variant in looked_up()} <= set(labels)


def make_real(
    model: str, data: Path, out: Path, say: Callable[[str], None], *variants: Variant, windows: int = 1
) -> Real:
    size = RealSize(windows, 8, 1, 1, (96,))
    return Real(ModelUnderTest(model), size, out, data, time.monotonic() + 600, say, variants)


def test_needles_are_reported_by_kind_and_stop_at_the_time_limit(
    undrawn: None, short_library: None, model: str, data: Path, tmp_path: Path
) -> None:
    messages: list[str] = []
    real = make_real(model, data, tmp_path, messages.append, Variant("full"), Variant("streaming", {"budget": 0.5}))
    PARTS["needles"](replace(real, size=replace(real.size, contexts=(256,))))
    labels = ("full", "streaming budget=0.5")
    assert [line.split(": ")[0] for line in messages] == [
        f"256 tokens, {kind}, {name}" for kind in KINDS for name in labels
    ]
    assert len(rows(tmp_path / "retrieval.json")) == 2
    expired = replace(real, size=replace(real.size, contexts=(288,)), until=time.monotonic() - 1)
    PARTS["needles"](expired)
    assert [row["variant"] for row in rows(tmp_path / "retrieval.json")] == ["full"]


def test_models_are_folders_or_gguf_files(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_RT_MODELS", str(tmp_path))
    stored = tmp_path / "small.gguf"
    stored.touch()
    assert model_paths([model, "small.gguf", str(stored)]) == [Path(model), stored, stored]
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match=r"there is no model in .*notes\.txt"):
        model_paths(["notes.txt"])


def test_invalid_arguments_are_reported_in_one_line(
    model: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data", str(data), "--out", str(tmp_path)]
    assert main(["eval", "real", "--models", str(tmp_path / "none"), *flags]) == 2
    assert "there is no model in" in capsys.readouterr().err
    assert main(["eval", "real", "--models", model, "--parts", "perplexty", *flags]) == 2
    assert "did you mean 'perplexity'" in capsys.readouterr().err
    assert main(["eval", "real", "--models", model, "--tasks", "ruler_cwf", *flags]) == 2
    assert "did you mean 'ruler_cwe'" in capsys.readouterr().err


def test_sentences_end_after_their_punctuation() -> None:
    text = 'He came. "Who?" said she. It cost 3.50 in all! Then\nhe went.'
    assert sentences(text) == ["He came.", '"Who?" said she.', "It cost 3.50 in all!", "Then\nhe went."]
    assert " ".join(sentences(text)) == text
