"""Test `offload-rt write`: an interrupted document gets the text of an uninterrupted one, and changed settings are
refused.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.commands import Cli
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM, InputError, SamplingParams, write_document
from offload_rt.cli.common import INTERRUPTED
from offload_rt.errors import ModelError, PoolFullError
from offload_rt.writing.files import TextFile
from offload_rt.writing.progress import Document, WritingProgress

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=3)
TOKENS = 150


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model with 320 positions, fewer than most documents need."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    return tiny_checkpoint(folder, "llama", num_hidden_layers=2, max_position_embeddings=320)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model with 4,096 positions."""
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama", num_hidden_layers=2)


def write(
    model: str, path: Path, stop_at: int | None = None, policy: str = "infinigen", **given: Any
) -> Document | None:
    """Write a document with a newly loaded model. Simulate Ctrl-C after token `stop_at`."""

    def on_progress(progress: WritingProgress) -> None:
        if stop_at is not None and progress.new_tokens >= stop_at and progress.prefilled == 1:
            raise KeyboardInterrupt

    options = {"columns": "calibration"} if policy == "infinigen" else {}
    llm = LLM(model, policy=policy, policy_options=options, host_memory="32MiB")
    try:
        return write_document(llm, path, on_progress=on_progress, **given)
    except KeyboardInterrupt:
        return None


CASES: dict[str, dict[str, Any]] = {
    "beginning": {"max_tokens": TOKENS},
    "chapters": {"chapters": 2, "chapter_tokens": 40, "prompt": "Write a novel.\n\n"},
    "outline": {"outline": ["The Road", "The Ford"], "chapter_tokens": 40},
}


@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_document_gets_the_text_of_an_uninterrupted_one(
    case: str, tmp_path: Path, short_book: Path, small: str, roomy: str
) -> None:
    """Cover Ctrl-C at several tokens, a truncated file and lost progress, within and beyond the model's positions."""
    model = small if case in ("chapters", "beginning") else roomy
    given = CASES[case] | {"sampling_params": SAMPLED, "beginning": short_book.read_text()[:600]}
    whole, parts = tmp_path / "whole.txt", tmp_path / "parts.txt"
    done = write(model, whole, **given)
    assert done is not None and done.finish_reason == "length" and done.new_tokens >= 80
    assert (done.removed_tokens > 0) == (model == small)
    text = whole.read_text()
    assert text.startswith(given["beginning"]) and len(text) > 700
    for place, stop_at in enumerate((1, 40, 66, 90)):
        assert write(model, parts, stop_at, **given) is None
        assert text.startswith(parts.read_text()), "a complete prefix"
        if place == 1:
            parts.write_bytes(parts.read_bytes()[:-9])
        if place == 2:
            progress = tmp_path / "parts.txt.session" / "progress.json"
            saved = json.loads(progress.read_text())
            progress.write_text(json.dumps(saved | {"tokens": saved["tokens"][:-30]}))  # as if killed before it
    rest = {name: given[name] for name in given if name in ("max_tokens", "chapters", "policy")}
    resumed = write(model, parts, **rest)
    assert resumed is not None and parts.read_text() == text
    assert replace(resumed, path=whole, stats=done.stats) == done
    for number, title in enumerate(given.get("outline", ())):
        assert text.count(f"\n\n{title}\n\n") == 1, number


def test_an_extended_document_equals_one_run(tmp_path: Path, roomy: str) -> None:
    """The last tokens of a shorter document must not end a turn when the document is extended."""
    whole, parts = tmp_path / "whole.txt", tmp_path / "parts.txt"
    given = {"beginning": "It was a dark night", "sampling_params": SAMPLED}
    write(roomy, whole, max_tokens=60, **given)
    for count in (20, 40, 60):
        write(roomy, parts, max_tokens=count, **given)
    assert parts.read_text() == whole.read_text()


def test_chapters_that_the_model_ends(tmp_path: Path, roomy: str) -> None:
    """An end token or the length limit ends a chapter and is not part of the text."""
    whole, parts = tmp_path / "whole.txt", tmp_path / "parts.txt"
    given: dict[str, Any] = {"chapters": 3, "chapter_tokens": 60, "beginning": "It was a dark night"}
    write(roomy, tmp_path / "free.txt", sampling_params=SAMPLED, **given)
    saved = json.loads((tmp_path / "free.txt.session" / "progress.json").read_text())
    end = saved["tokens"][saved["chapters"][0] + 30]
    given["sampling_params"] = SamplingParams(temperature=0.8, top_p=0.95, seed=3, stop_token_ids=[end])
    done = write(roomy, whole, **given)
    begun = json.loads((tmp_path / "whole.txt.session" / "progress.json").read_text())["chapters"]
    assert done is not None and done.chapters == 3 and begun[1] == begun[0] + 30
    for stop_at in (5, 40, 100):
        write(roomy, parts, stop_at, **given)
    write(roomy, parts, chapters=3)
    assert parts.read_text() == whole.read_text()


KILLED = """
import itertools, os, signal, sys
from offload_rt.cli import main
from offload_rt.writing.files import TextFile
append, calls = TextFile.append, itertools.count()
def kill(file, text):
    append(file, text)
    if next(calls) == 40:
        os.kill(os.getpid(), signal.SIGKILL)
TextFile.append = kill
sys.exit(main())
"""


@pytest.mark.slow
def test_a_killed_process_loses_nothing(tmp_path: Path, cli: Cli, roomy: str) -> None:
    """After SIGKILL, the file contains a prefix of the text. The same command then completes it."""
    (tmp_path / "begin.txt").write_text("It was a dark night, and nobody was on the road.")
    flags = ("--beginning", str(tmp_path / "begin.txt"), "--max-new-tokens", "90", "--seed", "5", "--policy", "full")
    whole, parts = tmp_path / "whole.txt", tmp_path / "parts.txt"
    assert cli("write", roomy, str(whole), *flags).code == 0
    command = (sys.executable, "-P", "-c", KILLED, "write", roomy, str(parts), *flags)
    assert subprocess.run(command, capture_output=True, check=False).returncode == -signal.SIGKILL
    assert whole.read_bytes().startswith(parts.read_bytes()) and parts.read_bytes() != whole.read_bytes()
    run = cli("write", roomy, str(parts), *flags)
    assert run.code == 0 and "90 new tokens" in run.err
    assert parts.read_bytes() == whole.read_bytes()


def test_ctrl_c_on_the_command_line(tmp_path: Path, cli: Cli, roomy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    append, calls = TextFile.append, list[str]()

    def interrupted(file: Any, text: str) -> None:
        calls.append(text)
        append(file, text)
        if len(calls) == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(TextFile, "append", interrupted)
    flags = ("write", roomy, str(tmp_path / "novel.txt"), "It was", "--max-new-tokens", "30", "--policy", "full")
    flags = (*flags, "--seed", "1", "--ignore-eos")
    run = cli(*flags)
    assert (run.code, run.out) == (INTERRUPTED, "") and "the same command continues" in run.err
    assert "Traceback" not in run.err
    monkeypatch.setattr(TextFile, "append", append)
    assert cli(*flags, "--quiet").err == ""
    again = cli(*flags)
    assert again.code == 0 and "is complete: 30 new tokens" in again.err


def test_more_tokens_of_a_document_with_chapters(tmp_path: Path, cli: Cli, roomy: str) -> None:
    novel, outline = str(tmp_path / "novel.txt"), tmp_path / "outline.txt"
    outline.write_text("One\nTwo\n")
    flags = ("--outline", str(outline), "--chapter-tokens", "4", "--policy", "full")
    assert cli("write", roomy, novel, *flags).code == 0
    run = cli("write", roomy, novel, "--more", "5", "--policy", "full")
    assert run.code == 0 and "in 2 chapters; --chapters N" in run.err


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, roomy: str) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    write(roomy, folder / "novel.txt", prompt="Write.", sampling_params=SAMPLED, max_tokens=5, policy="full")
    return folder


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("Other.",), ("was begun with prompt 'Write.'", "not 'Other.'")),
        (("--seed", "4"), ("was begun with seed 3", "not 4")),
        (("--temperature", "0.1"), ("was begun with temperature 0.8",)),
        (("--chapter-tokens", "7"), ("was begun with chapter length 1000, not 7",)),
        (("--chapters", "0"), ("--chapters 0 must be at least 1",)),
        (("--chapters", "2", "--more", "5"), ("cannot be combined",)),
        (("--beginning", "none.txt"), ("none.txt", "No such file")),
        (("Write.", "--prompt-file", "x"), ("either PROMPT or --prompt-file",)),
    ],
    ids=str,
)
def test_other_settings_are_refused_before_the_model_is_loaded(
    flags: tuple[str, ...], words: tuple[str, ...], begun: Path, cli: Cli
) -> None:
    cli("write", "no-such-model", str(begun / "novel.txt"), *flags).fails_with(*words)


def test_files_that_cannot_be_continued(begun: Path, tmp_path: Path, cli: Cli, roomy: str) -> None:
    new = str(tmp_path / "new.txt")
    cli("write", roomy, new).fails_with("the document has no start")
    cli("write", roomy, str(tmp_path / "no" / "new.txt"), "It").fails_with("there is no folder")
    shutil.copytree(begun, tmp_path / "copy")
    novel = tmp_path / "copy" / "novel.txt"
    more = ("write", roomy, str(novel), "--more", "5", "--policy", "full")
    novel.write_text("X" + novel.read_text()[1:] + "more")
    cli(*more[:4], "70", "--policy", "full")  # five tokens are no whole turn: they are written again
    assert (novel.parent / "novel.txt.before").read_text().startswith("X")
    novel.write_text("X" + novel.read_text()[1:])
    run = cli(*more)
    assert run.code == 2 and "was edited after it was written" in run.err and "novel.txt.session" in run.err
    (novel.parent / "novel.txt.session" / "settings.json").write_text("{")
    cli(*more).fails_with("damaged or of another version")
    shutil.rmtree(novel.parent / "novel.txt.session")
    before = novel.read_text()
    assert cli(*more).code == 0
    assert novel.read_text().startswith(before) and novel.read_text() != before
    (tmp_path / "begin.txt").write_text("Once")
    flags = ("--store", new, "--beginning", str(tmp_path / "begin.txt"))
    cli("write", roomy, str(begun / "novel.txt"), *flags).fails_with("exists already and is continued")


def test_a_document_that_can_never_be_complete_is_refused_at_once(tmp_path: Path) -> None:
    """Cover a model with learned positions, which cannot truncate its context, and a KV cache that is too small."""
    model = tiny_checkpoint(tmp_path / "opt", "opt")
    with pytest.raises(ModelError, match="1024"):
        write(model, tmp_path / "a.txt", policy="full", prompt="It was", max_tokens=2000)
    llm = LLM("reference", policy="full", host_memory="4MiB")
    with pytest.raises(PoolFullError, match="4 MiB"):
        write_document(llm, tmp_path / "b.txt", "It was", max_tokens=3000)


def test_another_policy_or_unsupported_parameters_are_refused(begun: Path, tmp_path: Path, roomy: str) -> None:
    llm = LLM(roomy, policy="infinigen", host_memory="32MiB")
    with pytest.raises(InputError, match="another number format or policy"):
        write_document(llm, begun / "novel.txt", max_tokens=9)
    with pytest.raises(InputError, match="num_beams is not supported"):
        write_document(llm, tmp_path / "a.txt", "It", SamplingParams(num_beams=2, temperature=0))
