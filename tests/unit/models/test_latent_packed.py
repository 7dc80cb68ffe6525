"""Test packed weights with latent attention: `kv_b_proj` is unpacked once, on first use, and plans count the copy."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.architectures import architecture
from support.hybrids import random_prompt
from support.tiny_models import assert_greedy
from torch import nn
from transformers import AutoModelForCausalLM

from offload_rt import LLM, EngineConfig, SamplingParams
from offload_rt.models.decoder import DecoderAdapter
from offload_rt.models.latent_attention import LatentProjections
from offload_rt.models.linear import plain_weight, quantize
from offload_rt.models.linear.packed import PackedLinear
from offload_rt.models.shape import load_shape
from offload_rt.planning.device_plan import plan_for

PROMPTS = [random_prompt(70), random_prompt(40, seed=1)]
GREEDY = SamplingParams(max_tokens=8, temperature=0)
COPY = 4 * (10 + 12) * 64 * 4
"""Size in bytes of the weights for 4 heads (10 + 12 outputs, 64 inputs) in float32."""


def generate_tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def unpacked_copies(llm: LLM) -> list[torch.Tensor]:
    adapter: Any = llm.runner.adapter
    while not isinstance(adapter, DecoderAdapter):
        adapter = adapter._inner
    assert all(isinstance(one, LatentProjections) for one in adapter._projections)
    return [one._unpacked_weights for one in adapter._projections if one._unpacked_weights is not None]  # type: ignore[union-attr]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("policy", ["full", "infinigen"])
def test_kv_b_proj_is_unpacked_once(bits: int, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "_ABSORBED", ())
    model = architecture("youtu", kv_lora_rank=64)
    before = load_shape(model)
    quantize.quantize_layers(model, bits)
    packed = {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert packed == {f"model.layers.{i}.self_attn.kv_b_proj" for i in range(3)}
    options = {"approximate_kv": "off", "budget": 1.0} if policy == "infinigen" else {}
    llm = LLM(model, policy=policy, policy_options=options, host_memory="8MiB", verify="off")
    if policy == "full":  # calibration uses the weights
        assert not unpacked_copies(llm)
    for prompt, text in zip(PROMPTS, generate_tokens(llm), strict=True):
        assert_greedy(model, prompt, text)
    held = unpacked_copies(llm)
    assert [copy.nbytes for copy in held] == [COPY] * 3
    generate_tokens(llm)
    assert all(one is other for one, other in zip(unpacked_copies(llm), held, strict=True))
    shape = load_shape(model)
    assert shape.sizes.fixed == before.sizes.fixed + 3 * COPY
    assert shape.weight_bytes == sum(p.nbytes for p in (*model.parameters(), *model.buffers())) + 3 * COPY


def test_quantize_does_not_pack_kv_b_proj() -> None:
    model = architecture("youtu", kv_lora_rank=64)
    quantize.quantize_layers(model, 4)
    assert plain_weight(model.model.layers[0].self_attn.kv_b_proj) is not None


class CastingLinear(nn.Linear):
    """A linear layer whose weight has a narrower dtype than its input, as in FP8 checkpoints."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def test_kv_b_proj_of_another_dtype_is_unpacked() -> None:
    model = architecture("youtu", kv_lora_rank=64)
    plain = load_shape(model).sizes.fixed
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = CastingLinear
        layer.self_attn.kv_b_proj.bfloat16()
    assert load_shape(model).sizes.fixed == plain + 3 * COPY
    llm = LLM(model, policy="full", host_memory="8MiB", verify="off")
    for prompt, text in zip(PROMPTS, generate_tokens(llm), strict=True):
        assert_greedy(model, prompt, text)
    assert [copy.nbytes for copy in unpacked_copies(llm)] == [COPY] * 3


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_kv_b_proj_of_streamed_layers_is_unpacked_and_planned(tmp_path: Path) -> None:
    from transformers import BitsAndBytesConfig

    architecture("youtu", kv_lora_rank=64, num_hidden_layers=6).save_pretrained(tmp_path / "plain")
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=quantization, dtype=torch.float32
    )
    assert plain_weight(model.model.layers[0].self_attn.kv_b_proj) is None
    model.save_pretrained(tmp_path / "packed")
    shape = load_shape(tmp_path / "packed", device="cpu", dtype="float32")
    config = EngineConfig(policy="full", device_memory="1GiB", max_model_len=128, host_memory="8MiB", verify="off")
    large_llm = LLM(tmp_path / "packed", config, dtype="float32", device="cpu")
    outside = sum(weight.nbytes for name, weight in model.named_parameters() if ".layers." not in name)
    assert shape.sizes.fixed == outside + sum(buffer.nbytes for buffer in model.buffers()) + 6 * COPY
    assert shape.weight_bytes == shape.sizes.fixed + sum(shape.sizes.layers)
    expected = generate_tokens(large_llm)
    limit = shape.sizes.fixed + 4 * max(shape.sizes.layers) + plan_for(config, shape).costs.total([128])
    llm = LLM(tmp_path / "packed", config, dtype="float32", device="cpu", device_memory=limit)
    assert llm.runner.weights is not None and llm.runner.weights.stream is not None
    assert generate_tokens(llm) == expected
    assert [copy.nbytes for copy in unpacked_copies(llm)] == [COPY] * 6
