"""The attention analysis: its numbers on attention that is known, and the table and plot that it writes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model

from offload_rt.eval.core.model_under_test import Evaluation, ModelUnderTest
from offload_rt.eval.quality.attention_analysis import attention_weights, observe, run_analysis, tokens_for_mass
from offload_rt.eval.quality.perplexity import PerplexityConfig
from offload_rt.models.loading import load_model

BOOK = (Path(__file__).parents[3] / "offload_rt" / "data" / "black_arrow.txt").read_text(encoding="utf-8")[:40_000]


def test_tokens_for_mass_counts_the_heaviest() -> None:
    attention = torch.tensor([[0.1, 0.6, 0.05, 0.25], [0.25, 0.25, 0.25, 0.25]])
    assert tokens_for_mass(attention, 0.5).tolist() == [1, 2]
    assert tokens_for_mass(attention, 0.9).tolist() == [3, 4]


def test_weights_are_transformers_attentions() -> None:
    """Within Mistral's window of 48 and past it."""
    model = tiny_model("mistral").double()
    model.set_attn_implementation("eager")
    ids = torch.arange(1, 81) * 7 % 199
    adapter, positions, at = load_model(model).adapter, torch.arange(80), torch.tensor([0, 20, 79])
    with torch.no_grad():
        theirs = model(ids[None], output_attentions=True).attentions
        x = adapter.embed(ids, positions)
        q, k, _ = adapter.qkv(0, adapter.attention_input(0, x), positions)
        ours, seen = attention_weights(adapter, 0, q, k, at)
    torch.testing.assert_close(ours.double(), theirs[0][0][:, at], atol=1e-6, rtol=0)
    assert seen.tolist() == [1, 21, 48]


def test_similarities_are_those_of_transformers() -> None:
    model: Any = tiny_model("llama").double()
    ids = [5, 9, 100, 33, 7, 80]
    added: dict[str, list[torch.Tensor]] = {"attention_similarity": [], "mlp_similarity": []}
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda m, a, out: added["attention_similarity"].append(out[0][0]))
        layer.mlp.register_forward_hook(lambda m, a, out: added["mlp_similarity"].append(out[0]))
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    alike: dict[tuple[int, str], list[float]] = defaultdict(list)
    observe(load_model(model).adapter, ids, 2, alike, defaultdict(list))
    names = ("input_similarity", "attention_similarity", "mlp_similarity")
    assert set(alike) == {(layer, name) for layer in range(1, len(hidden) - 1) for name in names}
    for (layer, name), found in alike.items():
        other = hidden[layer - 1][0] if name == "input_similarity" else added[name][layer - 1]
        expected = float(torch.cosine_similarity(hidden[layer][0], other, dim=-1).mean())
        assert found == [pytest.approx(expected, abs=1e-6)], (layer, name)


def test_a_row_for_every_layer_and_a_plot(tmp_path: Path) -> None:
    report = run_analysis(
        Evaluation(ModelUnderTest("reference"), BOOK, "arrow", tmp_path), PerplexityConfig(160, 2, 96)
    )
    assert (tmp_path / "tokens_needed_for_90_percent_of_attention.png").is_file()
    for row in report.rows:
        assert 1 <= row["tokens_median"] <= 160 and 0 <= row["few_keys"] <= 1
        assert "input_similarity" not in row if row["layer"] == 0 else row["input_similarity"] > 0
