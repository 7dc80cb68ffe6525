"""Measure, at each position, how far the next-token distribution of a policy is from that of full attention.

Perplexity can hide errors: a higher probability of one token can make up for a lower probability of another. Such
errors show in the KL divergence KL(full || policy) over the vocabulary, and in how often both agree on the most
probable token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..core.report import Column, Report, Row, RowStore
from ..core.stats import mean_or_none, paired_bootstrap, perplexity_change
from ..core.variants import Text, Variant, text_digest
from .perplexity import PerplexityConfig, Window, costs, cut_windows

if TYPE_CHECKING:
    from ..core.model_under_test import Evaluation, ModelUnderTest

FULL = Variant("full")


@dataclass(frozen=True)
class Divergence:
    """How one policy differs from full attention at the n scored positions of a window."""

    kl: list[float] = field(default_factory=list)  # KL(full || policy) of the next-token distributions in nats, `[n]`
    agrees: list[int] = field(default_factory=list)  # 1 if both have the same most probable token, else 0, `[n]`

    def add(self, full: torch.Tensor, policy: torch.Tensor) -> None:
        # Use float64, because the terms of a small divergence nearly cancel.
        p, q = full.double(), policy.double()
        self.kl.append(float((p.exp() * (p - q)).sum()))
        self.agrees.append(int(p.argmax() == q.argmax()))


class FullAttention:
    """Log-probabilities under full attention on one window, computed once for all policies."""

    def __init__(self, tested: ModelUnderTest, text: Text) -> None:
        self._tested, self._text = tested, text

    @cached_property
    def logprobs(self) -> torch.Tensor:
        """Log-probabilities `[n, V]` at each scored position, float32 on the CPU."""
        found: list[torch.Tensor] = []
        self._tested.score_observed(FULL, self._text, lambda row: found.append(row.float().cpu()))
        return torch.stack(found)


def measure(tested: ModelUnderTest, variant: Variant, text: Text, full: FullAttention) -> Row:
    divergence, rows = Divergence(), iter(full.logprobs)
    scored = tested.score_observed(variant, text, lambda row: divergence.add(next(rows), row.float().cpu()))
    return {**costs([scored]), "nats": sum(scored.nats), "tokens": len(scored.nats), **asdict(divergence)}


def summary(rows: Sequence[Row], base: Sequence[Row]) -> Row:
    """Summarize the rows of a variant. Bootstrap intervals (95 %) are computed over windows.

    `base` contains the rows of full attention on the same windows.
    """
    tokens = [row["tokens"] for row in rows]
    kl, agreed = [sum(row["kl"]) for row in rows], [sum(row["agrees"]) for row in rows]
    nothing, times = [0.0] * len(rows), [row.get("seconds") for row in rows]
    mean, agreement = paired_bootstrap(kl, nothing, tokens), paired_bootstrap(agreed, nothing, tokens)
    change = paired_bootstrap(
        [row["nats"] for row in rows], [row["nats"] for row in base], tokens, change=perplexity_change
    )
    return {
        "windows": len(rows),
        "scored_tokens": sum(tokens),
        "kl": mean.value,
        "kl_interval": [mean.low, mean.high],
        "kl_p99": float(np.percentile(np.concatenate([row["kl"] for row in rows]), 99)),
        "top_1": agreement.value,
        "top_1_interval": [agreement.low, agreement.high],
        "against_full_perplexity": change.value,
        "against_full_perplexity_low": change.low,
        "against_full_perplexity_high": change.high,
        "against_full_shown": f"{change.value:+.2%} [{change.low:+.2%}, {change.high:+.2%}]",
        **{name: mean_or_none(row[name] for row in rows) for name in COSTS},
        "seconds": None if None in times else sum(times),
    }


COSTS = ("attended", "fetched", "sparse_attended", "sparse_fetched")


def measure_all(evaluation: Evaluation, variants: Sequence[Variant], config: PerplexityConfig) -> list[Row]:
    """Measure every variant, window by window.

    Variants with equal engine settings share one prefill of each window. If the deadline passes, the summary covers the
    windows that have been measured for all variants by then.
    """
    tested, store = evaluation.tested, RowStore(evaluation.out)
    shared = {"suite": "divergence", **tested.identity, "text": text_digest(evaluation.text), **asdict(config)}
    every = [FULL, *(variant for variant in variants if variant != FULL)]
    found: list[list[Row]] = []
    windows: list[Window] = cut_windows(tested, evaluation.text, config)
    for number, window in enumerate(windows):
        full = FullAttention(tested, window.text)
        rows: list[Row] = []
        for variant in every:
            key = shared | {"variant": tested.key(variant), "window": number}
            if evaluation.deadline_passed() and store.get(key) is None:
                break
            rows.append(store.once(key, partial(measure, tested, variant, window.text, full)))
            evaluation.say(f"{evaluation.name}, window {number}, {variant.label}: KL {np.mean(rows[-1]['kl']):.2e}")
        if len(rows) == len(every):
            found.append(rows)
    if not found:
        return []
    by_variant = list(zip(*found, strict=True))
    return [
        tested.describe(variant) | {"text": evaluation.name, "context": config.context} | summary(mine, by_variant[0])
        for variant, mine in zip(every, by_variant, strict=True)
    ]


def run_divergence(evaluation: Evaluation, variants: Sequence[Variant], config: PerplexityConfig) -> Report:
    rows = measure_all(evaluation, variants, config)
    title = f"Divergence of {evaluation.tested.name} from full attention"
    report = Report("divergence", title, evaluation.about(config), COLUMNS, rows, NOTES)
    report.write(evaluation.out)
    return report


COLUMNS = (
    Column("model", "model"),
    Column("text", "text"),
    Column("context", "context"),
    Column("policy", "variant"),
    Column("windows", "windows"),
    Column("attended", "sparse_attended", ".1%"),
    Column("fetched", "sparse_fetched", ".1%"),
    Column("KL mean", "kl", ".5f"),
    Column("99th percentile", "kl_p99", ".4f"),
    Column("same top token", "top_1", ".2%"),
    Column("perplexity against full [95 %]", "against_full_shown"),
)

NOTES = (
    "KL is KL(full || policy) of the next-token distribution in nats. The row of `full` compares full attention with",
    "itself. Intervals are bootstrap intervals over windows.",
)
