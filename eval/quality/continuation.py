"""Compare policies on one passage of a book: transfer volume, attended fraction, device memory and log-probability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from ...llm import LLM
from ...outputs import Stats
from ..core.model_under_test import text_digest
from ..core.report import Column, Report, Row

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "infinigen, default": ("infinigen", {}),
    "infinigen, preset rows": ("infinigen", {"preset": "rows"}),
    "infinigen, preset paper": ("infinigen", {"preset": "paper"}),
}

COLUMNS = (
    Column("policy", "policy"),
    Column("dense layers", "dense_layers"),
    Column("MB over the link per token", "link_mb", ".3f"),
    Column("MB per selecting layer and token", "sparse_link_mb", ".4f"),
    Column("of full", "sparse_share", ".1%"),
    Column("link fraction", "fetched_fraction", ".1%"),
    Column("attended fraction", "exact_fraction", ".1%"),
    Column("missed mass", "missed_mass", ".1%"),
    Column("worst layer", "missed_mass_worst_layer", ".1%"),
    Column("scoring keys MB", "scoring_mb", ".2f"),
    Column("resident rows and staging MB", "resident_mb", ".2f"),
    Column("weights MB", "weights_mb", ".1f"),
    Column("log-probability per token", "logprob", ".4f"),
    Column("ms per token", "milliseconds", ".2f"),
)


@dataclass(frozen=True)
class ScoredPassage:
    """Token ids of a passage. The last `scored` tokens are predicted, the others are the prompt."""

    tokens: list[int]
    scored: int

    @classmethod
    def of(cls, llm: LLM, text: str, context: int, scored: int, start: float) -> ScoredPassage:
        """Take `context` tokens from the relative position `start` on. Raises InputError if the text is too short."""
        ids = llm.encode(text)
        first = int(start * len(ids))
        tokens = ids[first : first + context]
        if not 0 < scored < len(tokens) or len(tokens) < context:
            raise InputError(f"the text has {len(ids)} tokens: too few for {context} from {start:.0%} of it on")
        return cls(tokens, scored)


def measure(model: str, passage: ScoredPassage, policy: str, options: Mapping[str, Any]) -> tuple[float, Stats]:
    """Return the mean natural log-probability of the scored tokens, and the statistics of the run."""
    llm = LLM(model, policy=policy, policy_options=options)
    split = len(passage.tokens) - passage.scored
    [score] = llm.score([passage.tokens[:split]], [passage.tokens[split:]])
    return sum(score.logprobs) / passage.scored, score.stats


def compare(model: str, passage: ScoredPassage, runs: Mapping[str, tuple[str, dict[str, Any]]]) -> list[Row]:
    """Return a row for each of `runs`. The first run is the baseline of the transfer volume."""
    rows: list[Row] = []
    for name, (policy, options) in runs.items():
        logprob, stats = measure(model, passage, policy, options)
        steps, selecting = len(stats.attended_by_step), stats.layers - len(stats.dense_layers)
        link = stats.h2d_bytes / steps
        # All KV entries have the same size, so fractions of entries are fractions of bytes.
        per_layer = link / (stats.fetched_fraction * stats.layers) if stats.fetched_fraction else 0.0
        sparse = per_layer * stats.sparse_fetched_fraction if selecting else None
        rows.append(
            {
                "policy": name,
                "options": options,
                "dense_layers": list(stats.dense_layers) if selecting else "all",
                "link_mb": link / 1e6,
                "sparse_link_mb": None if sparse is None else sparse / 1e6,
                "sparse_share": None if sparse is None else sparse / (rows[0]["link_mb"] * 1e6 / stats.layers),
                "scoring_mb": stats.scoring_bytes_device / 1e6,
                "resident_mb": stats.kv_bytes_device / 1e6,
                "weights_mb": stats.weight_bytes / 1e6,
                "logprob": logprob,
                "milliseconds": 1e3 * stats.decode_seconds / steps,
                **{key: getattr(stats, key) for key in SHARED},
            }
        )
    return rows


SHARED = ("fetched_fraction", "exact_fraction", "missed_mass", "missed_mass_worst_layer")


def run_continuation(
    model: str, text: str, name: str, context: int | None, scored: int = 256, start: float = 0.3
) -> Report:
    """Run the comparison on a passage of `text`.

    Args:
        model: Model name or folder.
        text: Text.
        name: Name of the text in the report.
        context: Number of tokens of the passage; None takes the maximum context length of the model.
        scored: Number of tokens at the end that are decoded one by one and scored.
        start: Start of the passage as a fraction of the text.

    Raises:
        InputError: If the text is too short.
    """
    llm = LLM(model, policy="full")
    context = context or llm.geometry.max_positions
    passage = ScoredPassage.of(llm, text, context, scored, start)
    about = {
        "model": model,
        "text": f"{name} ({text_digest(text)}), from {start:.0%} of it on",
        "context": f"{context} tokens, the last {scored} decoded one by one and scored",
    }
    return Report("side_by_side", "One passage under four policies", about, COLUMNS, compare(model, passage, RUNS))
