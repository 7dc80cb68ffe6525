"""Test the demo that finds a chapter in a book, prefills it once, answers questions about it and continues it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.scripts import load_example
from support.tiny_gguf import write_tiny_gguf

from offload_rt import InputError

BOOK = "A book\n\nCHAPTER I THE INN\n\nhe came.\n\nCHAPTER II THE FEN\n\nthe ferry.\nhe rode.\n"
DOUBTS = ("Who came?", "Where to?")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_example("read_chapter")


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("instruct") / "model.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture
def run_script(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    (tmp_path / "book.txt").write_text(BOOK)

    def main(*flags: str) -> None:
        monkeypatch.setattr(sys, "argv", ["read_chapter.py", "--document", str(tmp_path / "book.txt"), *flags])
        script.main()

    return main


def test_chapters_end_where_the_next_begins(script: ModuleType) -> None:
    assert script.chapter_of(BOOK, "CHAPTER I THE INN") == "CHAPTER I THE INN\n\nhe came.\n\n"
    assert script.chapter_of(BOOK, "CHAPTER II") == "CHAPTER II THE FEN\n\nthe ferry.\nhe rode.\n"
    for heading in ("CHAPTER X", ""):
        with pytest.raises(InputError, match=f"no line of the document begins with '{heading}'"):
            script.chapter_of(BOOK, heading)


def test_chapter_is_computed_once_for_questions_and_continuation(
    script: ModuleType, run_script: object, instruct: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert callable(run_script)
    asked = [part for doubt in DOUBTS for part in ("--question", doubt)]
    run_script("--model", str(instruct), "--chapter", "CHAPTER II", "--max-new-tokens", "4", *asked)
    err = " ".join(capfd.readouterr().err.split())
    places = [err.index(f"> {turn}") for turn in (*DOUBTS, script.CONTINUE)]
    assert places == sorted(places)
    assert err.count("computed before;") == 3 and "Statistics" in err
    first, *later = (part.rsplit(" ", 1)[1] for part in err.split(" of them computed before")[:-1])
    assert first == "0" and all(int(reused) > len("CHAPTER II THE FEN") for reused in later)
    assert "Loading" not in err and "Converting" not in err


def test_unreadable_documents_are_reported_in_one_line(run_script: object, instruct: Path) -> None:
    assert callable(run_script)
    with pytest.raises(SystemExit, match=r"^read_chapter: no line of the document begins with 'PART'"):
        run_script("--model", str(instruct), "--chapter", "PART")
    with pytest.raises(SystemExit, match=r"^read_chapter: reference has no chat template: give an instruct model"):
        run_script("--model", "reference", "--chapter", "CHAPTER I")


def test_ctrl_c_ends_the_script(script: ModuleType, run_script: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    assert callable(run_script)
    monkeypatch.setattr(script, "LLM", interrupted)
    with pytest.raises(SystemExit, match="interrupted"):
        run_script("--model", "any", "--chapter", "CHAPTER I")


def test_environment_quiets_transformers_before_its_import(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers")
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")
    script.quiet_transformers()
    assert (os.environ["TRANSFORMERS_VERBOSITY"], os.environ["HF_HUB_DISABLE_PROGRESS_BARS"]) == ("error", "0")
