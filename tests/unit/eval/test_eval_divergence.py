"""Test the divergence from full attention: its definition, the distributions it compares, and resumed measurements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offload_rt.eval.core.model_under_test import Evaluation, ModelUnderTest
from offload_rt.eval.core.report import Row
from offload_rt.eval.core.variants import Variant
from offload_rt.eval.quality.divergence import Divergence, FullAttention, run_divergence, summary
from offload_rt.eval.quality.perplexity import PerplexityConfig, cut_windows
from offload_rt.models.source import find_source

BOOK = Path(__file__).parents[3] / "offload_rt" / "data" / "black_arrow.txt"
TEXT = BOOK.read_text(encoding="utf-8")[:40_000]
CONFIG = PerplexityConfig(512, 2, 504)


def test_divergence_equals_torch_and_counts_equal_top_tokens() -> None:
    full = torch.log_softmax(torch.tensor([[2.0, 1.0, -3.0], [0.0, 0.0, 5.0]]), -1)
    policy = torch.log_softmax(torch.tensor([[2.5, 1.0, 0.0], [6.0, 0.0, 5.0]]), -1)
    found = Divergence()
    for p, q in zip(full, policy, strict=True):
        found.add(p, q)
    expected = torch.nn.functional.kl_div(policy, full, log_target=True, reduction="none").sum(-1)
    assert found.kl == pytest.approx(expected.tolist(), rel=1e-6)
    assert found.agrees == [1, 0]


def test_summary_weights_windows_by_their_tokens() -> None:
    base: list[Row] = [{"nats": 2.0, "tokens": 1, "kl": [0.0], "agrees": [1]}] * 2
    costs: Row = {"attended": 0.5, "fetched": None, "sparse_attended": 0.5, "sparse_fetched": 0.25}
    rows = [
        costs | {"nats": 2.0, "tokens": 1, "kl": [0.3], "agrees": [0]},
        costs | {"nats": 2.0, "tokens": 3, "kl": [0.1, 0.0, 0.0], "agrees": [1, 1, 1]},
    ]
    found = summary(rows, base)
    assert (found["kl"], found["top_1"]) == pytest.approx((0.1, 0.75))
    assert found["kl_interval"] == pytest.approx([0.1 / 3, 0.3])
    assert (found["sparse_fetched"], found["fetched"]) == (0.25, None)


def test_distributions_equal_transformers() -> None:
    tested = ModelUnderTest("reference")
    text = cut_windows(tested, TEXT, CONFIG)[0].text
    model = AutoModelForCausalLM.from_pretrained(find_source("reference").name_or_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([text.tokens])).logits[0, text.scored_from - 1 : -1]
    expected = torch.log_softmax(logits.float(), -1)
    torch.testing.assert_close(FullAttention(tested, text).logprobs, expected, rtol=0, atol=2e-4)


def test_rows_are_measured_once_and_differ_between_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = Evaluation(ModelUnderTest("reference"), TEXT, "book", tmp_path)
    window = {"sinks": 4, "recent": 16, "dense_layers": (0,)}
    variants = [Variant(policy, window | {"budget": 0.08}) for policy in ("infinigen", "streaming")]
    first = run_divergence(evaluation, variants, CONFIG)
    full, ours, streaming = first.rows
    assert (full["top_1"], full["against_full_perplexity"]) == (1.0, 0.0)
    assert full["kl"] == pytest.approx(0.0, abs=1e-6)  # MKL may round differently in two runs
    assert 0 < ours["kl"] < 0.1 * streaming["kl"]
    assert (tmp_path / "divergence.md").read_text(encoding="utf-8").count("| reference |") == 3
    monkeypatch.setattr(ModelUnderTest, "score_observed", None)
    assert run_divergence(evaluation, variants, CONFIG).rows == first.rows
