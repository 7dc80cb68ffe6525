"""Test that keys of Qwen2 are scaled for a quantised KV cache: scores stay the same, and quantisation loses less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.packed_rows import random_rows
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import tiny_checkpoint, tiny_model, tiny_prompt
from torch import nn
from transformers import AutoModelForCausalLM

from offload_rt import LLM, EngineConfig
from offload_rt.engine.build import _load
from offload_rt.kernels.packed_format import PackedFormat
from offload_rt.models import checkpoint_cache, loading
from offload_rt.models.fingerprint import fingerprint as digest
from offload_rt.models.key_balance import balance_keys, can_balance_keys, key_scales
from offload_rt.models.linear.packed import PackedLinear, use_packed_weights
from offload_rt.models.linear.quantize import quantize_layers
from offload_rt.models.weights import decoder_layers


def enlarge(model: Any) -> Any:
    """Give two channels of each head, which RoPE does not rotate together, biases like those of Qwen2.5."""
    for layer in decoder_layers(model):
        attention: Any = layer.self_attn
        bias = attention.k_proj.bias.data.view(-1, attention.head_dim)
        bias[:, 3], bias[:, -2] = 40.0, -60.0
    return model


def test_models_without_biases_and_pruned_channels_are_supported() -> None:
    assert not can_balance_keys(tiny_model("llama"))
    model: Any = tiny_model("qwen2")
    attention = model.model.layers[0].self_attn
    half = attention.head_dim // 2
    for each in (attention.k_proj.weight, attention.k_proj.bias):
        each.data[[1, 1 + half]] = 0
    scales = key_scales(attention.k_proj, torch.ones(attention.k_proj.in_features), attention.head_dim)
    assert scales[0, 1] == 1 and scales.isfinite().all()
    assert can_balance_keys(model)
    attention.k_proj.bias = None  # Qwen2-MoE with qkv_bias=False
    assert not can_balance_keys(model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("qwen2")
    tiny_checkpoint(path, "qwen2", num_hidden_layers=2)
    enlarge(AutoModelForCausalLM.from_pretrained(path)).save_pretrained(path)
    return str(path)


@torch.inference_mode()
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_logits_do_not_change(bits: int) -> None:
    model, prompt = enlarge(tiny_model("qwen2", num_hidden_layers=2)).float(), torch.tensor([tiny_prompt(40)])
    if bits < 16:
        quantize_layers(model, bits)
    k_proj = model.model.layers[0].self_attn.k_proj
    assert type(k_proj) is (nn.Linear if bits == 16 else PackedLinear)
    before, keys = model(prompt).logits, k_proj(torch.ones(1, k_proj.in_features))
    assert can_balance_keys(model)
    balance_keys(model)
    assert model(prompt).logits.equal(before)
    assert not k_proj(torch.ones(1, k_proj.in_features)).equal(keys)


def test_packed_weights_have_the_scales_of_the_dequantised_weights() -> None:
    form = PackedFormat(192, 4, 32, has_minima=True, permuted=True)
    rows, weights = random_rows(form, 32)
    packed, plain, norm = nn.Linear(192, 32), nn.Linear(192, 32), torch.randn(192)
    use_packed_weights(packed, form, torch.float32, rows)
    packed.order.data = torch.randperm(192).int()
    packed.bias, plain.weight.data = plain.bias, weights.float()[:, packed.order.long().argsort()]
    assert key_scales(packed, norm, 16).equal(key_scales(plain, norm, 16))


def test_scales_are_powers_of_two_and_large_channels_have_large_scales() -> None:
    attention = enlarge(tiny_model("qwen2")).model.layers[0].self_attn
    scales = key_scales(attention.k_proj, torch.ones(attention.k_proj.in_features), attention.head_dim)
    half = attention.head_dim // 2
    assert scales.log2().frac().eq(0).all()
    assert scales[:, :half].equal(scales[:, half:]), "RoPE rotates both channels together"
    assert set(scales[0, :half].topk(2).indices.tolist()) == {3, half - 2}


def test_balanced_keys_lose_less(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def logprobs(**options: Any) -> torch.Tensor:
        with LLM(folder, policy="full", dtype="float32", host_memory="4MiB", verify="off", **options) as llm:
            [score] = llm.score([tiny_prompt(200)], [tiny_prompt(8, seed=1)], decode_from=190)
        return torch.tensor(score.logprobs)

    exact, balanced = logprobs(), logprobs(kv_cache_dtype="int8")
    monkeypatch.setattr(loading, "can_balance_keys", lambda model: False)
    plain = logprobs(kv_cache_dtype="int8")
    assert (balanced - exact).norm() < (plain - exact).norm() / 2


def test_fingerprint_is_that_of_the_scaled_weights(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint(**options: Any) -> str:
        return loading.load_model(folder, dtype="float32", verify="off", **options).fingerprint

    monkeypatch.setattr(checkpoint_cache, "SETTLED_SECONDS", 0)  # fingerprints of new files are cached, too
    scaled = AutoModelForCausalLM.from_pretrained(folder)
    original = digest(scaled)
    balance_keys(scaled)
    for _ in range(2):
        assert fingerprint(quantised_kv=True) == digest(scaled)
        assert fingerprint() == original != digest(scaled)
    packed = fingerprint(quantize="int8")
    assert packed != fingerprint(quantised_kv=True, quantize="int8")


def test_keys_of_gguf_files_are_scaled(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "Q4_1")
    plain, scaled = (
        loading.load_model(path, dtype="float32", verify="off", quantised_kv=each) for each in (False, True)
    )
    assert scaled.fingerprint != plain.fingerprint
    x = torch.randn(3, 128)
    for one, other in zip(plain.layers, scaled.layers, strict=True):
        assert products(one, x).equal(products(other, x))


def products(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the products of all channels of queries and keys, `[n, Hq, d]`."""
    attention = layer.self_attn
    queries, keys = (each(x).view(len(x), -1, attention.head_dim) for each in (attention.q_proj, attention.k_proj))
    return queries * keys.repeat_interleave(attention.num_key_value_groups, dim=1)


def test_keys_are_not_scaled_if_a_skew_artifact_is_given(folder: str, tmp_path: Path) -> None:
    config = EngineConfig(dtype="float32", verify="off")
    found = [config, replace(config, kv_cache_dtype="int8"), replace(config, kv_cache_dtype="int8", skew=tmp_path)]
    original, balanced, given = (_load(folder, each).fingerprint for each in found)
    assert original == given != balanced
