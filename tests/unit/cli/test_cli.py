"""Test the command line: its output, exit codes, and one-line messages for bad input."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.commands import SHORT, Cli
from support.outputs import completed
from support.tiny_models import tiny_checkpoint

import offload_rt
from offload_rt import LLM, SamplingParams
from offload_rt.cli import _quiet_libraries
from offload_rt.cli.tables import verdict
from offload_rt.policies.options import InfiniGenOptions

PACKAGE = Path(offload_rt.__file__).parent
BOOK = str(PACKAGE / "data" / "black_arrow.txt")


# ------------------------------------------------------------------------------------------------------------ behaviour


def test_text_goes_to_stdout_and_the_table_to_stderr(generate: Cli, short_book: Path) -> None:
    run = generate()
    llm = LLM("reference", policy="full")
    ids = llm.encode(short_book.read_text(encoding="utf-8"))[:96]
    (expected,) = completed(llm.generate([ids], SamplingParams(max_tokens=6, temperature=0)))
    assert (run.code, run.out) == (0, expected.text)
    assert "Statistics" in run.err
    assert "96 tokens" in run.err
    assert "100.00%" in run.err
    for chatter in ("Warning", "Loading weights", "Token indices"):
        assert chatter not in run.err


@pytest.mark.parametrize(("declared", "generated"), [(300, 256), (3, 3)])
def test_a_planned_length_limits_the_number_of_new_tokens_of_the_checkpoint(
    cli: Cli, tmp_path: Path, declared: int, generated: int
) -> None:
    model, stats = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1), tmp_path / "stats.json"
    (tmp_path / "generation_config.json").write_text(f'{{"max_new_tokens": {declared}}}', encoding="utf-8")
    flags = ("--prompt-tokens", "4", "--policy", "full", "--ignore-eos", "--stats-json", str(stats))
    assert cli("generate", model, "It was a dark night", *flags).code == 0
    assert json.loads(stats.read_text(encoding="utf-8"))["new_tokens"] == generated


@pytest.mark.slow
def test_the_summary_is_short_and_all_statistics_can_be_shown(generate: Cli) -> None:
    short, long = generate("--policy", "infinigen").err, generate("--policy", "infinigen", "--stats").err
    rows = [line for line in short.splitlines() if "│" in line]
    assert [name for row in rows if (name := row.split("│")[1].strip())] == [
        "prompt", "prefill", "decode", "exact attention fraction", "host to device, KV", "KV"
    ]  # fmt: skip
    assert "approximated attention mass" in long and "attention mass" not in short
    help_text = " ".join(generate("--help").out.split())
    described = help_text[help_text.index("options:") :]
    sampled = described.index("--max-new-tokens N maximum number of new tokens (default: 256)")
    assert sampled < described.index("--policy ")


def test_help_does_not_show_an_empty_default(cli: Cli) -> None:
    described = " ".join(cli("serve", "--help").out.split())
    assert "allow browser requests from this origin; may be repeated" in described
    assert "default: ()" not in described


def test_a_warning_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with _quiet_libraries():
        for message in ("too long", "too long", "too short"):
            warnings.warn_explicit(message, UserWarning, offload_rt.cli.__file__, 1)
    assert capsys.readouterr().err == "offload-rt: note: too long\noffload-rt: note: too short\n"


@pytest.mark.parametrize(
    ("device", "copied", "copied_by_full", "summary"),
    [
        ("cpu", 2, 100, "attends exactly to 3% of the tokens"),
        ("cuda:0", 0.2, 100, "copies less than 1% of the KV cache per token, keeps 20% of its size on the device"),
        ("cuda:0", 0, 0, "attends exactly to 3% of the tokens"),  # all KV has copies on the device
    ],
)
def test_the_verdict_names_effect_and_saved_transfers(
    device: str, copied: float, copied_by_full: float, summary: str
) -> None:
    policy = SimpleNamespace(
        policy="infinigen", device=device, exact_fraction=0.03, h2d_bytes_per_token=copied, kv_bytes_device=1,
        scoring_bytes_device=1, kv_bytes_host=10, decoded_tokens=9,
    )  # fmt: skip
    found: Any = SimpleNamespace(
        policy=policy, full=SimpleNamespace(h2d_bytes_per_token=copied_by_full), kl=0.5, top_1=0.975
    )
    assert f"It changed the text: policy infinigen {summary}, and predicts other tokens" in verdict(found)
    found.kl = 0.05
    assert verdict(found).startswith("It worked in part: policy infinigen")
    found.kl = 0.0
    assert verdict(found).startswith("It worked: policy infinigen")
    assert verdict(found).endswith("at 97.5% of the positions.")
    policy.decoded_tokens = 0
    assert verdict(found).startswith("The policies cannot be compared: all of them compute the first new token")


@pytest.mark.slow
def test_a_text_is_compared_with_full_attention(cli: Cli, short_book: Path, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "llama", "llama", head_dim=32, max_position_embeddings=1024)
    plot, stats = tmp_path / "plot.png", tmp_path / "stats.json"
    given = ("generate", model, "--prompt-file", str(short_book), "--prompt-tokens", "900", "--max-new-tokens", "12")
    given = (*given, "--ignore-eos", "--dtype", "float32", "--seed", "1", "--compare-full")
    run = cli(*given, "--plot", str(plot), "--stats-json", str(stats))
    assert run.code == 0, run.err
    for words in (
        "Compared with full attention",
        "same most probable token",
        "KL divergence",
        "all KV",
        "predicts the same token as full attention",
    ):
        assert words in run.err
    found, drawn = json.loads(stats.read_text())["against_full"], json.loads(plot.with_suffix(".json").read_text())
    assert found["scored"] == 12 and found["kl"] < 0.01 and found["top_1"] > 0.9
    assert found["full"]["h2d_bytes"] > 3 * found["policy"]["h2d_bytes"] > 0
    copied = drawn["data"]["h2d_bytes_per_token"]["infinigen"]
    assert copied == found["policy"]["h2d_bytes_steps"] / 11, "copies of a reused prefix are not counted"
    assert plot.read_bytes().startswith(b"\x89PNG") and len(drawn["data"]["selected"]) == 12
    assert set(drawn["data"]["mass"]) == {"full", "infinigen", "infinigen without\napproximate KV", "streaming"}
    assert all(sum(parts) == pytest.approx(1) for parts in drawn["data"]["mass"].values())
    given = (*given, "--prompt-tokens", "200")
    run = cli(*given, "--plot", str(plot), "--missed-mass-every", "0")
    drawn = json.loads(plot.with_suffix(".json").read_text())
    assert run.code == 0 and drawn["data"]["mass"].keys() == {"full"}, (
        "attention mass that was not measured is not drawn"
    )
    run = cli(*given, "--policy", "streaming", "--recent", "8", "--dense-layers", "none", "--temperature", "1")
    assert "tokens are the same" in run.err and run.code == 0, "a policy that misses attention generates another text"


def test_impossible_comparisons_are_refused(generate: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    generate("--plot", "x.png").fails_with("--plot needs --compare-full")
    generate("--compare-full").fails_with("cannot be combined with --policy full")
    generate("--compare-full", "--policy", "infinigen", "--exact").fails_with("cannot be combined with --exact")
    monkeypatch.setattr("offload_rt.cli.generate.find_spec", lambda name: None)
    generate("--compare-full", "--policy", "infinigen", "--plot", "x.png").fails_with("matplotlib is not installed")


def test_a_missing_extra_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_module_not_found(arguments: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'lm_eval'", name="lm_eval.api")

    monkeypatch.setattr("offload_rt.eval.cli.run_eval", raise_module_not_found)
    cli("eval", "tasks").fails_with("lm_eval is not installed", "pip install 'lm-eval[ruler]==0.4.*'", "'datasets>=3'")


def test_a_prompt_that_is_a_file_name_gets_a_note(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("It was a dark night")
    run = cli("generate", "reference", "book.txt", "--max-new-tokens", "1", "--policy", "full")
    assert run.code == 0 and "not the file of this name: --prompt-file book.txt reads the file" in run.err


def test_quiet_writes_only_the_text(generate: Cli) -> None:
    loud, quiet = generate(), generate("--quiet")
    assert quiet.err == ""
    assert quiet.out == loud.out != ""


def test_stats_json_contains_statistics_of_infinigen(generate: Cli, tmp_path: Path) -> None:
    stats_file = tmp_path / "stats.json"
    flags = ("--preset", "rows", "--dense-layers", "0,1", "--scorer", "int4", "--source", "attention_input")
    run = generate("--policy", "infinigen", "--prompt-tokens", "300", *flags, "--stats-json", str(stats_file))
    assert run.code == 0, run.err
    stats = json.loads(stats_file.read_text())
    assert (stats["prompt_tokens"], stats["new_tokens"], stats["dense_layers"]) == (300, 6, [0, 1])
    assert stats["policy"] == "infinigen"
    assert 0 < stats["fetched_fraction"] < stats["exact_fraction"] < 1
    assert len(stats["attended_by_step"]) == 5
    assert str(stats_file) in run.err.replace("\n", "")


def test_a_text_is_used_whole_or_truncated(cli: Cli, short_book: Path, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "llama", "llama", max_position_embeddings=80)
    stats = tmp_path / "stats.json"
    given = ("generate", model, "--prompt-file", str(short_book), "--policy", "full", "--max-new-tokens", "5")
    given = (*given, "--ignore-eos")
    cli(*given).fails_with(str(short_book), "75 fit together with the new tokens", "--truncate tail")
    run = cli(*given, "--truncate", "middle", "--stats-json", str(stats))
    assert run.code == 0, run.err
    assert json.loads(stats.read_text())["prompt_tokens"] == 75
    assert "note:" not in run.err
    longer = cli("generate", model, "--prompt-file", str(short_book), *SHORT, "--policy", "full", "--ignore-eos")
    assert (longer.code, longer.err.count("note:")) == (0, 1), "more positions than trained, which RoPE allows"


def test_the_same_seed_gives_the_same_text(generate: Cli) -> None:
    flags = ("--temperature", "1.5", "--top-k", "50", "--top-p", "0.99", "--min-p", "0.0", "--max-new-tokens", "12")
    first, second, other = (generate(*flags, "--seed", seed, "--quiet").out for seed in ("1", "1", "2"))
    assert first == second != other


def test_a_stop_string_ends_the_text(generate: Cli) -> None:
    whole = generate("--quiet").out
    stop = whole.strip()[-2:]
    assert generate("--quiet", "--stop", stop).out == whole[: whole.index(stop)]


@pytest.mark.slow
def test_generate_uses_an_artifact_of_skew(
    cli: Cli, generate: Cli, short_book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cli(
        "skew", "reference", "--out", str(tmp_path / "skewed"), "--calibration", BOOK, "--calibration-tokens", "64"
    )
    assert run.code == 0, run.err
    assert InfiniGenOptions().skew in run.out
    cli("skew", "reference", "--out", str(tmp_path / "skewed")).fails_with("--overwrite replaces it")

    def fail_if_called(*given: Any) -> None:
        pytest.fail("calibrated, though an artifact was given")

    monkeypatch.setattr("offload_rt.engine.build.cached_artifact", fail_if_called)
    flags = ("--policy", "infinigen", "--recent", "8", "--budget", "0.2", "--quiet")
    artifact = tmp_path / "skewed" / "skew.safetensors"
    made = generate(*flags, "--skew", str(artifact))
    llm = LLM("reference", policy="infinigen", policy_options={"recent": 8, "budget": 0.2}, skew=artifact)
    ids = llm.encode(short_book.read_text(encoding="utf-8"))[:96]
    assert (made.code, made.out) == (
        0,
        completed(llm.generate([ids], SamplingParams(max_tokens=6, temperature=0)))[0].text,
    )


def test_info_shows_memory_of_every_policy(cli: Cli) -> None:
    arguments = ("info", "reference", "--device", "cpu", "--context")
    run = cli(*arguments, "2000", "--dtype", "bfloat16")
    assert (run.code, run.err) == (0, "")
    assert "It fits in memory." in run.out
    assert re.search(r"KV of one token +│ 4 KiB ", run.out)  # 2 (K, V) * 8 layers * 2 heads * 64 * 2 bytes
    assert re.search(r"KV of the context +│ 8 MiB ", run.out)  # 32 blocks of 64 tokens
    run = cli(*arguments, "100000", "--policy", "full", "--host-memory", "100MiB")
    assert all(words in run.out for words in ("It does not fit in memory.", "100 MiB", "2,048 tokens"))
    assert "policy infinigen, 2,048 tokens" in cli(*arguments[:-1]).out and "2,048 tokens" in cli(*arguments, "2k").out
    length = "The context length of the model is 2,048 tokens; the quality of longer texts is unknown."
    assert f"It fits in memory.\n{length}" in cli(*arguments, "4096").out
    for policy in ("full", "infinigen", "h2o", "quest", "streaming", "oracle"):
        assert f"policy {policy}, 100 tokens" in cli(*arguments, "100", "--policy", policy).out


def test_info_prints_the_plan_and_the_working_set(cli: Cli) -> None:
    arguments = ("info", "reference", "--context", "1024", "--device", "cpu", "--dtype", "float32")
    text = cli(*arguments, "--device-memory", "24MiB").out
    for words in ("resident layers", "streamed layers", "scoring keys", "weights copied per step"):
        assert words in text
    assert "working set" not in text
    text = cli(*arguments, "--working-set", "64").out
    assert "device: working set" in text
    assert "528 KiB" in text  # 8 layers * 2 heads * 65 tokens * (2 * 64 * 4 + 8) bytes
    cli(*arguments, "--device-memory", "5MiB").fails_with("are missing")
    cli(*arguments, "--working-set", "100000", "--device-memory", "20MiB").fails_with("are missing")
    cli(*arguments, "--working-set", "-1").fails_with("--working-set -1")


def test_a_closed_pipe_is_no_error(generate: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        run = generate()
        stdout.write("flushed at exit")  # must not fail either
    assert run.code == 0 and "continues 96 tokens" in run.err
    assert "Statistics" not in run.err  # generation stopped early
    assert "Traceback" not in run.err


# ---------------------------------------------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_keeps_the_text_and_shows_the_statistics(
    generate: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, stream = generate("--quiet").out, LLM.stream

    def interrupt(self: LLM, *given: Any) -> Iterator[Any]:
        for event in stream(self, *given):
            if event.index == 3:
                raise KeyboardInterrupt
            yield event

    monkeypatch.setattr(LLM, "stream", interrupt)
    stats = tmp_path / "stats.json"
    run = generate("--stats-json", str(stats))
    assert run.code == 130
    assert run.out
    assert whole.startswith(run.out)
    assert len(run.out) < len(whole)
    assert "Statistics" in run.err
    assert json.loads(stats.read_text())["new_tokens"] in (3, 4)


def test_ctrl_c_before_the_first_token(generate: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: LLM, *given: Any) -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(LLM, "stream", interrupt)
    run = generate()
    assert (run.code, run.out) == (130, "")
    assert "no statistics" in run.err
