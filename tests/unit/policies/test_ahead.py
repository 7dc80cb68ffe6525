"""Test the option `ahead`, with which a hybrid model's queries are predicted from the input of an earlier layer."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.architectures import architecture
from support.hybrids import make_llm, random_prompt
from support.outputs import completed
from support.select_models import CPU, artifact, geometry
from support.tiny_models import assert_greedy, tiny_model

from offload_rt import LLM, ArtifactError, ConfigError, EngineConfig, SamplingParams
from offload_rt.models.registry import adapter_for
from offload_rt.models.shape import load_shape
from offload_rt.planning import device_plan
from offload_rt.planning.device_plan import costs_for
from offload_rt.policies.infinigen.policy import InfiniGen
from offload_rt.policies.options import InfiniGenOptions
from offload_rt.skewing import prediction_quality
from offload_rt.skewing.artifact import artifact_bytes
from offload_rt.skewing.calibrate import calibrate, measure
from offload_rt.skewing.fold import skew_model
from offload_rt.skewing.prediction import Correction, source_index
from offload_rt.skewing.prediction_quality import PredictionQuality

LAYERS: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 3, "full_attention"],
}
"""Options with three recurrent layers between the attention layers 1 and 5."""

SELECT_ALL = {"preset": "rows", "alpha": math.inf, "max_fraction": 1.0, "dense_layers": (), "recent": 4}


def layer_inputs(model: Any, tokens: list[int]) -> list[torch.Tensor]:
    """Return the input `[T, D]` that each decoder layer gets in transformers."""
    inputs: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append((args[0] if args else kwargs["hidden_states"])[0]), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return inputs


@pytest.mark.parametrize("ahead", [1, 2, 3, 4, 9])
@torch.inference_mode()
def test_queries_are_predicted_from_the_input_of_an_earlier_layer(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, llm = make_llm("qwen3_5", overrides=LAYERS, policy="infinigen", policy_options=SELECT_ALL | {"ahead": ahead})
    predictions: list[torch.Tensor] = []

    def record(layer: int, x: torch.Tensor) -> torch.Tensor:
        assert layer == 1
        predictions.append(x[0])
        return x

    monkeypatch.setattr(llm.runner.policy, "correct_prediction", record)
    prompt = random_prompt(30)
    [output] = llm.generate([prompt], SamplingParams(max_tokens=5, temperature=0))
    text = [*prompt, *output.outputs[0].token_ids]
    assert_greedy(model, prompt, text[30:])
    # Predictions start at the previous attention layer or later.
    hidden = model.model.layers[5].input_layernorm(layer_inputs(model, text)[max(1, 5 - ahead)])
    assert len(predictions) == 4
    torch.testing.assert_close(torch.stack(predictions), hidden[30:34], rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.simulated
def test_tokens_on_a_gpu_equal_tokens_on_a_cpu() -> None:
    layer_types = ["full_attention", "conv", "conv", "full_attention"]
    options = {"preset": "rows", "scorer": "int4", "dense_layers": (), "budget": 0.4, "recent": 4, "ahead": 1}
    params, outputs = SamplingParams(max_tokens=2, temperature=0), []
    for device in ("cpu", "cuda"):
        model = architecture("lfm2", num_hidden_layers=4, layer_types=layer_types).to(device)  # type: ignore[arg-type]
        llm = LLM(model, policy="infinigen", policy_options=options, host_memory="8MiB", verify="off")
        outputs.append(
            [output.token_ids for output in completed(llm.generate([random_prompt(46), random_prompt(40, 1)], params))]
        )
    assert outputs[0] == outputs[1]


@torch.inference_mode()
def test_corrections_are_fitted_for_each_distance() -> None:
    model, tokens = architecture("qwen3_5", dtype=torch.float64, **LAYERS), random_prompt(80)
    _, correction = measure(adapter_for(model), tokens)
    hidden, norm = layer_inputs(model, tokens), model.model.layers[5].input_layernorm
    truth = norm(hidden[5])
    assert len(correction.slope) == 6
    for ahead in (1, 2, 3):
        guess = norm(hidden[5 - ahead])
        for channel in (0, 31):
            line = torch.stack([guess[:, channel], torch.ones_like(guess[:, channel])], 1)
            slope, offset = torch.linalg.lstsq(line, truth[:, channel]).solution
            s = source_index(ahead)
            assert float(correction.slope[s, 1, channel]) == pytest.approx(float(slope), rel=1e-3, abs=1e-3)
            assert float(correction.offset[s, 1, channel]) == pytest.approx(float(offset), rel=1e-3, abs=1e-3)
            assert correction.slope[s, 0, channel] == 1


def test_size_of_an_artifact_includes_corrections_for_each_distance() -> None:
    adapter = adapter_for(architecture("qwen3_5", **LAYERS))
    made = calibrate(adapter, random_prompt(80), method="svd", fingerprint="", calibration="")
    size = sum(tensor.nbytes for tensor in (made.query, made.key, made.slope, made.offset))
    assert size == artifact_bytes(adapter.geometry)


def test_invalid_options_are_errors() -> None:
    with pytest.raises(ConfigError, match="ahead=0 must be at least 1"):
        InfiniGenOptions(ahead=0)
    for options in ({"source": "residual"}, {"preset": "paper"}):
        with pytest.raises(ConfigError, match="ahead=2 replaces source"):
            InfiniGenOptions.parse({"ahead": 2} | options)
    hybrid = adapter_for(architecture("qwen3_5", **LAYERS)).geometry
    with pytest.raises(ArtifactError, match="ahead=2: an earlier version"):
        InfiniGen(InfiniGenOptions(ahead=2), hybrid, artifact(hybrid), CPU, torch.float32)
    InfiniGen(InfiniGenOptions(), hybrid, artifact(hybrid), CPU, torch.float32)
    plain = geometry(layers=3)
    policy = InfiniGen(InfiniGenOptions(ahead=2), plain, artifact(plain), CPU, torch.float32)
    assert policy.dense_layers == frozenset()


@torch.inference_mode()
def test_prediction_quality_is_the_relative_mass_of_selected_tokens() -> None:
    """Compare with a loop over queries. The first 4 and the last 64 tokens do not count."""
    adapter = adapter_for(tiny_model("llama"))
    shape, n = adapter.geometry, 200
    truth = torch.randn(n, shape.hidden, generator=torch.Generator().manual_seed(0))
    guess = truth + 0.5 * torch.randn(n, shape.hidden, generator=torch.Generator().manual_seed(1))
    quality = PredictionQuality(adapter, Correction.none(shape.layers))
    for part in (slice(0, 150), slice(150, n)):
        quality.add(1, {"residual": truth[part], "normed_input": guess[part]}, truth[part])
    shares = quality.relative_mass()
    assert shares["residual"] == 1  # a perfect prediction
    positions = torch.arange(n)
    q, k, _ = adapter.qkv(1, truth, positions)
    guessed = adapter.query(1, guess, positions)
    sums = {"found": [0.0, 0.0], "best": [0.0, 0.0]}
    for part, rows in enumerate((range(117, 150, 16), range(150, n, 16))):
        for t in rows:
            for head in range(shape.kv_heads):
                group = slice(head * shape.group, (head + 1) * shape.group)
                true, predicted = (
                    (x[group, t] @ k[head, 4 : t - 63].T * shape.scales[1]).softmax(-1) for x in (q, guessed)
                )  # fmt: skip
                for name, weights in (("found", predicted), ("best", true)):
                    top = weights.amax(0).topk((t - 67) // 50).indices
                    sums[name][part] += float(true[:, top].sum(-1).mean()) / len(rows)
    assert shares["normed_input"] == pytest.approx(sum(sums["found"]) / sum(sums["best"]), abs=1e-4)
    assert shares["normed_input"] < 0.99


def test_predictions_are_measured_with_the_defaults_of_the_policy() -> None:
    options = InfiniGenOptions()
    measured = (prediction_quality.SINKS, prediction_quality.RECENT, prediction_quality.FRACTION)
    assert measured == (options.sinks, options.recent, options.max_fraction)


def test_attention_layers_are_streamed_last() -> None:
    hybrid, dense = SimpleNamespace(attention_at=(3, 7)), SimpleNamespace(attention_at=())
    # Of 8 layers, layers 3 and 7 have attention.
    streamed = [device_plan._evenly_spaced(count, 8, hybrid) for count in (0, 3, 6, 7, 8)]
    assert streamed == [(), (1, 4, 6), (0, 1, 2, 4, 5, 6), (0, 1, 2, 4, 5, 6, 7), tuple(range(8))]
    assert device_plan._evenly_spaced(4, 8, dense) == (1, 3, 5, 7)


@pytest.mark.parametrize("source", ["query", "attention_input"])
def test_streamed_layers_are_copied_once_per_step(source: str, tmp_path: Path) -> None:
    """Only layers without attention are streamed, so predicting queries needs no streamed weights."""
    architecture("qwen3_5", **LAYERS).save_pretrained(tmp_path)
    shape = load_shape(tmp_path, device="cpu")
    options: dict[str, Any] = {"policy": "infinigen", "policy_options": {"recent": 4, "source": source}}
    costs = costs_for(EngineConfig(**options, prefill_chunk_size=64), shape)
    sizes = shape.sizes.layers
    limit = shape.sizes.fixed + sizes[1] + sizes[5] + 2 * sizes[0] + costs.total([64])
    llm = LLM(
        tmp_path, device="cpu", device_memory=limit, max_model_len=64, host_memory="8MiB", verify="off",
        prefill_chunk_size=64, **options,
    )  # fmt: skip
    assert llm.runner.weights is not None and llm.runner.weights.stream is not None
    assert llm.runner.weights.stream.layers == (0, 2, 3, 4)
    [output] = llm.generate([random_prompt(30)], SamplingParams(max_tokens=9, temperature=0))
    copied = output.outputs[0].stats.h2d_weight_bytes_steps  # type: ignore[union-attr]
    assert copied <= 8.5 * sum(sizes[layer] for layer in (0, 2, 3, 4))


def test_skewing_report_contains_each_distance(tmp_path: Path) -> None:
    architecture("qwen3_5", **LAYERS).save_pretrained(tmp_path / "model")
    report = skew_model(str(tmp_path / "model"), tmp_path / "out", calibration_tokens=64)
    assert {*report.predictions} == {"attention_input", "normed_input", "residual", 3, 2, 1}
    assert all(0 < share <= 1 for share in report.predictions.values())
