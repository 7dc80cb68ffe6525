"""Test corrections of predicted layer inputs: how they are fitted by least squares, and how the policy uses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.select_models import CPU, artifact, geometry
from support.tiny_models import NAMES, tiny_model, tiny_prompt

from offload_rt.core import ModelGeometry
from offload_rt.models.registry import adapter_for
from offload_rt.policies.infinigen.policy import InfiniGen
from offload_rt.policies.options import InfiniGenOptions
from offload_rt.skewing import calibrate as calibrate_module
from offload_rt.skewing.artifact import SkewArtifact
from offload_rt.skewing.calibrate import measure
from offload_rt.skewing.prediction import SOURCES, Correction, CorrectionSums, source_index


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return list(max(lists, key=len))


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_fit_equals_least_squares_over_transformers_layer_inputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer inputs come from transformers. Norms and residuals come from the adapter, which has its own tests."""
    monkeypatch.setattr(calibrate_module, "SLICE", 32)
    model = tiny_model(name, dtype=torch.float64)
    adapter, ids = adapter_for(model), tiny_prompt(160)
    residuals: dict[int, list[torch.Tensor]] = {}

    def mlp(layer: int, residual: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        residuals.setdefault(layer, []).append(residual)
        return type(adapter).mlp(adapter, layer, residual, tokens)

    monkeypatch.setattr(adapter, "mlp", mlp)
    adapter.geometry = replace(adapter.geometry, max_positions=80)  # two segments
    _, correction = measure(adapter, ids)
    hidden: list[list[torch.Tensor]] = []

    def record(module: Any, args: Any, kwargs: Any, layer: int) -> None:
        hidden[layer].append((args[0] if args else kwargs["hidden_states"])[0])

    layers = decoder_layers(model)
    for layer, module in enumerate(layers):
        hidden.append([])
        module.register_forward_pre_hook(lambda *a, layer=layer: record(*a, layer), with_kwargs=True)
    for segment in (ids[:80], ids[80:]):
        model(torch.tensor([segment]), use_cache=False)
    for layer in range(1, len(layers)):
        x, truth = torch.cat(hidden[layer - 1]), adapter.attention_input(layer, torch.cat(hidden[layer]))
        for source, guess in (
            ("attention_input", adapter.attention_input(layer - 1, x)),
            ("normed_input", adapter.attention_input(layer, x)),
            ("residual", adapter.attention_input(layer, torch.cat(residuals[layer - 1]))),
        ):
            s = SOURCES.index(source)
            line = torch.stack([guess, torch.ones_like(guess)])  # [2, m, D]
            for channel in (0, 7, guess.shape[1] - 1):
                [slope, offset] = torch.linalg.lstsq(line[..., channel].T, truth[:, channel]).solution
                fitted = correction.slope[s, layer, channel], correction.offset[s, layer, channel]
                # float64, but transformers computes norms in float32
                torch.testing.assert_close(fitted[0].double(), slope, rtol=2e-4, atol=2e-4)
                torch.testing.assert_close(fitted[1].double(), offset, rtol=2e-4, atol=2e-4)
    assert torch.equal(correction.slope[:, 0], torch.ones_like(correction.slope[:, 0]))
    assert not correction.offset[:, 0].any()


def test_constant_channels_have_slope_one() -> None:
    sums, guess = CorrectionSums(2, 3), torch.tensor([[1.0, 5.0, 0.0], [2.0, 5.0, 0.0], [4.0, 5.0, 0.0]])
    truth = torch.tensor([[3.0, 1.0, 0.5], [5.0, 2.0, 0.5], [9.0, 6.0, 0.5]])
    sums.add(1, dict.fromkeys(SOURCES, guess), truth)
    correction = sums.fit()
    torch.testing.assert_close(correction.slope[0, 1], torch.tensor([2.0, 1.0, 1.0]))
    torch.testing.assert_close(correction.offset[0, 1], torch.tensor([1.0, -2.0, 0.5]))


def corrected_policy(shape: ModelGeometry, **options: Any) -> tuple[InfiniGen, SkewArtifact]:
    skew_artifact = artifact(shape)
    generator = torch.Generator().manual_seed(1)
    size = (len(SOURCES) + shape.most_between, shape.layers, shape.hidden)
    object.__setattr__(skew_artifact, "slope", torch.rand(size, generator=generator))
    object.__setattr__(skew_artifact, "offset", torch.randn(size, generator=generator))
    return InfiniGen(
        InfiniGenOptions.preset("rows", **options), shape, skew_artifact, CPU, torch.float64
    ), skew_artifact


DENSE, HYBRID = geometry(layers=3), replace(geometry(layers=2), attention_at=(1, 5), depth=6)


@pytest.mark.parametrize(
    ("shape", "options", "source"),
    [
        *((DENSE, {"source": source}, source) for source in SOURCES),
        (HYBRID, {"source": "attention_input"}, "attention_input"),
        (HYBRID, {"ahead": 1}, 1),
        (HYBRID, {"ahead": 3}, 3),
        (HYBRID, {"ahead": 4}, "normed_input"),
    ],
)
def test_policy_uses_the_correction_of_its_source(shape: ModelGeometry, options: dict[str, Any], source: Any) -> None:
    policy, skew_artifact = corrected_policy(shape, **options)
    x, s, last = torch.randn(2, shape.hidden, dtype=torch.float64), source_index(source), shape.layers - 1
    assert torch.equal(policy.correct_prediction(0, x), x), "layer 0 is dense"
    expected = x * skew_artifact.slope[s, last].double() + skew_artifact.offset[s, last].double()
    torch.testing.assert_close(policy.correct_prediction(last, x), expected)
    uncorrected, _ = corrected_policy(shape, **options, corrected=False)
    assert torch.equal(uncorrected.correct_prediction(last, x), x)
    default, _ = corrected_policy(shape)
    assert len({policy.provenance_key, uncorrected.provenance_key, default.provenance_key}) == 3


def test_correction_none_is_the_identity() -> None:
    correction = Correction.none(4)
    assert correction.slope.shape == correction.offset.shape == (3, 4, 1)
    assert bool((correction.slope == 1).all()) and not correction.offset.any()


def test_paper_preset_does_not_correct() -> None:
    assert InfiniGenOptions().corrected
    assert not InfiniGenOptions.preset("paper").corrected
