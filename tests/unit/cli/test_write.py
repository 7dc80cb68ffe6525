"""Test `offload-rt write`: an interrupted document is continued, and changed settings are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.architectures import architecture
from support.commands import Cli
from support.tiny_models import tiny_checkpoint, tiny_model

from offload_rt import LLM, InputError, SamplingParams, write_document
from offload_rt.cli.common import INTERRUPTED
from offload_rt.errors import ConfigError, ModelError, PoolFullError
from offload_rt.writing.files import TextFile
from offload_rt.writing.progress import Document, WritingProgress

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=3)
TOKENS = 100


@pytest.fixture(scope="module")
def short_context(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "llama"
    return tiny_checkpoint(folder, "llama", num_hidden_layers=2, max_position_embeddings=256)


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama", num_hidden_layers=2)


def write(
    model: str, path: Path, stop_at: int | None = None, policy: str = "infinigen", **given: Any
) -> Document | None:
    """Load the model and write a document. Simulate Ctrl-C after `stop_at` tokens."""

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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_interrupted_documents_equal_uninterrupted_ones(
    case: str, tmp_path: Path, short_book: Path, short_context: str, long_context: str
) -> None:
    model = short_context if case in ("chapters", "beginning") else long_context
    given = CASES[case] | {"sampling_params": SAMPLED, "beginning": short_book.read_text()[:600]}
    whole, parts = tmp_path / "whole.txt", tmp_path / "parts.txt"
    done = write(model, whole, **given)
    assert done is not None and done.finish_reason == "length" and done.new_tokens >= 80
    assert (done.removed_tokens > 0) == (model == short_context)
    text = whole.read_text()
    assert text.startswith(given["beginning"]) and len(text) > 700
    for place, stop_at in enumerate((1, 40, 66)):
        assert write(model, parts, stop_at, **given) is None
        assert text.startswith(parts.read_text()), "a complete prefix"
        if place == 1:
            parts.write_bytes(parts.read_bytes()[:-9])
        if place == 2:
            progress = tmp_path / "parts.txt.session" / "progress.json"
            saved = json.loads(progress.read_text())
            # as if the process had been killed before it saved its progress
            progress.write_text(json.dumps(saved | {"tokens": saved["tokens"][:-30]}))
    rest = {name: given[name] for name in given if name in ("max_tokens", "chapters", "policy")}
    resumed = write(model, parts, **rest)
    assert resumed is not None and parts.read_text() == text
    assert replace(resumed, path=whole, stats=done.stats) == done
    for number, title in enumerate(given.get("outline", ())):
        assert text.count(f"\n\n{title}\n\n") == 1, number


@pytest.mark.parametrize("name", ["mistral", "lfm2"])
def test_a_truncated_document_continues_without_sinks(name: str, tmp_path: Path, short_context: str) -> None:
    """With sliding layers only, truncation stores no sinks. Hybrid models compute all kept tokens again."""
    make = tiny_model if name == "mistral" else architecture
    model = make(name, vocab_size=2048, max_position_embeddings=192)
    whole, parts = tmp_path / "whole.txt", tmp_path / "parts.txt"
    for path, counts in ((whole, (200,)), (parts, (195, 200))):
        for count in counts:
            llm = LLM(model, tokenizer=short_context, policy="full", host_memory="32MiB", verify="off")
            done = write_document(llm, path, "", SAMPLED, max_tokens=count, beginning="It was a dark night")
            assert done.removed_tokens > 0
    assert parts.read_text() == whole.read_text()


def test_settings_that_cannot_be_used_are_not_stored(tmp_path: Path, short_context: str) -> None:
    path, usual = tmp_path / "novel.txt", LLM(short_context, policy="full", host_memory="32MiB")
    with pytest.raises(InputError, match="shorten the prompt"):
        write_document(usual, path, "word " * 300, SAMPLED, max_tokens=2)
    with pytest.raises(InputError, match="not in the vocabulary"):
        write_document(usual, path, "A novel", SamplingParams(stop_token_ids=[1 << 30]), max_tokens=2)
    with pytest.raises(ConfigError, match="h2o"):
        write_document(usual.under("h2o", {"budget": 0.5}), path, "A novel", SAMPLED, max_tokens=2)
    assert write_document(usual, path, "A tale", SAMPLED, max_tokens=2, beginning="It was").new_tokens == 2


def test_an_extended_document_equals_one_that_is_written_at_once(tmp_path: Path, long_context: str) -> None:
    whole, parts = tmp_path / "whole.txt", tmp_path / "parts.txt"
    given = {"beginning": "It was a dark night", "sampling_params": SAMPLED}
    write(long_context, whole, max_tokens=80, **given)
    for count in (20, 40, 60, 80):
        done = write(long_context, parts, max_tokens=count, **given)
        progress = json.loads((tmp_path / "parts.txt.session" / "progress.json").read_text())
        assert done is not None and done.context_tokens == progress["given"] + count
    assert parts.read_text() == whole.read_text()


@pytest.mark.parametrize("found", [False, True], ids=["no stop string", "stop string"])
def test_text_at_the_length_limit_may_begin_a_stop_string(tmp_path: Path, found: bool) -> None:
    llm, free = LLM("reference", policy="full", host_memory="32MiB"), replace(SAMPLED, ignore_eos=True)

    def texts(name: str, params: SamplingParams) -> list[str]:
        written = []
        for count in (20, 30):
            write_document(llm, tmp_path / name, "", params, max_tokens=count, beginning="It was a dark night")
            written.append((tmp_path / name).read_text())
        return written

    short, long = texts("free", free)
    stop = long[len(short) - 6 : len(short) + 4] if found else f"{short[-6:]}~"
    assert texts("stopped", replace(free, stop=(stop,))) == [short, short[:-6] if found else long]


def test_an_end_token_ends_a_chapter(tmp_path: Path, long_context: str) -> None:
    whole, parts = tmp_path / "whole.txt", tmp_path / "parts.txt"
    given: dict[str, Any] = {"chapters": 3, "chapter_tokens": 24, "policy": "full", "beginning": "It was a dark night"}
    write(long_context, tmp_path / "free.txt", sampling_params=SAMPLED, **given)
    saved = json.loads((tmp_path / "free.txt.session" / "progress.json").read_text())
    end = saved["tokens"][saved["chapters"][0] + 12]
    given["sampling_params"] = SamplingParams(temperature=0.8, top_p=0.95, seed=3, stop_token_ids=[end])
    done = write(long_context, whole, **given)
    starts = json.loads((tmp_path / "whole.txt.session" / "progress.json").read_text())["chapters"]
    assert done is not None and done.chapters == 3 and starts[1] == starts[0] + 12
    for stop_at in (5, 20, 45):
        write(long_context, parts, stop_at, **given)
    write(long_context, parts, chapters=3, policy="full")
    assert parts.read_text() == whole.read_text()


@contextmanager
def interrupted_at(count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Press Ctrl-C after `count` pieces of text."""
    append, calls = TextFile.append, list[str]()

    def interrupted(file: Any, text: str) -> None:
        calls.append(text)
        append(file, text)
        if len(calls) == count:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TextFile, "append", interrupted)
        yield


def test_a_document_is_continued_after_ctrl_c(
    tmp_path: Path, cli: Cli, long_context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("write", long_context, str(tmp_path / "novel.txt"), "It was", "--max-new-tokens", "30", "--policy", "full")
    flags = (*flags, "--seed", "1", "--ignore-eos")
    with interrupted_at(20, monkeypatch):
        run = cli(*flags)
    assert (run.code, run.out) == (INTERRUPTED, "") and "the same command continues" in run.err
    assert "Traceback" not in run.err
    assert cli(*flags, "--quiet").err == ""
    again = cli(*flags)
    assert again.code == 0 and "is complete: 30 new tokens" in again.err


def test_more_tokens_are_counted_once_after_an_interruption(
    tmp_path: Path, cli: Cli, long_context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("write", long_context, str(tmp_path / "novel.txt"), "It was", "--policy", "full", "--ignore-eos", "--more")
    with interrupted_at(5, monkeypatch):
        assert cli(*flags, "8").code == INTERRUPTED
    for more, total in (("8", 8), ("8", 16), ("3", 19)):
        assert f"{total} new tokens, complete" in cli(*flags, more).err


def test_progress_of_an_earlier_version_is_read(tmp_path: Path, long_context: str) -> None:
    novel, progress = tmp_path / "novel.txt", tmp_path / "novel.txt.session" / "progress.json"
    write(long_context, novel, beginning="It was", sampling_params=SAMPLED, max_tokens=8)
    stored = json.loads(progress.read_text())
    del stored["more"], stored["goal"]
    progress.write_text(json.dumps(stored))
    done = write(long_context, novel, max_tokens=16)
    assert done is not None and done.new_tokens == 16


def test_a_document_with_chapters_is_extended_by_chapters(tmp_path: Path, cli: Cli, long_context: str) -> None:
    novel, outline = str(tmp_path / "novel.txt"), tmp_path / "outline.txt"
    outline.write_text("One\nTwo\n")
    flags = ("--outline", str(outline), "--chapter-tokens", "4", "--policy", "full")
    assert cli("write", long_context, novel, *flags).code == 0
    run = cli("write", long_context, novel, "--more", "5", "--policy", "full")
    assert run.code == 0 and "in 2 chapters; --chapters N" in run.err


@pytest.fixture(scope="module")
def document_folder(tmp_path_factory: pytest.TempPathFactory, long_context: str) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    write(long_context, folder / "novel.txt", prompt="Write.", sampling_params=SAMPLED, max_tokens=5, policy="full")
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
    flags: tuple[str, ...], words: tuple[str, ...], document_folder: Path, cli: Cli
) -> None:
    cli("write", "no-such-model", str(document_folder / "novel.txt"), *flags).fails_with(*words)


def test_edited_or_damaged_documents_are_refused(
    document_folder: Path, tmp_path: Path, cli: Cli, long_context: str
) -> None:
    new = str(tmp_path / "new.txt")
    cli("write", long_context, new).fails_with("the document has no start")
    cli("write", long_context, str(tmp_path / "no" / "new.txt"), "It").fails_with("there is no folder")
    shutil.copytree(document_folder, tmp_path / "copy")
    novel = tmp_path / "copy" / "novel.txt"
    more = ("write", long_context, str(novel), "--more", "5", "--policy", "full")
    novel.write_text("X" + novel.read_text()[1:] + "more")
    cli(*more[:4], "70", "--policy", "full")  # the five tokens are an incomplete turn, which is generated again
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
    cli("write", long_context, str(document_folder / "novel.txt"), *flags).fails_with("exists already and is continued")


def test_a_document_that_cannot_be_completed_is_refused(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "opt", "opt")  # learned positions, so that its context cannot be truncated
    with pytest.raises(ModelError, match="1024"):
        write(model, tmp_path / "a.txt", policy="full", prompt="It was", max_tokens=2000)
    llm = LLM("reference", policy="full", host_memory="4MiB")
    with pytest.raises(PoolFullError, match="4 MiB"):
        write_document(llm, tmp_path / "b.txt", "It was", max_tokens=3000)


def test_another_policy_or_unsupported_parameters_are_refused(
    document_folder: Path, tmp_path: Path, long_context: str
) -> None:
    llm = LLM(long_context, policy="infinigen", host_memory="32MiB")
    with pytest.raises(InputError, match="another number format or policy"):
        write_document(llm, document_folder / "novel.txt", max_tokens=9)
    with pytest.raises(InputError, match="num_beams is not supported"):
        write_document(llm, tmp_path / "a.txt", "It", SamplingParams(num_beams=2, temperature=0))
