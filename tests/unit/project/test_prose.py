"""Test the prose checks in `scripts/prose.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def prose_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", Path(__file__).parents[3] / "scripts" / "prose.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "text",
    [
        "What a layer selected is copied.",
        "The blocks of what lies on the disk are read.",
        "Whoever waits gets the block that nobody reads.",
        "Where there is no GPU, the CPU computes.",
        "The pool is given back anew.",
    ],
)
def test_obscure_constructions_are_found(prose_script: ModuleType, text: str) -> None:
    assert prose_script.PATTERN.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "Return the selected token indices.",
        "If the pool is full, wait until another engine frees blocks.",
        "Padding entries are zero, where `n` is the number of tokens.",
    ],
)
def test_plain_sentences_pass(prose_script: ModuleType, text: str) -> None:
    assert not prose_script.PATTERN.search(text)


def test_docstrings_comments_and_messages_are_read(prose_script: ModuleType) -> None:
    source = '"""The first text of this module."""\n\nx = 1  # a comment\nraise ValueError("a message of five words")\n'
    assert [line for line, _ in prose_script.python_prose(source)] == [1, 4, 3]
    assert [text for _, text in prose_script.markdown_prose("Text\n\n```\ncode\n```\n\nMore")][::2][0] == "Text"
