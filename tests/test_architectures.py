"""Every architecture against transformers, on tiny random models: logits of prefill and decode, greedy tokens of
policies at full budget, ragged batches, past every window, and what is refused. `make soak PART=architectures` runs
every policy with every architecture."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from support.architectures import RUNS, VOCAB, WINDOW, architecture, build
from support.tiny_models import greedy_reference

from offload_rt import LLM, SamplingParams
from offload_rt.core import KVPart
from offload_rt.errors import ModelError
from offload_rt.models.adapter import ModelAdapter
from offload_rt.models.exact_layer import residual_after_attention
from offload_rt.models.registry import adapter_for

EVERYTHING = {"alpha": math.inf, "max_fraction": 1.0, "dense_layers": ()}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "rows": ("infinigen", EVERYTHING | {"preset": "rows"}),
    "int4": ("infinigen", EVERYTHING | {"preset": "rows", "scorer": "int4", "source": "residual"}),
    "oracle": ("oracle", {"budget": 1.0, "dense_layers": ()}),
    "h2o": ("h2o", {"budget": 1.0, "dense_layers": ()}),
    "quest": ("quest", {"budget": 1.0, "dense_layers": ()}),
    "tail": ("infinigen", {"budget": 1.0, "dense_layers": ()}),
}
"""Policies that attend to everything."""

SOAK = os.environ.get("OFFLOAD_RT_CELLS") == "1"
"""Every policy with every architecture; else each architecture with `full` and, in turn, one other."""


def cells() -> list[tuple[str, str]]:
    others = [policy for policy in POLICIES if policy != "full"]
    each = [(name, (others if SOAK else [others[i % len(others)]])) for i, name in enumerate(RUNS)]
    return [(name, policy) for name, chosen in each for policy in ["full", *chosen]]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def forward(adapter: ModelAdapter, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Logits `[T, V]` of one sequence through the adapter's pieces."""
    x = adapter.embed(tokens, positions)
    for layer in range(adapter.geometry.layers):
        q, k, v = adapter.qkv(layer, adapter.attention_input(layer, x), positions)
        x = adapter.mlp(layer, residual_after_attention(adapter, layer, x, q, KVPart(k, v), len(tokens)))
    return adapter.logits(x)


@pytest.mark.parametrize("name", RUNS)
def test_logits_are_those_of_transformers(name: str) -> None:
    """From a position other than 0, past the windows. 2e-5 of the largest logit is float32 rounding."""
    model = architecture(name)
    tokens, positions = torch.tensor(prompt_of(3 * WINDOW)), torch.arange(5, 5 + 3 * WINDOW)
    expected = model(tokens[None], position_ids=positions[None]).logits[0]
    actual = forward(adapter_for(model), tokens, positions)
    assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize(("name", "policy"), cells())
def test_a_ragged_batch_continues_as_transformers(name: str, policy: str) -> None:
    """Greedy tokens of three prompts in a batch: shorter and longer than the windows, and one that passes them while it
    decodes."""
    model = architecture(name)
    prompts = [prompt_of(length, seed=length) for length in (3 * WINDOW, 1, WINDOW - 2)]
    chosen, options = POLICIES[policy]
    llm = LLM(model, policy=chosen, policy_options=options, host_memory="8MiB")
    completions = llm.generate(prompts, SamplingParams(max_new_tokens=8, temperature=0))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == greedy_reference(model, prompt, 8)
        assert completion.stats.attended_fraction == 1.0


@pytest.mark.parametrize("name", ["gemma3", "smollm3", "cohere2", "glm4", "gpt_neox", "olmo3"])
def test_rotated_keys_are_those_of_later_positions(name: str) -> None:
    """In every layer, with its own rotation or none."""
    adapter = adapter_for(architecture(name))
    a, positions = torch.randn(9, 32, generator=torch.Generator().manual_seed(0)), torch.arange(40, 49)
    for layer in range(adapter.geometry.layers):
        keys, _ = adapter.key_value(layer, a, positions)
        later, _ = adapter.key_value(layer, a, positions + 100)
        torch.testing.assert_close(adapter.rotate_keys(layer, keys, 100), later, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", RUNS)
def test_half_precision_rounds_like_transformers(name: str) -> None:
    """bfloat16: the first layer's keys and values are transformers' own, but for one unit in the last place."""
    model = architecture(name, dtype=torch.bfloat16)
    adapter = adapter_for(model)
    tokens, positions = torch.tensor(prompt_of(WINDOW - 1)), torch.arange(WINDOW - 1)
    cached = model(tokens[None], use_cache=True).past_key_values.layers[0]
    _, k, v = adapter.qkv(0, adapter.attention_input(0, adapter.embed(tokens, positions)), positions)
    group = cached.keys.shape[1] // len(k)  # Falcon caches grouped heads repeated
    torch.testing.assert_close(k, cached.keys[0, ::group], rtol=2**-7, atol=2**-6)
    torch.testing.assert_close(v, cached.values[0, ::group], rtol=0, atol=0)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 512,
}


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "options", "reason"),
        [
            ("Falcon", {"alibi": True}, "alibi"),
            ("Gemma3Text", {"head_dim": 8, "use_bidirectional_attention": True}, "bidirectional"),
            ("Llama", {"num_key_value_heads": 3}, "heads"),
            ("Phi3", {"rope_parameters": LONGROPE}, "rope_length"),
            ("Gemma3Text", {"head_dim": 8, "attn_logit_softcapping": 20.0}, "attention"),
        ],
    )
    def test_what_cannot_run_has_a_reason(self, config: str, options: dict[str, Any], reason: str) -> None:
        with pytest.raises(ModelError) as refused:
            adapter_for(build(config, **options))
        assert refused.value.reason == reason
