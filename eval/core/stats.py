"""Standard errors and paired bootstrap intervals over documents (windows of a book, questions, requests)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

DRAWS = 10_000

BATCH_NUMBERS = 1 << 22
"""Number of values that are resampled at once, to limit memory."""


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None. Return None if there is none."""
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def ratio(values: Array, weights: Array) -> Array:
    """Return sum(`values`) / sum(`weights`), summed over the last axis. The result is, for example, nats per token."""
    return np.asarray(values.sum(-1) / weights.sum(-1))


def ratio_error(values: ArrayLike, weights: ArrayLike) -> float:
    """Return the standard error of sum(values) / sum(weights) by the delta method (0 if n = 1).

    Both arrays are `[n]`.
    """
    v, w = np.asarray(values, float), np.asarray(weights, float)
    if len(v) < 2:
        return 0.0
    residual = v - (v.sum() / w.sum()) * w
    return float(math.sqrt(len(v) / (len(v) - 1) * (residual**2).sum()) / w.sum())


def paired_bootstrap(
    values: ArrayLike,
    base: ArrayLike,
    weights: ArrayLike,
    *,
    change: Callable[[Array, Array], Array] = np.subtract,
) -> Interval:
    """Return the paired bootstrap interval of change(ratio(values), ratio(base)), computed with
    `scipy.stats.bootstrap`.

    If there is only one document, both ends of the interval are the value itself.

    Args:
        values: Scores of n documents, `[n]`.
        base: Baseline scores of the same documents, `[n]`.
        weights: Weights of the documents, `[n]`.
        change: Function that compares the two ratios.
    """
    from scipy.stats import bootstrap

    v, b, w = (np.asarray(x, float) for x in (values, base, weights))
    assert len(v) == len(b) == len(w) > 0

    def statistic(mine: Array, other: Array, sizes: Array, axis: int = -1) -> Array:
        assert axis == -1
        return change(ratio(mine, sizes), ratio(other, sizes))

    value = float(statistic(v, b, w))
    if len(v) == 1:
        return Interval(value, value, value)
    batch = max(1, BATCH_NUMBERS // len(v))
    drawn = bootstrap(
        (v, b, w),
        statistic,
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=DRAWS,
        batch=batch,
        rng=0,
    )
    return Interval(value, float(drawn.confidence_interval.low), float(drawn.confidence_interval.high))


def perplexity_change(nats: Array, base: Array) -> Array:
    """Return the relative change in perplexity, computed from nats per token: exp(nats - base) - 1."""
    return np.expm1(nats - base)


def share_error(right: int, asked: int) -> float:
    """Return the binomial standard error of the accuracy `right` / `asked`."""
    if asked == 0:
        return 0.0
    # Move counts of 0 or `asked` inward by 0.5, so that the error is never 0.
    share = min(max(right, 0.5), asked - 0.5) / asked if asked > 1 else 0.5
    return math.sqrt(share * (1 - share) / asked)
