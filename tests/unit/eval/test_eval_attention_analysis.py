"""The pictures of attention and the ablation: their numbers on attention that is known, and that they are drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model

from offload_rt.eval.core.model_under_test import ModelUnderTest, Variant
from offload_rt.eval.core.teacher_forced import LayerView, score_layerwise
from offload_rt.eval.quality.ablation import parts, run_ablation
from offload_rt.eval.quality.attention_analysis import block_similarities, run_analysis
from offload_rt.eval.quality.attention_weights import kept_similarity, spread, tokens_for_mass, top_recall, weights
from offload_rt.eval.quality.perplexity import PerplexityConfig
from offload_rt.models.loading import load_model
from offload_rt.policies.full import Full

BOOK = (Path(__file__).parents[3] / "offload_rt" / "data" / "black_arrow.txt").read_text(encoding="utf-8")[:40_000]
SMALL = PerplexityConfig(context=160, windows=1, decode_from=96)


def test_tokens_for_mass_counts_the_heaviest() -> None:
    attention = torch.tensor([[0.1, 0.6, 0.05, 0.25], [0.25, 0.25, 0.25, 0.25]])
    assert tokens_for_mass(attention, 0.5).tolist() == [1, 2]
    assert tokens_for_mass(attention, 0.9).tolist() == [3, 4]


def test_kept_similarity_is_one_only_with_everything() -> None:
    attention = torch.tensor([[[0.6, 0.3, 0.1]], [[0.1, 0.3, 0.6]]])
    everything = torch.ones(1, 1, 3, dtype=torch.bool)
    assert kept_similarity(attention, everything).flatten().tolist() == pytest.approx([1.0, 1.0])
    two = torch.tensor([[[True, True, False]]])
    heavy, light = kept_similarity(attention, two).flatten().tolist()
    assert heavy == pytest.approx((0.36 + 0.09) ** 0.5 / 0.46**0.5)
    assert light < 0.5


def test_top_recall() -> None:
    truth = torch.tensor([0.5, 0.3, 0.1, 0.1])
    assert top_recall(torch.tensor([9.0, 1.0, 5.0, 0.0]), truth, 2) == 0.5
    assert top_recall(truth, truth, 2) == 1.0
    assert spread([1, 2, 3, 4])["median"] == 2.5


def test_weights_are_transformers_attentions() -> None:
    model = tiny_model("llama").double()
    model.set_attn_implementation("eager")
    ids = torch.arange(1, 41) * 7 % 199
    with torch.no_grad():
        theirs = model(ids[None], output_attentions=True).attentions
    seen: list[LayerView] = []
    adapter = load_model(model).adapter
    score_layerwise(adapter, Full(adapter.geometry.layers), [*ids.tolist(), 1], 20, 21, observe=seen.append)
    for view in seen:
        ours = weights(view, torch.tensor([0, 7, 19]))
        torch.testing.assert_close(ours.double(), theirs[view.layer][0, :, [20, 27, 39]], atol=1e-6, rtol=0)


def test_block_similarities_are_those_of_transformers() -> None:
    model: Any = tiny_model("llama").double()
    ids = [5, 9, 100, 33, 7, 80]
    added: dict[str, list[torch.Tensor]] = {"attention_similarity": [], "mlp_similarity": []}
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda m, a, out: added["attention_similarity"].append(out[0][0]))
        layer.mlp.register_forward_hook(lambda m, a, out: added["mlp_similarity"].append(out[0]))
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    found = block_similarities(load_model(model).adapter, ids)
    assert list(found) == [1, 2]
    for layer, alike in found.items():
        before = {"input_similarity": hidden[layer - 1][0]} | {name: outs[layer - 1] for name, outs in added.items()}
        for name, other in before.items():
            expected = float(torch.cosine_similarity(hidden[layer][0], other, dim=-1).mean())
            assert alike[name] == pytest.approx(expected, abs=1e-6), (layer, name)


def test_skew_none_is_no_skew() -> None:
    tested = ModelUnderTest("reference", dtype="float64")  # no score is near another
    chosen = {
        "preset": "rows",
        "scorer": "partial",
        "columns": "prompt",
        "partial_ratio": 1.0,
        "budget": 0.2,
        "recent": 8,
    }
    tokens = tuple(tested.loaded.tokenizer(BOOK[:2000])["input_ids"][:160])  # type: ignore[misc]
    from offload_rt.eval.core.model_under_test import Text

    text = Text(tokens, 120, 121)
    plain = tested.score(Variant("infinigen", chosen | {"skew": "none"}), [text])[0]
    skewed = tested.score(Variant("infinigen", chosen | {"skew": "svd"}), [text])[0]
    cut = tested.score(Variant("infinigen", chosen | {"skew": "none", "partial_ratio": 0.1}), [text])[0]
    assert plain.nats == pytest.approx(skewed.nats, abs=1e-4)  # with every column a rotation changes nothing
    assert cut.nats != pytest.approx(plain.nats, abs=1e-4)


@pytest.mark.slow
def test_analysis_draws_every_picture(tmp_path: Path) -> None:
    report = run_analysis(ModelUnderTest("reference"), BOOK, "arrow", SMALL, tmp_path)
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {
        "attention_similarity_along_the_text.png",
        "attention_weight_of_tokens_over_steps.png",
        "queries_that_need_few_keys_by_length.png",
        "recall_of_heaviest_tokens_by_partial_ratio.png",
        "tokens_needed_for_90_percent_of_attention.png",
    }
    assert all((tmp_path / name).with_suffix(".json").exists() for name in names)
    recall = json.loads((tmp_path / "recall_of_heaviest_tokens_by_partial_ratio.json").read_text())["data"]
    curve = dict(map(tuple, recall["svd, residual"]))
    assert curve[0.1] < curve[0.5] <= curve[1.0] + 1e-6
    assert dict(map(tuple, recall["none, residual"]))[1.0] == pytest.approx(curve[1.0], abs=1e-3)
    for row in report.rows[1:]:
        assert 0 < row["similarity_streaming"] <= row["similarity_oracle"] <= 1 + 1e-6
        assert row["input_similarity"] > 0


@pytest.mark.slow
def test_ablation_measures_every_part_once(tmp_path: Path) -> None:
    tested = ModelUnderTest("reference")
    assert len({what for what, _ in parts(0.1)}) == len(parts(0.1))
    report = run_ablation(tested, BOOK, "arrow", (0.2,), SMALL, tmp_path)
    rows = {row["part"]: row for row in report.rows}
    assert rows["nothing"]["caught"] <= rows["true query, full keys (oracle)"]["caught"]
    assert rows["scorer: int4"]["caught"] >= rows["scorer: partial, bytes of int4"]["caught"] - 0.02
    assert (tmp_path / "caught_mass_by_part_at_20_percent.png").exists()
