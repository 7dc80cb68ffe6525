"""Test how the reference model is trained, with small inputs: data, loss weights and refused arguments.

`test_train_reference.py` is slow and runs with `make test-training`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.training import TINY, VOCABULARY, write_books

# isort: split
# The training's scripts, which `support.training` puts on the path.
import measure
from build import build_model, weighted_loss
from data import (
    HELD_OUT_BOOKS,
    TEST_BOOK,
    Encoder,
    Mixture,
    load_corpus,
    make_batch,
    names,
    train_tokenizer,
    training_books,
)
from train import main


@pytest.fixture(scope="module")
def books(tmp_path_factory) -> Path:
    return write_books(tmp_path_factory.mktemp("books"))


@pytest.fixture(scope="module")
def tokenizer(books):
    return train_tokenizer(training_books(books), VOCABULARY)


@pytest.fixture(scope="module")
def corpus(books, tokenizer):
    return load_corpus(training_books(books), tokenizer)


def test_held_out_books_are_never_read(books, tokenizer, corpus):
    assert {book.name for book in training_books(books)} == {"one.txt", "two.txt", "three.txt"}
    text = tokenizer.decode(corpus.ids.tolist())
    assert "quarry" in text
    assert "forbidden" not in text
    assert TEST_BOOK in HELD_OUT_BOOKS


def test_batches_contain_no_held_out_name(tokenizer, corpus):
    encoder, seen = Encoder(tokenizer), set()
    for step in range(6):
        ids, _ = make_batch(7, step, 4, 512, Mixture(recall=1.0, copy=0.0), corpus, encoder)
        seen.update(word for row in ids for word in tokenizer.decode(row.tolist()).replace("'s", "").split())
    words = {word.strip(".") for word in seen}
    assert not words & set(names(True))
    assert len(words & set(names(False))) > 50  # check that the assertion above saw any names


def test_learning_rate_warms_up_and_decays():
    config = replace(TINY, total_tokens=100 * 1024, warmup_steps=10, decay_share=0.5)
    rates = [config.learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(1e-3)
    assert rates[10:50] == [1e-2] * 40
    assert all(later < earlier for earlier, later in pairwise(rates[51:]))
    assert rates[-1] == pytest.approx(1e-2 * 0.05, rel=0.2)


def test_loss_counts_weighted_tokens_only():
    model = build_model(TINY, None)
    ids = torch.randint(0, VOCABULARY, (1, 32))
    weights = torch.zeros(1, 32)
    assert weighted_loss(model, ids, weights) == 0
    weights[0, 7] = 3.0
    expected = -model(ids).logits.log_softmax(-1)[0, 6, ids[0, 7]] * 3 / 31
    torch.testing.assert_close(weighted_loss(model, ids, weights), expected)


def test_command_line_names_the_invalid_argument(books, tmp_path, capsys):
    assert main(["cpu", "--data", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    assert "no .txt file to train on" in capsys.readouterr().err
    assert main(["cpu", "--data", str(books), "--out", str(tmp_path / "run"), "--tokenizer", str(tmp_path)]) == 2
    assert "holds no tokenizer.json" in capsys.readouterr().err


def test_missing_files_are_reported_before_the_measurements(books, tmp_path, capsys):
    given = [str(tmp_path), "--data", str(books), "--pinned-text"]
    assert measure.main([*given, str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err
    (tmp_path / "README.md").write_text("A card without tables.")
    assert measure.main([*given, str(books / "one.txt")]) == 2
    assert "lacks the marks" in capsys.readouterr().err
    (tmp_path / "README.md").write_text(f"{measure.BEGIN}{measure.END}")
    assert measure.main([*given, str(books / "one.txt")]) == 2
    assert "config.json does not exist" in capsys.readouterr().err
