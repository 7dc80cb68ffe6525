"""Test the simulated formats of KV caches: their definitions, the residual, and measurements against transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers.cache_utils import DynamicLayer

from offload_rt.eval.core.model_under_test import Evaluation, ModelUnderTest
from offload_rt.eval.quality.kv_formats import (
    FORMATS,
    FormattedLayer,
    PublishedFormat,
    kivi,
    per_channel,
    per_token,
    rotated,
    run_kv_formats,
)
from offload_rt.eval.quality.perplexity import PerplexityConfig

BOOK = Path(__file__).parents[3] / "offload_rt" / "data" / "black_arrow.txt"


def rounded(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Round the numbers of one group to 2^bits values between their minimum and their maximum."""
    low, high = numbers.min().item(), numbers.max().item()
    step = (high - low) / (2**bits - 1)
    return torch.add(((numbers - low) / step).round() * step, low)


def test_per_token_groups_are_channels_and_per_channel_groups_are_tokens() -> None:
    rows = torch.randn(1, 2, 64, 32, dtype=torch.float64)
    token, channel = per_token(4, 16)(rows), per_channel(2, 32)(rows)
    # The minimum and the step are stored in float16, which the definition ignores.
    torch.testing.assert_close(token[0, 1, 5, 16:], rounded(rows[0, 1, 5, 16:], 4), rtol=0, atol=0.01)
    torch.testing.assert_close(channel[0, 1, 32:, 7], rounded(rows[0, 1, 32:, 7], 2), rtol=0, atol=0.01)


def test_rotation_is_undone_and_spreads_an_outlier() -> None:
    rows = torch.randn(1, 1, 8, 64)
    torch.testing.assert_close(rotated(lambda exact: exact)(rows), rows)
    rows[..., 3] = 100.0
    errors = [(rounding(rows) - rows)[..., 4:].norm() for rounding in (per_token(4), rotated(per_token(4)))]
    assert errors[1] < errors[0]


def test_new_tokens_stay_exact_until_newer_tokens_arrive() -> None:
    exact, format = DynamicLayer(), PublishedFormat("zeros", torch.zeros_like, torch.zeros_like, 4, 6)
    exact.update(torch.ones(1, 1, 13, 2), torch.ones(1, 1, 13, 2))
    layer, token = FormattedLayer(exact, format), torch.ones(1, 1, 1, 2)
    for stored, *zeros in ((13, 12, 7), (14, 12, 8), (15, 12, 9), (16, 16, 10), (17, 16, 11)):
        for part, count in zip(layer.update(token, token), zeros, strict=True):
            assert part[0, 0, :, 0].tolist() == [0.0] * count + [1.0] * (stored + 1 - count)
    assert exact.keys is not None and exact.keys.min() == 1, "the prompt's cache was changed"


def test_kivi_keeps_the_newest_tokens_and_rounds_keys_along_tokens() -> None:
    exact, rows = DynamicLayer(), torch.randn(1, 1, 192, 64)
    exact.update(rows, rows)
    keys, values = FormattedLayer(exact, kivi(2)).update(rows[:, :, :1], rows[:, :, :1])
    # 192 = 128 + 64: keys are quantised 128 at a time, and 128 values stay exact.
    assert keys[0, 0, 128:192].equal(rows[0, 0, 128:]) and values[0, 0, 64:192].equal(rows[0, 0, 64:])
    for first in (32, 96):
        group = slice(first, first + 32)
        torch.testing.assert_close(keys[0, 0, group, 9], rounded(rows[0, 0, group, 9], 2), rtol=0, atol=0.01)
    for token in (40, 63):
        torch.testing.assert_close(values[0, 0, token, 32:], rounded(rows[0, 0, token, 32:], 2), rtol=0, atol=0.01)


def test_more_bits_diverge_less(tmp_path: Path) -> None:
    evaluation = Evaluation(ModelUnderTest("reference"), BOOK.read_text("utf-8")[:20_000], "book", tmp_path)
    chosen = [format for format in FORMATS if format.name in ("per token, 8 bits", "per token, 4 bits")]
    config = PerplexityConfig(256, 1, 248)
    full, eight, four = run_kv_formats(evaluation, config, chosen).rows
    assert full["kl"] == 0 and full["scored_tokens"] == 7
    assert 0 < eight["kl"] < four["kl"] / 10
