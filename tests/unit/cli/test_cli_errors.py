"""Test that the command line reports bad input in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import SHORT, Cli, CommandRun
from support.tiny_models import tiny_checkpoint

import offload_rt
from offload_rt import LLM, ModelError

PACKAGE = Path(offload_rt.__file__).parent
LONG = "жук" * 100
"""Text that is too long for a file name in UTF-8."""
BOOK = str(PACKAGE / "data" / "black_arrow.txt")


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
        (f"--stats-json {LONG}", ("cannot write", "too long")),
        (f"--prompt-file {LONG}", ("cannot read", "too long")),
        ("--disk ~nobody-here/kv", ("~nobody-here/kv", "whole path")),
        ("--truncate none", ("--truncate 'none'", "head, tail, middle")),
        ("--no-such-flag", ("--no-such-flag", "--help")),
    ],
)
def test_bad_value_is_one_clear_line(generate: Cli, flags: str, words: tuple[str, ...]) -> None:
    generate(*flags.split()).fails_with(*words)


@pytest.mark.parametrize(
    "command",
    [
        "sessions --store ~nobody-here",
        "chat reference --session a --store ~nobody-here",
        "write reference ~nobody-here/a x",
        "generate ~nobody-here/model x",
        "serve reference --store ~nobody-here",
    ],
)
def test_paths_of_unknown_users_are_refused(cli: Cli, command: str) -> None:
    cli(*command.split()).fails_with("~nobody-here", "write the whole path")


def test_a_chat_with_and_without_a_store_is_refused(cli: Cli, tmp_path: Path) -> None:
    cli("chat", "reference", "--store", str(tmp_path), "--no-store").fails_with("--store and --no-store", "remove one")


def test_a_prompt_may_be_longer_than_a_file_name(cli: Cli) -> None:
    run = cli("generate", "reference", LONG, "--policy", "full", "--max-new-tokens", "1")
    assert run.code == 0 and "not the file" not in run.err


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
    """If the hub cannot be reached, transformers on its own would retry for half a minute."""
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
        ("sessions list extra --store /tmp", ("takes no NAME", "'extra'", "sessions show extra")),
        ("sessions clear extra --store /tmp", ("takes no NAME", "'extra'", "remove it")),
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
