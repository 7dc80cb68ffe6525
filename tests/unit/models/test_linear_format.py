"""Test that a single class adds a weight format to loading, planning, streaming, verification and fingerprints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import assert_greedy, tiny_checkpoint, tiny_prompt
from torch import nn
from transformers import AutoModelForCausalLM

from offload_rt import LLM, EngineConfig, SamplingParams
from offload_rt.models import linear
from offload_rt.models.linear.backend import BackendLinear, LinearBackend
from offload_rt.models.loading import load_model
from offload_rt.models.shape import load_shape
from offload_rt.models.weights import layer_bytes
from offload_rt.planning.device_plan import plan_for

PROMPT = tiny_prompt(150)


class RowInt8Linear(BackendLinear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        own: Any = self
        return nn.functional.linear(input, own.codes * own.scale, own.bias)


class RowInt8(LinearBackend):
    """Weight format with int8 codes and one scale per output."""

    layer_class = RowInt8Linear

    def supports(self, layer: nn.Linear, device: torch.device) -> bool:
        return True

    def pack(self, layer: nn.Linear) -> None:
        weight = layer.weight.data
        scale = weight.abs().amax(1, keepdim=True) / 127
        del layer.weight
        layer.codes = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        layer.scale = nn.Parameter(scale, requires_grad=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(linear, "BACKENDS", [RowInt8(), *linear.BACKENDS])
    return Path(tiny_checkpoint(tmp_path / "tiny", "llama", num_hidden_layers=8))


@pytest.fixture
def rounded_model(folder: Path) -> Any:
    """Return the transformers model with weights rounded to int8 codes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in (each for each in model.modules() if isinstance(each, nn.Linear)):
        scale = layer.weight.data.abs().amax(1, keepdim=True) / 127
        layer.weight.data = (layer.weight.data / scale).round() * scale
    return model


def test_loaded_bytes_equal_the_plan_and_fingerprint_is_different(folder: Path, rounded_model: Any) -> None:
    shape, loaded = load_shape(folder, dtype="float32"), load_model(folder, dtype="float32")
    dense = load_model(rounded_model)
    assert shape.weight_bytes == loaded.weight_bytes
    assert sum(map(layer_bytes, loaded.layers)) == sum(shape.sizes.layers) < 0.3 * sum(map(layer_bytes, dense.layers))
    assert loaded.fingerprint == load_model(folder, dtype="float32").fingerprint != dense.fingerprint


@pytest.mark.sampled
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("options", [{}, {"budget": 1.0, "approximate_kv": "off"}])
def test_tokens_equal_transformers(folder: Path, rounded_model: Any, options: Any, streamed: bool) -> None:
    policy = "infinigen" if options else "full"
    config = EngineConfig(policy, options, max_model_len=192, host_memory="16MiB", dtype="float32", verify="always")
    if streamed:
        shape, limited = load_shape(folder, dtype="float32"), replace(config, device_memory=1 << 30)
        rest = plan_for(limited, shape).costs.total([192])
        config = replace(config, device_memory=shape.sizes.fixed + 4 * max(shape.sizes.layers) + rest)
    llm = LLM(folder, config)
    [output] = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert_greedy(rounded_model, PROMPT, list(output.outputs[0].token_ids))
    weights = llm.runner.weights
    assert (weights is not None and weights.stream is not None and weights.stream.bytes > 0) is streamed
    llm.runner.check_integrity()
