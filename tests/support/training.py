"""A reference training run that takes only seconds, with generated books and a small configuration."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

SCRIPTS = Path(__file__).parents[2] / "scripts" / "reference"
sys.path.insert(0, str(SCRIPTS))

from config import ReferenceShape, Stage, TrainConfig  # noqa: E402
from data import HELD_OUT_BOOKS  # noqa: E402

VOCABULARY = 320
TINY = TrainConfig(
    shape=ReferenceShape(vocab_size=VOCABULARY, layers=1, hidden=64, mlp=64, heads=1, kv_heads=1, max_positions=512),
    stages=(Stage(0.5, ((256, 1.0),)), Stage(1.0, ((256, 0.5), (512, 0.5)))),
    total_tokens=8 * 1024,
    tokens_per_step=1024,
    peak_lr=1e-2,
    warmup_steps=2,
    checkpoint_every=3,
    evaluate_every=4,
    evaluate_lengths=(512,),
    evaluate_passages=2,
)


def write_books(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    words = ("the", "a", "of", "and", "river", "house", "walked", "slowly", "spoke", "with", "door", "letter", "never")
    for name, own in (("one.txt", "heron"), ("two.txt", "lantern"), ("three.txt", "quarry")):
        sentences = [" ".join(rng.choice([*words, own], size=9)).capitalize() + "." for _ in range(400)]
        (folder / name).write_text(" ".join(sentences), encoding="utf-8")
    for name in HELD_OUT_BOOKS:
        (folder / name).write_text("Zyxwvut forbidden words. " * 200, encoding="utf-8")
    return folder
