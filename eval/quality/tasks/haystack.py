"""RULER's several values and several queries in a haystack that needs no download: the packaged public-domain novel in
place of the essays, sentences cut by a regular expression in place of a trained splitter."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any
from unittest.mock import patch

SENTENCE_END = re.compile(r"(?<=[.!?][\"'”’])\s+(?=[\"'“‘A-Z])|(?<=[.!?])\s+(?=[\"'“‘A-Z])")

SAMPLES = 500
"""Documents of a task and length, as in RULER; `metadata` may say "samples": fewer are made faster."""


def sentences(text: str) -> list[str]:
    """`text` cut behind marks that end a sentence."""
    return SENTENCE_END.split(text)


def multivalue(**metadata: Any) -> Any:
    """One key with four values, all asked for."""
    return _hidden(metadata, num_needle_v=4)


def multiquery(**metadata: Any) -> Any:
    """Four keys with a value each, all asked for."""
    return _hidden(metadata, num_needle_q=4)


def _hidden(metadata: dict[str, Any], **needles: int) -> Any:
    """Documents of every length in `max_seq_lengths` (tokens), by RULER's own generator."""
    from lm_eval.tasks.ruler import niah_utils, prepare_niah
    from lm_eval.tasks.ruler.common_utils import DEFAULT_SEQ_LENGTHS, get_tokenizer, resolve_tokenizer_name

    book = files("offload_rt").joinpath("data", "black_arrow.txt").read_text("utf-8")
    tokenizer = get_tokenizer(resolve_tokenizer_name(metadata))
    with patch.object(prepare_niah, "cached_sent_tokenize", sentences):
        return niah_utils.download_dataset(
            prepare_niah.generate_samples(
                book.split(),
                tokenizer,
                max_seq_length=length,
                type_haystack="essay",
                type_needle_k="words",
                type_needle_v="numbers",
                template=niah_utils.TEMPLATE,
                num_samples=int(metadata.get("samples", SAMPLES)),
                **needles,
            )
            for length in metadata.get("max_seq_lengths", DEFAULT_SEQ_LENGTHS)
        )


def process_results(document: dict[str, Any], results: list[str]) -> dict[str, float]:
    """RULER's own score of a document, under its length."""
    from lm_eval.tasks.ruler.common_utils import process_results as score

    found: dict[str, float] = score(document, results)
    return found


def aggregate_metrics(scores: list[float]) -> float:
    """RULER's own mean, -1 where no document has the length."""
    from lm_eval.tasks.ruler.common_utils import aggregate_metrics as mean

    return float(mean(scores))
