"""Test that keys of Qwen2 are scaled for a quantised KV cache: scores stay the same, and quantisation loses less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_checkpoint, tiny_model, tiny_prompt
from transformers import AutoModelForCausalLM

from offload_rt import LLM, EngineConfig
from offload_rt.engine.build import _load
from offload_rt.models import checkpoint_cache, loading
from offload_rt.models.fingerprint import fingerprint as digest
from offload_rt.models.key_balance import balance_keys, can_balance_keys, key_scales
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


def test_logits_do_not_change() -> None:
    model, prompt = enlarge(tiny_model("qwen2", num_hidden_layers=2)), torch.tensor([tiny_prompt(40)])
    before, keys = model(prompt).logits, model.model.layers[0].self_attn.k_proj.weight.clone()
    balance_keys(model)
    assert torch.equal(model(prompt).logits, before)
    assert not torch.equal(model.model.layers[0].self_attn.k_proj.weight, keys)


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
    packed = loading.load_model(folder, dtype="float32", quantize="int8", verify="off")
    assert packed.fingerprint != fingerprint(quantised_kv=True, quantize="int8")


def test_keys_are_not_scaled_if_a_skew_artifact_is_given(folder: str, tmp_path: Path) -> None:
    config = EngineConfig(dtype="float32", verify="off")
    found = [config, replace(config, kv_cache_dtype="int8"), replace(config, kv_cache_dtype="int8", skew=tmp_path)]
    original, balanced, given = (_load(folder, each).fingerprint for each in found)
    assert original == given != balanced
