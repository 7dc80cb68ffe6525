"""Test `offload-rt eval`: arguments, written files, and one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM
from offload_rt.cli import main
from offload_rt.errors import ConfigError
from offload_rt.eval.core.model_under_test import ModelUnderTest
from offload_rt.eval.core.registry import MEASURES
from offload_rt.eval.core.variants import Variant, make_variants
from offload_rt.models.loading import load_model
from offload_rt.skewing.artifact import SkewArtifact

BOOK = Path(__file__).parents[3] / "offload_rt" / "data" / "black_arrow.txt"


def test_variants_are_parsed_from_words() -> None:
    made = make_variants(["full", "h2o"], [0.1], ["recent=8", "dense_layers=0:1"], ["infinigen scorer=int2 alpha=3.5"])
    assert made == [
        Variant("full"),
        Variant("h2o", {"recent": 8, "dense_layers": [0, 1], "budget": 0.1}),
        Variant("infinigen", {"scorer": "int2", "alpha": 3.5}),
    ]
    bounded = make_variants([], [], [], ["infinigen host_memory=4MiB eviction=lru recent=4", "full"])
    assert bounded == [Variant("full"), Variant("infinigen", {"recent": 4}, {"host_memory": "4MiB", "eviction": "lru"})]
    assert make_variants([], [], [], ["infinigen dense_layers=none max_missed_mass=null"])[1].options == {
        "dense_layers": [],
        "max_missed_mass": None,
    }
    with pytest.raises(ConfigError, match="key=value"):
        make_variants([], [], ["recent"], [])
    with pytest.raises(ConfigError, match="list of layers"):
        make_variants([], [], ["dense_layers=a"], [])
    with pytest.raises(ConfigError, match="did you mean 'streaming'"):
        make_variants([], [], [], ["streeming"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama", num_hidden_layers=2)


def test_perplexity_from_the_command_line(
    undrawn: None, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(BOOK.read_text(encoding="utf-8")[:6000], encoding="utf-8")
    arguments = ["eval", "perplexity", model, "--text", str(text), "--context", "96", "--windows", "2", "--policies"]
    arguments += ["full,streaming", "--budgets", "0.2,0.4", "--set", "recent=8", "--out", str(tmp_path / "o")]
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert "| streaming recent=8 budget=0.4 |" in output.out
    assert "bits per byte" in output.err
    rows = json.loads((tmp_path / "o" / "perplexity.json").read_text())["rows"]
    assert [row["budget"] for row in rows] == [None, 0.2, 0.4]
    assert rows[1]["sparse_attended"] < rows[2]["sparse_attended"] <= 0.4


def test_a_skew_artifact_is_used_and_its_model_named(
    undrawn: None, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two artifacts of one model give separate measurements. An artifact of another model is refused at the start."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(BOOK.read_text(encoding="utf-8")[:6000], encoding="utf-8")
    flags = ["--text", str(text), "--context", "96", "--windows", "2", "--policies", "infinigen", "--budgets"]
    flags += ["0.2", "--set", "recent=8", "--quiet"]
    rows = {}
    for method in ("svd", "balanced"):
        folder = tmp_path / method
        assert main(["skew", model, "--out", str(folder), "--method", method, "--calibration-tokens", "64"]) == 0
        assert main(["eval", "perplexity", model, *flags, "--skew", str(folder), "--out", str(out)]) == 0
        rows[method] = full, ours = json.loads((out / "perplexity.json").read_text())["rows"]
        artifact = SkewArtifact.load(folder / "skew.safetensors", None)
        assert artifact.method == method
        assert full["fingerprint"] == ours["fingerprint"] == artifact.fingerprint
        runtime = LLM(model, policy="infinigen", policy_options=ours["options"], skew=folder)
        assert ours["provenance"] == runtime.runner.policy.provenance_key
        other = "svd" if method == "balanced" else "balanced"
        both = rf"made with the method '{method}', .* name '{other}'"
        with pytest.raises(ConfigError, match=both):
            LLM(model, policy_options={"skew": other}, skew=folder)
        with pytest.raises(ConfigError, match=both):
            ModelUnderTest(model, skew=folder).policy(Variant("infinigen", {"skew": other}))
        LLM(model, policy_options={"skew": method}, skew=folder / "skew.safetensors")
    (full, svd), (again, balanced) = rows.values()
    assert full == again
    assert svd["provenance"] != balanced["provenance"]
    assert svd["nats_per_token"] != balanced["nats_per_token"]
    assert len(list((out / "rows").iterdir())) == 3  # full was measured once

    capsys.readouterr()
    wrong = tmp_path / "wrong"
    assert main(["eval", "perplexity", "reference", *flags, "--skew", str(tmp_path / "svd"), "--out", str(wrong)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.strip().count("\n") == 0
    both = (artifact.fingerprint, load_model("reference").fingerprint)
    for words in ("calibrated on another model", "offload-rt skew", *both):
        assert words in output.err
    assert not wrong.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["perplexity"], "the following arguments are required: MODEL"),
        (["perplexty", "reference"], "did you mean 'perplexity'"),
        (["perplexity", "reference", "--text", "no/such/file"], "cannot read"),
        (["perplexity", "reference", "--text", BOOK, "--policies", "h3o"], "did you mean 'h2o'"),
        (["perplexity", "reference", "--text", BOOK, "--set", "recnt=4"], "recnt"),
        (["perplexity", "reference", "--text", BOOK, "--context", "1"], "context=1"),
        (["perplexity", "reference", "--text", BOOK, "--context", "10", "--decode-from", "9"], "decode_from=9"),
        (["perplexity", "reference", "--text", BOOK, "--budgets", "a"], "is not a list of numbers"),
        (
            ["perplexity", "reference", "--text", BOOK, "--context", "512", "--policies", "h2o", "--budgets", "0.1"],
            "budget=0.1 of 512 tokens is 51 tokens, which sinks=4 and recent=64 use up",
        ),
        (["retrieval", "reference", "--kinds", "chian"], "did you mean 'chain'"),
        (["retrieval", "reference", "--lengths", "1x"], "is not a list of lengths"),
        (["tasks", "reference", "--tasks", ","], "at least one task"),
    ],
)
def test_invalid_arguments_are_reported_in_one_line(
    arguments: list[object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *map(str, arguments), "--out", str(tmp_path / "o")]) == 2
    output = capsys.readouterr()
    assert words in output.err
    assert output.err.strip().count("\n") == 0
    assert output.out == ""


def test_missing_benchmark_name_lists_all_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval"]) == 2
    asked = capsys.readouterr().err
    assert main(["eval", "--help"]) == 0
    listed = capsys.readouterr().out
    for name, measure in MEASURES.items():
        assert name in asked and f"  {name} " in listed and measure.help in listed
        assert "\n" not in measure.help


def test_every_benchmark_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression test: a percent sign in a list of names caused an error when the help was shown."""
    assert main(["eval"]) == 2
    for name in MEASURES:
        with pytest.raises(SystemExit) as ended:
            main(["eval", name, "--help"])
        assert ended.value.code == 0 and f"{name} [-h]" in " ".join(capsys.readouterr().out.split())
