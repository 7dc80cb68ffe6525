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
from torch import nn

from offload_rt import LLM, SamplingParams
from offload_rt.core import KVPart
from offload_rt.errors import ModelError
from offload_rt.forward.attention import attend, give_to_sinks
from offload_rt.kernels import causal
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

UNCAPPED = {("gemma2", "tail")}
"""Models and the policies that they are refused with."""

SOAK = os.environ.get("OFFLOAD_RT_CELLS") == "1"
"""Every policy with every architecture; else each architecture with `full` and, in turn, one other."""


def cells() -> list[tuple[str, str]]:
    others = [policy for policy in POLICIES if policy != "full"]
    each = [(name, (others if SOAK else [others[i % len(others)]])) for i, name in enumerate(RUNS)]
    cells = [(name, policy) for name, chosen in each for policy in ["full", *chosen]]
    return [cell for cell in cells if cell not in UNCAPPED]


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
    def test_a_tail_without_a_cap(self) -> None:
        with pytest.raises(ModelError, match="tail='off'") as refused:
            LLM(architecture("gemma2"), policy="infinigen", host_memory="8MiB")
        assert refused.value.reason == "softcap"

    @pytest.mark.parametrize(
        ("config", "options", "reason"),
        [
            ("Falcon", {"alibi": True}, "alibi"),
            ("Gemma3Text", {"head_dim": 8, "use_bidirectional_attention": True}, "bidirectional"),
            ("Llama", {"num_key_value_heads": 3}, "heads"),
            ("Phi3", {"rope_parameters": LONGROPE}, "rope_length"),
        ],
    )
    def test_what_cannot_run_has_a_reason(self, config: str, options: dict[str, Any], reason: str) -> None:
        with pytest.raises(ModelError) as refused:
            adapter_for(build(config, **options))
        assert refused.value.reason == reason


class TestCapsAndSinks:
    """Attention scores that are capped, and sinks that take a share of the softmax, against a plain softmax."""

    @staticmethod
    def plain(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, cap: float | None, sinks: Any
    ) -> Any:
        """q `[H, m, d]`, k, v `[H, n, d]`, seen bool `[m, n]`, sinks `[H]` or None."""
        scores = q @ k.mT * 0.5
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat((sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1), scores), -1)
            v = torch.cat((torch.zeros_like(v[:, :1]), v), 1)
        return scores.softmax(-1) @ v

    @pytest.mark.parametrize("window", [None, 7])
    @pytest.mark.parametrize(("cap", "with_sinks"), [(0.8, False), (None, True), (0.8, True)])
    def test_slices_and_parts(
        self, cap: float | None, with_sinks: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(causal, "_BLOCK", 5)
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(h, n, 8, generator=generator, dtype=torch.float64) for h, n in ((4, 6), (2, 23), (2, 23))
        )
        sinks = torch.randn(4, generator=generator, dtype=torch.float64) if with_sinks else None
        ago = torch.arange(17, 23)[:, None] - torch.arange(23)
        seen = (ago >= 0) & (ago < (window or 23))
        expected = self.plain(q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), seen, cap, sinks)
        actual = causal.attend_causal(q, k, v, 0.5, window, cap, sinks)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        first = 0 if window is None else 23 - window
        cuts = [slice(first, 18), slice(18, 21), slice(21, 23)]
        parts = [KVPart(k[:, cut], v[:, cut]) for cut in cuts]
        newest = give_to_sinks(*attend(q[:, -1], parts, 0.5, cap), sinks)
        torch.testing.assert_close(newest, expected[:, -1], rtol=0, atol=1e-12)
        if cap is not None:  # rows that lie behind their counts are not meant
            behind = torch.full((2, 3, 8), 9.0, dtype=torch.float64)
            padded = KVPart(*(torch.cat((x[:, cuts[0]], behind), 1) for x in (k, v)), torch.full((2,), 18 - first))
            again = give_to_sinks(*attend(q[:, -1], [padded, *parts[1:]], 0.5, cap), sinks)
            torch.testing.assert_close(again, expected[:, -1], rtol=0, atol=1e-12)

    @pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
    def test_prompts_that_begin_alike(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Their shared rows are one product, with the sinks' share taken once; capped scores are not shared."""
        monkeypatch.setattr("offload_rt.engine.runner.PAYS_FROM_BYTES", 1)
        model = architecture(name)
        stem = prompt_of(70)
        prompts = [stem + prompt_of(3, seed=i) for i in (1, 2, 3)]
        llm = LLM(model, policy="full", host_memory="8MiB")
        for _ in range(2):
            completions = llm.generate(prompts, SamplingParams(max_new_tokens=6, temperature=0))
            assert [c.token_ids for c in completions] == [greedy_reference(model, prompt, 6) for prompt in prompts]

    @pytest.mark.gpu
    @pytest.mark.simulated
    @pytest.mark.parametrize(
        ("name", "tail"), [("gpt_oss", "off"), *([("gemma2", "off"), ("gpt_oss", "int4")] if SOAK else [])]
    )
    def test_a_device_gives_the_tokens_of_a_cpu(self, name: str, tail: str) -> None:
        """Batched selection with sinks, selection of each sequence with a cap and with a tail."""
        options = {"preset": "rows", "tail": tail, "scorer": "auto", "dense_layers": ()} if tail == "off" else {}
        found = []
        for device in ("cpu", "cuda"):
            model = architecture(name)
            for layer in model.model.layers if name == "gpt_oss" else ():
                layer.mlp = nn.Identity()  # experts are more than the simulated device can do
            llm = LLM(model.to(device), policy="infinigen", policy_options=options, host_memory="8MiB")
            params = SamplingParams(max_new_tokens=3, temperature=0)
            found.append([c.token_ids for c in llm.generate([prompt_of(50), prompt_of(40, seed=1)], params)])
        assert found[0] == found[1]

    def test_a_tail_and_sinks_share_one_softmax(self) -> None:
        """What the tail estimates weighs against the sinks too: 4-bit rows move the logits of a model with strong sinks
        by a few percent, a softmax that left the sinks out of the tail's share by much more."""
        model = architecture("gpt_oss")
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(3.0)
        prompt, token = prompt_of(120), [prompt_of(1, seed=5)]
        scores = []
        for policy, options in (("full", {}), ("infinigen", {"max_fraction": 0.05, "recent": 4})):
            llm = LLM(model, policy=policy, policy_options=options, host_memory="8MiB")
            scores.append(llm.score([prompt], token, decode_from=100)[0].logprobs[0])
        assert scores[1] == pytest.approx(scores[0], abs=0.1)
