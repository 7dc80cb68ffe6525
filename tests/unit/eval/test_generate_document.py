"""Test the script that writes a long document: chapters in order, and no loss by an interruption."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.scripts import load_example

from offload_rt import LLM

TOKENS = 10
HEADING = re.compile(r"\n\nCHAPTER (\d+)\n\n")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_example("generate_document")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("reference", policy="full")


@pytest.fixture
def document(tmp_path: Path, script: ModuleType) -> Path:
    path = tmp_path / "novel.txt"
    path.write_text(script.OPENING, encoding="utf-8")
    return path


def write(script: ModuleType, llm: LLM, path: Path, chapters: int) -> str:
    script.write_document(llm, path, chapters, TOKENS, 7)
    return path.read_text(encoding="utf-8")


def progress(script: ModuleType, llm: LLM, path: Path) -> Any:
    text = script.read_document(path)
    return script.progress(llm, text, script.headings(path, text))


def test_chapters_in_order_and_done_is_done(script: ModuleType, llm: LLM, document: Path) -> None:
    text = write(script, llm, document, 3)
    assert text.startswith(script.OPENING)
    assert HEADING.findall(text) == ["1", "2", "3"]
    assert all(len(part.strip()) > TOKENS // 2 for part in HEADING.split(text)[2::2])
    assert progress(script, llm, document)[0] == 3
    longer = write(script, llm, document, 4)
    assert longer.startswith(text)
    assert HEADING.findall(longer) == ["1", "2", "3", "4"]


def test_an_interrupted_document_goes_on_where_it_stopped(
    script: ModuleType, llm: LLM, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, calls = script.append, 0

    def stops(path: Path, text: str) -> None:
        nonlocal calls
        calls += 1
        if calls == TOKENS + 5:  # in the middle of chapter 2
            raise KeyboardInterrupt
        append(path, text)

    monkeypatch.setattr(script, "append", stops)
    with pytest.raises(KeyboardInterrupt):
        write(script, llm, document, 2)
    before = document.read_text(encoding="utf-8")
    chapter, written = progress(script, llm, document)
    assert chapter == 2
    assert 0 < written < TOKENS
    monkeypatch.setattr(script, "append", append)
    asked: list[int] = []
    stream = LLM.stream

    def counts(self: LLM, prompt: Any, params: Any) -> Any:
        asked.append(params.max_tokens)
        assert self.encode(before)[-5:] == prompt[-5:]  # the context is the document as it stands
        return stream(self, prompt, params)

    monkeypatch.setattr(LLM, "stream", counts)
    after = write(script, llm, document, 2)
    assert after.startswith(before)
    assert asked == [TOKENS - written]
    assert HEADING.findall(after) == ["1", "2"]


def test_headings_of_a_document_that_nobody_noted(script: ModuleType, llm: LLM, document: Path) -> None:
    """As it was written before there were notes, or edited since."""
    for text, places in (("Title", []), ("Title\n\nCHAPTER 1\n\n", [5])):
        document.write_text(text)
        assert script.headings(document, text) == places and progress(script, llm, document) == (len(places), 0)
    text = "Title\n\nCHAPTER 1\n\nOnce\n\nCHAPTER 102\n\nupon\n\nCHAPTER 1\n\na time"
    document.write_text(text)
    for notes in (None, "", "7\n", "x", "5 30\n"):
        if notes is not None:
            script.chapters_file(document).write_text(notes)
        assert progress(script, llm, document) == (1, len(llm.encode(text.split("CHAPTER 1\n\n", 1)[1])))


def test_headings_of_the_model_do_not_count(
    script: ModuleType, llm: LLM, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the next number, also where the script is started again."""

    def writes_headings(path: Path, text: str) -> None:
        with path.open("a", newline="") as file:
            file.write(text + ("" if text.startswith("\n\nCHAPTER") else "\n\nCHAPTER 2\n\n\r\n\n\nCHAPTER 3\n\n"))

    monkeypatch.setattr(script, "append", writes_headings)
    write(script, llm, document, 1)
    assert progress(script, llm, document)[0] == 1
    assert HEADING.findall(write(script, llm, document, 2)).count("2") > TOKENS
    places = script.headings(document, text := script.read_document(document))
    assert [text[place:].split()[1] for place in places] == ["1", "2"]
    script.chapters_file(document).write_text(f"{places[0]}\n{places[1]}\n{len(text)}\n")
    assert script.headings(document, text) == places, "noted, and the process ended before it was written"


def test_long_documents_keep_their_end_as_context(script: ModuleType, llm: LLM, document: Path) -> None:
    document.write_text("word and word " * 3000, encoding="utf-8")
    seen: list[int] = []

    class Recorder:
        geometry, encode = llm.geometry, llm.encode

        def stream(self, prompt: list[int], params: Any) -> list[Any]:
            seen.append(len(prompt))
            return []

    script.write_tokens(Recorder(), document, TOKENS, None)
    assert seen == [llm.geometry.max_positions - TOKENS]


def test_bad_input_is_one_line(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "novel.txt"
    monkeypatch.setattr("sys.argv", ["generate_document.py", "--out", str(out), "--start", str(tmp_path / "none.txt")])
    with pytest.raises(SystemExit, match=r"none\.txt.*No such file"):
        script.main()
    assert not out.exists()
