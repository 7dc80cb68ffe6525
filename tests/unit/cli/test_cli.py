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
import torch
from support.commands import Cli, CommandRun
from support.outputs import completed
from support.tiny_models import tiny_checkpoint

import offload_rt
from offload_rt import LLM, ModelError, SamplingParams
from offload_rt.cli import _quiet_libraries
from offload_rt.cli.tables import verdict

PACKAGE = Path(offload_rt.__file__).parent
BOOK = str(PACKAGE / "data" / "black_arrow.txt")
SHORT = ("--prompt-tokens", "96", "--max-new-tokens", "6", "--temperature", "0")


@pytest.fixture
def generate(cli: Cli, short_book: Path) -> Cli:
    """Run `offload-rt generate` with default flags, which later flags override."""
    given = ("generate", "reference", "--prompt-file", str(short_book), *SHORT, "--policy", "full")
    return lambda *flags: cli(*given, *flags)


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
        ("cuda:0", 0, 0, "attends exactly to 3% of the tokens"),  # a single new token is not decoded
    ],
)
def test_the_verdict_names_effect_and_saved_transfers(
    device: str, copied: float, copied_by_full: float, summary: str
) -> None:
    policy = SimpleNamespace(
        policy="infinigen", device=device, exact_fraction=0.03, h2d_bytes_per_token=copied, kv_bytes_device=1,
        scoring_bytes_device=1, kv_bytes_host=10,
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


@pytest.mark.slow
def test_a_text_is_compared_with_full_attention(cli: Cli, short_book: Path, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "llama", "llama", head_dim=32, max_position_embeddings=1024)
    plot, stats = tmp_path / "plot.png", tmp_path / "stats.json"
    given = ("generate", model, "--prompt-file", str(short_book), "--prompt-tokens", "900", "--max-new-tokens", "20")
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
    assert found["scored"] == 20 and found["kl"] < 0.01 and found["top_1"] > 0.9
    assert found["full"]["h2d_bytes"] > 3 * found["policy"]["h2d_bytes"] > 0
    copied = drawn["data"]["h2d_bytes_per_token"]["infinigen"]
    assert copied == found["policy"]["h2d_bytes_steps"] / 19, "copies of a reused prefix are not counted"
    assert plot.read_bytes().startswith(b"\x89PNG") and len(drawn["data"]["selected"]) == 20
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
    assert "svd" in run.out
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


# -------------------------------------------------------------------------------------------------------- bad input


def test_prompt_files_that_are_no_text_are_refused(cli: Cli, tmp_path: Path) -> None:
    bad = {
        "nul": (b"Once upon\0a time", "binary"),
        "latin": ("Fräulein".encode("latin-1"), "UTF-8"),
        "empty": (b"", "empty"),
        "blank": (b" \n\n", "empty"),
    }
    for name, (data, word) in bad.items():
        (tmp_path / name).write_bytes(data)
        cli("generate", "reference", "--prompt-file", str(tmp_path / name)).fails_with(name, word)


def test_prompt_files_that_cannot_be_read_are_refused(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("generate", "reference", "--prompt-file", str(tmp_path / "none.txt")).fails_with("none.txt", "No such file")
    cli("generate", "reference", "--prompt-file", str(tmp_path)).fails_with(str(tmp_path), "directory")

    def deny(path: Path) -> bytes:  # CI runs as root, which may read every file
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("offload_rt.utils.texts.read_small", deny)
    cli("generate", "reference", "--prompt-file", BOOK).fails_with(BOOK, "Permission denied")


@pytest.mark.parametrize("architecture", ["opt", "gpt2"])
def test_prompts_beyond_learned_positions_are_refused(
    cli: Cli, short_book: Path, tmp_path: Path, architecture: str
) -> None:
    model = tiny_checkpoint(tmp_path / architecture, architecture)
    flags = ("--policy", "full", "--prompt-tokens", "1020", "--max-new-tokens", "5")
    cli("generate", model, "--prompt-file", str(short_book), *flags).fails_with("1025", "1024", "shorten")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--prompt-tokens 0", ("--prompt-tokens 0", "between 1 and")),
        ("--prompt-tokens many", ("--prompt-tokens", "many")),
        ("--max-new-tokens 0", ("--max-new-tokens 0", "at least 1")),
        ("--temperature -1", ("--temperature -1", "0 is greedy")),
        ("--host-memory 500TiB", ("500 TiB",)),
        ("--host-memory plenty", ("--host-memory 'plenty'", "200GiB")),
        ("--host-memory 1MiB --prompt-tokens 2000", ("1 MiB",)),
        ("--policy infinigin", ("infinigin", "did you mean 'infinigen'")),
        ("--policy full --budget 0.1", ("not of policy 'full' (its options: none)",)),
        (
            "--policy h2o --alpha 3",
            ("--alpha is an option of infinigen", "'h2o' (its options: --budget, --sinks"),
        ),
        ("--policy h2o --skew-method svd", ("--skew-method is an option of infinigen", "not of policy 'h2o' (")),
        ("--policy quest --page 0", ("--page 0",)),
        ("--policy infinigen --page 8", ("an option of quest, not of policy 'infinigen' (", "--approximate-kv")),
        ("--policy infinigen --partial-ratio 1.5", ("--partial-ratio 1.5", "(0, 1]")),
        ("--policy infinigen --preset papers", ("papers", "did you mean 'paper'")),
        ("--policy infinigen --scorer int7", ("int7", "int4")),
        ("--policy infinigen --dense-layers first", ("--dense-layers", "first")),
        ("--policy infinigen --dense-layers 8", ("--dense-layers", "8", "0 to 7")),
        ("--policy infinigen --skew none.safetensors", ("none.safetensors",)),
        (f"--policy infinigen --skew {BOOK}", (BOOK,)),
        ("--policy infinigen --skew-method pca", ("--skew-method 'pca'", "svd, balanced")),
        ("--eviction lfu", ("--eviction 'lfu'", "fifo, lru, counter")),
        ("--eviction lru --protect sinks", ("--protect 'sinks'", "window, none")),
        ("--protect none", ("--protect none", "--eviction")),
        ("--policy h2o --eviction lru", ("h2o", "eviction")),
        ("--kv-cache-dtype int3", ("--kv-cache-dtype 'int3'", "int4")),
        ("--device tpu", ("tpu", "cpu")),
        ("--dtype float8", ("float8", "bfloat16")),
        ("--stats-json no/such/folder/x.json", ("no/such/folder", "cannot write")),
        ("--stats-json .", ("cannot write",)),
        ("--no-such-flag", ("--no-such-flag", "--help")),
    ],
)
def test_bad_value_is_one_clear_line(generate: Cli, flags: str, words: tuple[str, ...]) -> None:
    generate(*flags.split()).fails_with(*words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_cuda_device_is_reported(generate: Cli) -> None:
    generate("--device", "cuda").fails_with("cuda")


def test_artifact_of_another_model_names_both_fingerprints(cli: Cli, generate: Cli, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "other", "llama")
    assert cli("skew", model, "--out", str(tmp_path), "--calibration-tokens", "64").code == 0
    run = generate("--policy", "infinigen", "--skew", str(tmp_path / "skew.safetensors"))
    run.fails_with("fingerprint")
    assert len(set(re.findall(r"\b[0-9a-f]{12,}\b", run.err))) == 2, run.err


def test_models_that_cannot_be_loaded_are_reported(cli: Cli, tmp_path: Path) -> None:
    def generate_with(model: Path | str) -> CommandRun:
        return cli("generate", str(model), "--prompt-file", BOOK, *SHORT)

    generate_with(tmp_path / "nowhere").fails_with("nowhere", "does not exist")
    empty = tmp_path / "empty"
    empty.mkdir()
    generate_with(empty).fails_with("empty", "config.json")
    bare = Path(tiny_checkpoint(tmp_path / "bare", "llama"))
    (bare / "model.safetensors").unlink()
    generate_with(bare).fails_with("bare", "no weights", "safetensors")
    assert cli("info", str(bare), "--context", "100").code == 0  # only the configuration is read
    short = Path(tiny_checkpoint(tmp_path / "short", "llama"))
    weights = short / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    generate_with(short).fails_with("model.safetensors", "is truncated", "1,000 bytes are missing")
    weights.write_bytes(whole[:4])
    generate_with(short).fails_with("model.safetensors", "damaged", "header")
    weights.write_bytes(whole)
    (short / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model-2.safetensors"}}))
    generate_with(short).fails_with("model-2.safetensors", "does not exist, but the index")
    strange = Path(tiny_checkpoint(tmp_path / "strange", "llama"))
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(
        json.dumps(config | {"architectures": ["BertForMaskedLM"], "model_type": "bert"})
    )
    generate_with(strange).fails_with("BertForMaskedLM", "LlamaForCausalLM", "GPT2LMHeadModel")


def test_a_model_is_looked_up_on_the_hub_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the hub cannot be reached, transformers would retry for half a minute."""
    tried: list[str] = []

    def refuse(url: str, **options: Any) -> None:
        tried.append(url)
        raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refuse)
    cli("generate", "no/model", "x").fails_with(
        "not in the cache", "cannot be reached", "pass the folder", "HF_ENDPOINT"
    )
    cli("info", "no/model").fails_with("cannot be reached")
    assert len(tried) == 2 and all(url.endswith("no/model/resolve/main/config.json") for url in tried)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cli("generate", "no/model", "x").fails_with("HF_HUB_OFFLINE forbids a download")


def test_the_tokenizer_may_be_in_another_folder(cli: Cli, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "llama", "llama")
    own = tmp_path / "tokenizer"
    own.mkdir()
    for path in Path(model).glob("tokenizer*"):
        path.rename(own / path.name)
    arguments = ("It was a dark night", "--max-new-tokens", "3", "--policy", "full", "--temperature", "0")
    cli("generate", model, *arguments).fails_with("has no tokenizer", "--tokenizer DIR")
    cli("generate", model, *arguments, "--tokenizer", model).fails_with("has no tokenizer")
    assert cli("generate", model, *arguments, "--tokenizer", str(own)).code == 0
    with pytest.raises(ModelError, match="has no tokenizer"):
        LLM(model, tokenizer=model)


def test_nothing_is_loaded_for_a_wrong_argument(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_rt.llm.LLM.__init__", lambda *given, **fields: pytest.fail("a model was loaded"))
    cli("generate", "reference", "x", "--host-memory", "500TiB").fails_with("500 TiB", "lower --host-memory")
    cli("chat", "reference", "--store", "/tmp/x", "--session", "n" * 300).fails_with("1 to 200 characters")
    cli("write", "no/such/folder", "x.txt", "It").fails_with("'no/such/folder' does not exist")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("skew reference", ("--out",)),
        ("skew reference --out x --method pca", ("pca", "svd, balanced")),
        ("skew reference --out x --calibration none.txt", ("none.txt",)),
        ("info reference --context 0", ("--context 0", "at least 1")),
        ("info reference --context many", ("'many' is not a number of tokens", "128k")),
        ("generat reference", ("invalid choice", "did you mean generate?")),
        ("generate reference x --polcy full", ("--polcy", "did you mean --policy?")),
        ("generate reference x --max-new-token 5", ("--max-new-tokens?", "(see offload-rt generate --help)")),
        ("generate reference It was dark", ("was dark", "in quotes")),
        ("generate reference x --exact --eviction lru", ("--exact needs", "cannot be combined with --eviction")),
        ("serve reference --port 70000", ("--port 70000 must be",)),
        ("chat reference --session= --store x", ("session name ''", "1 to 200 characters")),
        ("chat reference --session s", ("--session needs a store", "--store DIR")),
        ("info reference --context 10 --policy magic", ("magic",)),
        ("", ("COMMAND",)),
        ("continue", ("continue",)),
        ("sessions list --store /nowhere", ("there is no store at '/nowhere'",)),
        ("sessions burn --store /tmp", ("action='burn' is unknown",)),
        ("sessions show --store /tmp", ("needs the NAME",)),
        ("sessions list --store /tmp --store-ttl 1y", ("--store-ttl='1y' is not a duration",)),
        ("sessions delete s --store /tmp --store-ttl 1d", ("remove it from sessions delete",)),
        ("chat reference --session s --store /dev/null/x", ("cannot use the store", "--store DIR")),
        ("chat reference --session s --store x --store-limit -1", ("is not a size",)),
        ("chat reference --session s --store x --store-ttl soon", ("'soon' is not a duration",)),
        ("chat reference --session s --store x --store-ttl 0d", ("must be positive",)),
        ("chat reference --session s --store x --store-policy lur", ("did you mean 'lru'",)),
        ("chat reference --session s --store x --overflow trunc", ("--overflow 'trunc' is",)),
    ],
)
def test_other_commands_refuse_in_one_line(
    cli: Cli, arguments: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli(*arguments.split()).fails_with(*words)
    assert not list(tmp_path.iterdir())
