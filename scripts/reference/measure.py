"""Measure a reference checkpoint and write measured.json and the tables of its README.md (between two markers).

    python scripts/reference/measure.py offload_rt/reference/llama --data ../shared/data/books \\
        --pinned-text offload_rt/data/black_arrow.txt
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from data import TEST_BOOK, VALIDATION_BOOK, Encoder, load_corpus
from evaluate import (
    Answer,
    bits_per_byte,
    by_distance,
    by_kind,
    nats_by_context,
    pinned_scores,
    recall,
    scored_bytes,
    share_right,
)
from rich.console import Console
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from offload_rt.eval.core.stats import paired_bootstrap

BASE_CONTEXT = 512
SCORED = 128  # tokens at the end of a window; at context c they have c - 128 to c - 1 predecessors
TOKENS_PER_FACT = 40  # approximate, including the question; if it were less, the longer kinds would not fit
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def sha256_of(folder: Path) -> dict[str, str]:
    """Return the digests of config.json and of all weight and tokenizer files in the folder."""
    files = sorted([*folder.glob("*.safetensors"), folder / "tokenizer.json", folder / "config.json"])
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def load_model(folder: Path) -> tuple[PreTrainedModel, Tokenizer]:
    # Computing products in bf16 would add noise.
    auto: Any = AutoModelForCausalLM  # untyped in transformers
    model: PreTrainedModel = auto.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    return model.train(False), Tokenizer.from_file(str(folder / "tokenizer.json"))


def measure_text(
    model: PreTrainedModel, tokenizer: Tokenizer, book: Path, contexts: Sequence[int], windows: int
) -> dict[str, Any]:
    """Measure the bits per byte of the same tokens at each context length, and the difference from `BASE_CONTEXT`."""
    ids = load_corpus([book], tokenizer).ids[:-1]
    sample = {"windows": windows, "scored": SCORED}
    nats = nats_by_context(model, ids, contexts, batch=8, **sample)
    sizes = scored_bytes(tokenizer, ids, max(contexts), **sample)
    base = nats[BASE_CONTEXT]
    return {
        "book": book.name,
        "tokens_scored": windows * sample["scored"],
        "windows": windows,
        "by_context": {str(c): round(bits_per_byte(nats[c], sizes), 4) for c in contexts},
        f"difference_from_{BASE_CONTEXT}": {
            str(c): [round(x, 4) for x in (change.value, change.low, change.high)]
            for c in contexts
            if c != BASE_CONTEXT
            for change in [paired_bootstrap(nats[c], base, sizes * math.log(2))]
        },
    }


def measure_recall(
    model: PreTrainedModel, tokenizer: Tokenizer, book: Path, lengths: Sequence[int], counts: Sequence[int], asked: int
) -> dict[str, Any]:
    """Measure recall with full attention, using held-out names and text from a held-out book."""
    corpus, encoder = load_corpus([book], tokenizer), Encoder(tokenizer)
    found: dict[int, dict[int, list[Answer]]] = {}
    for length in lengths:
        found[length] = {
            n: recall(model, corpus, encoder, length=length, facts=n, passages=asked // n, seed=11)
            for n in counts
            if n * TOKENS_PER_FACT <= length
        }
    merged = {length: [a for answers in parts.values() for a in answers] for length, parts in found.items()}
    edges = [0, *(2**i for i in range(6, max(lengths).bit_length()))]
    return {
        "questions_per_cell": asked,
        "by_length_and_facts": {
            str(length): {str(n): round(share_right(answers), 3) for n, answers in parts.items()}
            for length, parts in found.items()
        },
        "by_length_and_kind": {
            str(length): {kind: round(share, 3) for kind, share in by_kind(answers).items()}
            for length, answers in merged.items()
        },
        "by_distance": {
            band: {"right": round(share, 3), "questions": count}
            for band, (share, count) in by_distance([a for part in merged.values() for a in part], edges).items()
        },
    }


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def tables(measured: dict[str, Any]) -> str:
    text, asked = measured["bits_per_byte"], measured["recall"]
    differences = text[f"difference_from_{BASE_CONTEXT}"]
    rows = []
    for context, bits in text["by_context"].items():
        value = differences.get(context)
        rows.append([context, f"{bits:.3f}", f"{value[0]:+.4f} [{value[1]:+.4f}, {value[2]:+.4f}]" if value else "-"])
    lengths = asked["by_length_and_facts"]
    counts = list(lengths[max(lengths, key=int)])
    kinds = list(dict.fromkeys(kind for row in asked["by_length_and_kind"].values() for kind in row))
    by_length = [
        [
            length,
            *(lengths[length].get(n, "-") for n in counts),
            *(asked["by_length_and_kind"][length].get(k, "-") for k in kinds),
        ]
        for length in lengths
    ]
    by_band = [[band, cell["right"], cell["questions"]] for band, cell in asked["by_distance"].items()]
    return "\n\n".join(
        [
            f"Bits per byte on `{text['book']}` (never trained on), the same {text['tokens_scored']:,} tokens for each "
            f"context length c (c - {SCORED} to c - 1 tokens before each); difference from {BASE_CONTEXT} with its "
            f"95 % paired bootstrap interval ({text['windows']} windows):",
            _table(["context", "bits per byte", f"minus that at {BASE_CONTEXT}"], rows),
            "Recall, full attention, held-out names, all answers of a question right in every token "
            f"({asked['questions_per_cell']} questions for each number of facts):",
            _table(["passage length", *(f"{n} facts" for n in counts), *kinds], by_length),
            "By distance from the first statement to the first answer, in tokens, all lengths together:",
            _table(["distance", "right", "questions"], by_band),
        ]
    )


def write_card(folder: Path, measured: dict[str, Any]) -> None:
    """Write measured.json, and the part of README.md between the markers.

    Raise ValueError if README.md has no markers.
    """
    (folder / "measured.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    before, after = _around_tables(folder)
    (folder / "README.md").write_text(f"{before}{BEGIN}\n\n{tables(measured)}\n\n{END}{after}", encoding="utf-8")


def _around_tables(folder: Path) -> tuple[str, str]:
    """Return the parts of README.md before and after the markers. Raise ValueError if there are no markers."""
    card = folder / "README.md"
    before, begin, rest = card.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{card} lacks the marks {BEGIN} and {END}")
    return before, after


def _check_files(folder: Path, book: Path) -> None:
    _around_tables(folder)
    for path in (folder / "config.json", folder / "tokenizer.json", book):
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkpoint with a README.md that has the two marks")
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {TEST_BOOK} and {VALIDATION_BOOK}")
    parser.add_argument("--pinned-text", type=Path, required=True, help="the text that the pinning test scores")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, BASE_CONTEXT, 1024, 2048])
    parser.add_argument("--facts", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--windows", type=int, default=400)
    parser.add_argument("--questions", type=int, default=192)
    args = parser.parse_args(arguments)
    console = Console(stderr=True)
    try:  # before the measurements, which take minutes
        pinned_text = args.pinned_text.read_text(encoding="utf-8")
        _check_files(args.folder, args.data / TEST_BOOK)
    except (OSError, ValueError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 2
    model, tokenizer = load_model(args.folder)
    with console.status("bits per byte"):
        text = measure_text(model, tokenizer, args.data / TEST_BOOK, args.contexts, args.windows)
    with console.status("recall"):
        asked = measure_recall(model, tokenizer, args.data / TEST_BOOK, args.contexts, args.facts, args.questions)
    pinned = pinned_scores(model, tokenizer, pinned_text)
    measured = {
        "architecture": model.config.model_type,
        "parameters": sum(p.numel() for p in model.parameters()),
        "sha256": sha256_of(args.folder),
        "bits_per_byte": text,
        "recall": asked,
        "pinned": {"bits_per_byte": pinned.bits_per_byte, "right": pinned.right, "asked": pinned.asked},
    }
    write_card(args.folder, measured)
    console.print(tables(measured), markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
