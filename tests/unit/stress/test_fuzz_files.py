"""Test damaged files of every kind: reading them raises an OffloadError or gives the right answer.

They must never cause a crash, unbounded memory use, a wrong token, or a file outside the folder. `OFFLOAD_RT_FUZZ` sets
the number of cases in `make stress PART=files`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.damage import change_json, damage_file, memory_limit
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import tiny_checkpoint, tiny_model, tiny_prompt

from offload_rt import LLM, OffloadError, SamplingParams
from offload_rt.cli import main
from offload_rt.errors import ModelError
from offload_rt.eval.core.report import RowStore
from offload_rt.sessions.catalog import export_text
from offload_rt.sessions.history import History, document_name
from offload_rt.skewing.artifact import SkewArtifact
from offload_rt.skewing.tuned import TunedPolicy, default_options
from offload_rt.utils.texts import read_text
from offload_rt.writing.files import DocumentFolder, Settings, Written

CASES = int(os.environ.get("OFFLOAD_RT_FUZZ", "0"))
BEFORE = Path(__file__).parents[2] / "data" / "written_before"
MODEL = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2)
SHORT = SamplingParams(max_tokens=3, temperature=0)
MEMORY = 3 << 30
"""Memory limit above the process's current use, in bytes. It is sixty times what these files need."""


@pytest.fixture(autouse=True)
def fast_isolated_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no test here simulates a power failure
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")


def make_llm() -> LLM:
    return LLM(MODEL, dtype="float32", host_memory="2MiB", policy="full")


def copy_folder(original: Path, copy: Path) -> list[Path]:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(original, copy)
    return sorted(path for path in copy.rglob("*") if path.is_file() and path.name != "lock")


def damage_folder(original: Path, copy: Path, seed: int, spread: int = 400) -> list[str]:
    """Copy the folder and damage one or two files. Return a description of the damage."""
    rng, files = random.Random(seed), copy_folder(original, copy)
    return [
        f"{path.name}: {damage_file(path, rng, files, spread)}"
        for path in rng.sample(files, min(len(files), rng.choice((1, 1, 2))))
    ]


def count_refusals(original: Path, copy: Path, cases: int, read: Callable[[Path], Any], spread: int = 400) -> int:
    """In each case, read a damaged copy of the folder. Return the number of refusals.

    Files outside the copy must not change.
    """
    refused, beside = 0, sorted(copy.parent.iterdir())
    for seed in range(cases):
        done = damage_folder(original, copy, seed, spread)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with memory_limit(MEMORY):
                    read(copy)
            except OffloadError:
                refused += 1
            except BaseException as error:
                error.add_note(f"case {seed}: {done}")
                raise
        assert sorted(path for path in copy.parent.iterdir() if path != copy) == [p for p in beside if p != copy]
    return refused


# ---------------------------------------------------------------------------------------------------------- histories


def test_history_with_arbitrary_values_is_refused_or_consistent(tmp_path: Path) -> None:
    with make_llm() as llm, llm.session("bob", tmp_path) as session:
        for seed in (2, 3):
            list(session.send(tiny_prompt(20 * seed, seed=seed), SHORT))
        session.truncate(keep_last=80)
    [document] = tmp_path.glob(f"*/{document_name('bob')}.doc")
    data, rng, possible = document.read_bytes()[8:], random.Random(1), 0
    for _ in range(CASES // 4 or 300):
        text = data
        for _ in range(rng.choice((1, 2, 3))):
            text = change_json(json.loads(text), rng)
            if History.from_bytes(text) is None:
                break
        history = History.from_bytes(text)
        if history is not None:
            possible += 1
            assert history.exact <= len(history.tokens) and export_text(history) is not None
            assert History.from_bytes(history.to_bytes()) == history
    assert possible > 10


@pytest.mark.parametrize("counts", [{"shift": 10**30}, {"shift": 1 << 62}, {"shift": 5, "sink_shift": 6}])
def test_history_with_impossible_counts_is_refused(counts: dict[str, int]) -> None:
    """Regression test: with the first of these counts, the session opened, but its next turn raised OverflowError."""
    history = History("ada", "llama", tokens=[1, 2, 3], computed=3)
    assert History.from_bytes(history.to_bytes()) == history
    assert History.from_bytes(json.dumps(json.loads(history.to_bytes()) | counts).encode()) is None


# ------------------------------------------------------------------------------------------------------ written files


def write_files(folder: Path) -> dict[str, Callable[[Path], Any]]:
    """Write files of every kind into subfolders of `folder`. Return a reader for each kind."""
    shutil.copytree(BEFORE / "skew_tiny", folder / "artifact")
    (folder / "tuned").mkdir()
    (folder / "tuned" / "policy.json").write_text(TunedPolicy("infinigen", {"recent": 8}, "f").text())
    RowStore(folder / "rows").put({"suite": "x"}, {"value": 1.5})
    (folder / "text").mkdir()
    (folder / "text" / "book.txt").write_text("It was a dark and stormy night.\n" * 30)
    (folder / "document").mkdir()
    document = DocumentFolder(folder / "novel.txt", folder / "document")
    document.create(Settings(prompt="Write.", headings=("One", "Two"), sampling={"seed": 3}))
    document.save_progress(Written([1, 2, 3], 1, [2]))

    def read_document(copy: Path) -> None:
        found = DocumentFolder(copy / "novel.txt", copy)
        found.read_settings()
        found.read_progress()

    return {
        "artifact": lambda copy: SkewArtifact.load(copy / "skew.safetensors", None),
        "tuned": lambda copy: default_options(copy, "infinigen", {}, None),
        "rows": lambda copy: RowStore(copy).get({"suite": "x"}),
        "text": lambda copy: read_text(str(copy / "book.txt")),
        "document": read_document,
    }


KINDS = ("artifact", "tuned", "rows", "text", "document")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_file_raises_only_offload_error(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    read = write_files(folder)[kind]
    read(folder / kind)
    count_refusals(folder / kind, tmp_path / "damaged", CASES // 16 or 20, read)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 5000, b"[1]", b"\xff", b"1e999", None])
@pytest.mark.parametrize("kind", KINDS)
def test_endless_or_deeply_nested_file_raises_only_offload_error(
    kind: str, content: bytes | None, tmp_path: Path
) -> None:
    """Regression test: unclosed brackets used to raise RecursionError. `None` stands for an endless file."""
    folder = tmp_path / "made"
    folder.mkdir()
    read = write_files(folder)[kind]
    for path in list((folder / kind).rglob("*.*")):
        path.unlink()
        path.symlink_to("/dev/zero") if content is None else path.write_bytes(content)
    with suppress(OffloadError), memory_limit(MEMORY):
        read(folder / kind)


# -------------------------------------------------------------------------------------------------------------- models


def check_generation(llm: LLM) -> None:
    [done] = llm.generate([[1, 2, 3]], SHORT)
    assert len(done.outputs[0].token_ids) >= 1


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_damaged_checkpoint_raises_only_offload_error(kind: str, tmp_path: Path) -> None:
    original = tmp_path / "original"
    if kind == "folder":
        tiny_checkpoint(original, "llama", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    else:
        original.mkdir()
        write_tiny_gguf(original / "model.gguf")

    def read(copy: Path) -> None:
        with LLM(str(copy), policy="full", host_memory="2MiB", device="cpu") as llm:
            check_generation(llm)

    read(original)
    refused = count_refusals(
        original, tmp_path / "damaged", CASES // (50 if kind == "folder" else 400) or 4, read, spread=4000
    )
    assert refused > 0 or not CASES  # changed weights may be accepted


def test_impossible_number_of_positions_is_refused(tmp_path: Path) -> None:
    """Regression test: `LLM` used to raise OverflowError."""
    tiny_checkpoint(tmp_path / "tiny", "llama", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    config = tmp_path / "tiny" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 10**30}))
    with pytest.raises(ModelError, match="is not a valid model"):
        LLM(str(tmp_path / "tiny"), policy="full", host_memory="2MiB", device="cpu")


def test_info_reports_invalid_configurations_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    for content in ("", "[]", '{"model_type": "llama", "hidden_size": -1}', '{"model_type": ["llama"]}'):
        (tmp_path / "model" / "config.json").write_text(content)
        assert main(["info", str(tmp_path / "model"), "--context", "100"]) == 2
        assert capsys.readouterr().err.strip().count("\n") == 0
