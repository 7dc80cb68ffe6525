"""The truncation's measurement: what must be equal is, what must differ does, and the tables say what happened."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, InputError
from offload_rt.eval.quality.truncation import (
    VARIANTS,
    Cut,
    Followed,
    measure,
    perplexity_rows,
    recall_rows,
    windows_of,
)
from offload_rt.eval.speed.session_ttft import _crossing
from offload_rt.sessions.truncate import SINKS


def make_llm() -> LLM:
    model = tiny_model("llama", dtype=torch.float64)
    return LLM(model, dtype="float64", host_memory="64MiB", policy="full", enable_prefix_caching=False)


def test_where_nothing_is_cut_all_variants_are_the_same_and_else_they_differ() -> None:
    """Texts of different length in one batch, too."""
    llm, texts = make_llm(), [tiny_prompt(130, seed=i) for i in range(3)]
    whole = [Cut(tuple(t[:100]), 100 - SINKS, tuple(t[100 : 110 + 5 * i])) for i, t in enumerate(texts)]
    for cut, found in zip(whole, measure(llm, whole, lambda done: None), strict=True):
        logits = reference([*cut.text, *cut.following])
        expected = -logits.log_softmax(-1)[100:-1].gather(1, torch.tensor(cut.following[1:])[:, None])[:, 0]
        for variant in VARIANTS:
            assert found[variant].nats == pytest.approx(expected.tolist(), abs=1e-9), variant
            assert found[variant].likeliest == (logits[100:-1].argmax(-1) == torch.tensor(cut.following[1:])).tolist()
    real = [Cut(cut.text, 40, cut.following) for cut in whole]
    [first, *_] = measure(llm, real, lambda done: None)
    nats = [sum(first[variant].nats) for variant in VARIANTS]
    assert len({round(n, 6) for n in nats}) == 4, "every variant sees something else"
    alone = reference([*real[0].text[:SINKS], *real[0].text[-40:], *real[0].following]).log_softmax(-1)
    expected = [-float(alone[44 + i, token]) for i, token in enumerate(real[0].following[1:])]
    assert first["recomputed"].nats == pytest.approx(expected, abs=1e-9)
    assert llm.runner.pool.bytes_held == 0


def reference(tokens: list[int]) -> torch.Tensor:
    """Logits `[N, V]` of a plain forward."""
    model: Any = tiny_model("llama", dtype=torch.float64)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
        return logits


def test_windows_are_spread_and_short_texts_refused() -> None:
    cuts = windows_of(list(range(1000)), context=100, keep=50, scored=10, windows=8)
    assert len(cuts) == 8 and cuts[0].text == tuple(range(100)) and cuts[0].following == tuple(range(100, 111))
    assert cuts[-1].following[-1] <= 999 and all(len(cut.following) == 11 for cut in cuts)
    with pytest.raises(InputError, match="need more"):
        windows_of(list(range(115)), context=100, keep=50, scored=10, windows=8)
    with pytest.raises(InputError, match="must be below"):
        windows_of(list(range(1000)), context=100, keep=100, scored=10, windows=8)


def test_tables_compare_with_recomputation() -> None:
    found = [
        {v: Followed([math.log(8 if v == "naive" else 4)] * 3, [v != "naive", True, True]) for v in VARIANTS}
        for _ in range(5)
    ]
    rows = {row["variant"]: row for row in perplexity_rows(found)}
    assert rows["recomputed"]["perplexity"] == pytest.approx(4) and rows["recomputed"]["change"] == 0
    assert rows["naive"]["change"] == pytest.approx(1) and rows["naive"]["low"] == pytest.approx(1)
    cuts = [Cut((), 0, (1, 2, 3, 4), ((1, 2), (3,))) for _ in found]
    rows = {row["variant"]: row for row in recall_rows(cuts, found)}
    assert rows["recomputed"]["right"] == 1 and rows["recomputed"]["questions"] == 10
    assert rows["naive"]["right"] == 0.5 and rows["naive"]["change"] == -0.5


def test_break_even_is_where_the_lines_cross() -> None:
    assert _crossing([(100, -1.0), (200, 1.0)]) == "quicker from about 150 tokens on"
    assert _crossing([(100, 1.0), (200, 3.0)]) == "quicker at every history tried, from 100 tokens on"
    assert "not quicker at the longest" in _crossing([(100, 1.0), (200, -1.0)])
