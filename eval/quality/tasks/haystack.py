"""RULER's tasks with several needle values and several queries, in versions that need no downloads.

The packaged novel is used instead of RULER's essays, and a regular expression instead of the trained sentence splitter.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any
from unittest.mock import patch

SENTENCE_END = re.compile(r"(?<=[.!?][\"'”’])\s+(?=[\"'“‘A-Z])|(?<=[.!?])\s+(?=[\"'“‘A-Z])")

SAMPLES = 500
"""Default number of documents per task and length, as in RULER; "samples" in `metadata` overrides it."""


def sentences(text: str) -> list[str]:
    return SENTENCE_END.split(text)


def multivalue(**metadata: Any) -> Any:
    return _hidden(metadata, num_needle_v=4)


def multiquery(**metadata: Any) -> Any:
    return _hidden(metadata, num_needle_q=4)


def _hidden(metadata: dict[str, Any], **needles: int) -> Any:
    """Create documents with RULER's generator, for each length in `max_seq_lengths` (in tokens).

    `needles` are passed to the generator as arguments.
    """
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
    from lm_eval.tasks.ruler.common_utils import process_results as score

    found: dict[str, float] = score(document, results)
    return found


def aggregate_metrics(scores: list[float]) -> float:
    """Return the mean of RULER's scores for one document length, or -1 if no document has this length."""
    from lm_eval.tasks.ruler.common_utils import aggregate_metrics as mean

    return float(mean(scores))
