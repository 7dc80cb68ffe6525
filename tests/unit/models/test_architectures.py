"""Compare every architecture with transformers, with tiny random models.

`make stress PART=architectures` combines every policy with every architecture.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import LATENT, RECURRENT, REFUSED, RUNS, VOCAB, WINDOW, architecture, build
from support.outputs import completed
from support.tiny_models import assert_greedy
from torch import nn

from offload_rt import LLM, SamplingParams
from offload_rt.core import KVPart
from offload_rt.errors import ModelError
from offload_rt.kernels import causal
from offload_rt.kernels.decode_attention import apply_sinks, attend
from offload_rt.models import loading
from offload_rt.models.adapter import ModelAdapter
from offload_rt.models.full_attention import query_and_kv, residual_after_attention
from offload_rt.models.loading import load_model
from offload_rt.models.multimodal import text_config
from offload_rt.models.registry import adapter_for
from offload_rt.models.shape import load_shape

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
"""Policies configured to attend to all tokens."""

STRESS = os.environ.get("OFFLOAD_RT_CELLS") == "1"
"""Whether to run every policy with every architecture. By default, architectures take turns with the policies."""

TOLERANCES = {"qwen3_next": 1e-4}
"""With AVX2, transformers and this runtime both differ from float64 by 2e-5 of the largest logit in one position."""


def cells() -> list[tuple[str, str]]:
    chosen = list(POLICIES)
    return [
        (name, policy)
        for i, (name, kind) in enumerate(RUNS.items())
        for policy in (chosen if STRESS else [chosen[i % len(chosen)]])
        if STRESS or "text_config" not in kind.options  # test_multimodal.py generates with multimodal checkpoints
    ]


DECODED_TRAITS = (
    "sliding", "chunked", "sinks", "capped", "temperature", "one KV head", "wider than values", "equal K and V",
    "earlier ones", "numbers of KV heads", "without positions", "interleaved", "partial RoPE", "learned positions",
    "latent", "gated delta", "Delta Attention", "Mamba-2", "beside attention", "convolutions", "one mixer", "experts",
    "multipliers", "parallel", "normed", "attention sinks, mixture",
)  # fmt: skip
"""Traits that affect decoding in a batch. `test_logits_equal_transformers` tests all traits in one sequence."""


def decoded_traits(name: str, policy: str) -> set[str]:
    return {policy, *(trait for trait in DECODED_TRAITS if trait in RUNS[name].traits)}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def forward(adapter: ModelAdapter, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the logits `[T, V]` of one sequence, computed layer by layer with the adapter.

    Recurrent layers process the sequence in three pieces of odd lengths.
    """
    adapter, pieces = adapter.for_new_sequence(), [slice(0, 7), slice(7, 20), slice(20, None)]
    x, shared = adapter.embed(tokens, positions), dict[int, KVPart]()
    adapter.run_stages(-1, x, pieces)
    for layer in range(adapter.geometry.layers):
        q, kv = query_and_kv(adapter, layer, adapter.attention_input(layer, x), positions, shared)
        x = adapter.mlp(layer, residual_after_attention(adapter, layer, x, q, kv, len(tokens)), tokens)
        adapter.run_stages(layer, x, pieces)
    return adapter.logits(x)


@pytest.mark.parametrize("name", RUNS)
def test_logits_equal_transformers(name: str) -> None:
    model = architecture(name)
    adapter = adapter_for(model)
    assert bool(adapter.geometry.states) == (name in RECURRENT)
    first = 0 if adapter.geometry.chunked else 5  # Llama 4 counts positions from the first given token
    tokens, positions = torch.tensor(prompt_of(3 * WINDOW)), torch.arange(first, first + 3 * WINDOW)
    expected = model(tokens[None], position_ids=positions[None]).logits[0]
    actual = forward(adapter, tokens, positions)
    # float32 rounding, relative to the largest logit
    assert (actual - expected).abs().max() <= TOLERANCES.get(name, 2e-5) * expected.abs().max()


@pytest.mark.sampled(features=decoded_traits)
@pytest.mark.parametrize(("name", "policy"), cells())
def test_ragged_batch_generates_the_tokens_of_transformers(name: str, policy: str) -> None:
    model = architecture(name)
    # the third sequence outgrows the windows while decoding
    prompts = [prompt_of(length, seed=length) for length in (3 * WINDOW, 1, WINDOW - 2)]
    chosen, options = POLICIES[policy]
    llm = LLM(model, policy=chosen, policy_options=options, host_memory="8MiB", verify="always")
    assert model.config._attn_implementation == "eager"
    completions = completed(llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0)))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == 4
        assert_greedy(model, prompt, completion.token_ids)
        assert completion.stats.exact_fraction == 1.0


@pytest.mark.parametrize("name", ["llama3", "mimo_v2_flash", "youtu"])
def test_attention_scale_defaults_to_the_head_dimension(name: str) -> None:
    model = architecture(name)
    expected = adapter_for(model).geometry.scales
    for module in model.modules():
        if hasattr(module, "scaling"):
            del module.scaling
    # the head dimension of the module counts, even if the KV cache is wider
    assert adapter_for(model).geometry.scales == pytest.approx(expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("opt", "gpt2")])
def test_rotated_keys_equal_keys_of_later_positions(name: str) -> None:
    adapter = adapter_for(architecture(name))
    a, positions = torch.randn(9, 32, generator=torch.Generator().manual_seed(0)), torch.arange(40, 49)
    for layer in adapter.geometry.kv_layers:
        keys, _ = adapter.key_value(layer, a, positions)
        for offset in (-7, 0, 1000):
            later, _ = adapter.key_value(layer, a, positions + offset)
            # float32 angles of up to 1,050 radians have errors of 6e-5
            torch.testing.assert_close(adapter.rotate_keys(layer, keys, offset), later, rtol=0, atol=1e-3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RUNS)
def test_bfloat16_kv_of_the_first_layer_equals_transformers(name: str) -> None:
    model = architecture(name, dtype=torch.bfloat16)
    adapter = adapter_for(model).for_new_sequence()
    tokens, positions = torch.tensor(prompt_of(WINDOW - 1)), torch.arange(WINDOW - 1)
    cached = model(tokens[None], use_cache=True).past_key_values.layers[adapter.geometry.decoder_layer(0)]
    keys, expected = cached.keys, cached.values
    if name in LATENT:  # transformers caches latent vectors as keys and rotated keys as values
        if hasattr(text_config(model.config), "rope_interleave"):  # it rotates interleaved pairs to half-split ones
            expected = expected.unflatten(-1, (2, -1)).mT.flatten(-2)
        keys, expected = torch.cat((keys, expected), -1), keys
    x = adapter.embed(tokens, positions)
    adapter.run_stages(-1, x, [slice(None)])
    _, k, v = adapter.qkv(0, adapter.attention_input(0, x), positions)
    group = keys.shape[1] // len(k)  # Falcon caches grouped heads repeated
    # K may differ by one unit in the last place
    torch.testing.assert_close(k, keys[0, ::group], rtol=2**-7, atol=2**-6)
    expected = expected[0, ::group]
    torch.testing.assert_close(v[..., : expected.shape[-1]], expected, rtol=0, atol=0)
    if name in LATENT:
        assert v is k and adapter.geometry.value_dim == expected.shape[-1]
    else:
        assert not v[..., expected.shape[-1] :].any(), "zeros where keys are wider than values"


class TestRefusals:
    @pytest.mark.parametrize("name", REFUSED)
    def test_unsupported_models_have_a_reason(self, name: str) -> None:
        kind, reason, _ = REFUSED[name]
        with pytest.raises(ModelError) as refused:
            load_model(build(kind.config, **kind.options))
        assert refused.value.reason == reason

    def test_models_are_refused_before_their_weights_are_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        build("Bloom").save_pretrained(tmp_path)
        monkeypatch.setattr(loading, "read_weights", lambda *_, **__: pytest.fail("read"))
        for read in (load_model, load_shape):
            with pytest.raises(ModelError, match=r"^BloomForCausalLM is not supported: .*ALiBi") as refused:
                read(tmp_path)
            assert refused.value.reason == "alibi"

    @pytest.mark.parametrize("name", ["Nemotron", "Olmoe", "Helium"])
    def test_unregistered_architectures_may_run(self, name: str, tmp_path: Path) -> None:
        build(name, head_dim=8).save_pretrained(tmp_path)
        assert load_model(tmp_path, device="cpu").adapter.geometry.layers == 3


class TestCapsAndSinks:
    @staticmethod
    def reference(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, cap: float | None, sinks: Any
    ) -> Any:
        """Return attention of q `[H, m, d]` to k and v `[H, n, d]`. `seen` is bool `[m, n]`, `sinks` `[H]` or None."""
        scores = q @ k.mT * 0.5
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat((sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1), scores), -1)
            v = torch.cat((torch.zeros_like(v[:, :1]), v), 1)
        return scores.softmax(-1) @ v

    @pytest.mark.parametrize("window", [None, 7])
    @pytest.mark.parametrize(("cap", "with_sinks"), [(0.8, False), (None, True), (0.8, True)])
    def test_prefill_chunks_and_decode_parts_equal_the_reference(
        self, cap: float | None, with_sinks: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(causal, "KEYS_AT_ONCE", 5)
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(h, n, 8, generator=generator, dtype=torch.float64) for h, n in ((4, 6), (2, 23), (2, 23))
        )
        sinks = torch.randn(4, generator=generator, dtype=torch.float64) if with_sinks else None
        ago = torch.arange(17, 23)[:, None] - torch.arange(23)
        seen = (ago >= 0) & (ago < (window or 23))
        expected = self.reference(q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), seen, cap, sinks)
        actual = causal.attend_causal(q, k, v, 0.5, window, cap, sinks)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        first = 0 if window is None else 23 - window
        cuts = [slice(first, 18), slice(18, 21), slice(21, 23)]
        parts = [KVPart(k[:, cut], v[:, cut]) for cut in cuts]
        newest = apply_sinks(*attend(q[:, -1], parts, 0.5, cap), sinks)
        torch.testing.assert_close(newest, expected[:, -1], rtol=0, atol=1e-12)
        if cap is not None:  # KV after the counts must be ignored
            behind = torch.full((2, 3, 8), 9.0, dtype=torch.float64)
            padded = KVPart(*(torch.cat((x[:, cuts[0]], behind), 1) for x in (k, v)), torch.full((2,), 18 - first))
            again = apply_sinks(*attend(q[:, -1], [padded, *parts[1:]], 0.5, cap), sinks)
            torch.testing.assert_close(again, expected[:, -1], rtol=0, atol=1e-12)

    @pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
    def test_prompts_with_a_common_prefix_equal_transformers(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without a cap, one product computes all requests' attention to the prefix. Sinks must count only once."""
        monkeypatch.setattr("offload_rt.engine.runner.MIN_SAVED_BYTES", 1)
        model = architecture(name)
        stem = prompt_of(70)
        prompts = [stem + prompt_of(3, seed=i) for i in (1, 2, 3)]
        llm = LLM(model, policy="full", host_memory="8MiB")
        for _ in range(2):
            completions = completed(llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0)))
            for prompt, completion in zip(prompts, completions, strict=True):
                assert_greedy(model, prompt, completion.token_ids)

    @pytest.mark.gpu
    @pytest.mark.simulated
    @pytest.mark.parametrize(
        ("name", "tail"),
        [("gpt_oss", "off"), *([("gemma2", "off"), ("gpt_oss", "int4"), ("llama4", "off")] if STRESS else [])],
    )
    def test_tokens_on_a_device_equal_the_cpu_path(self, name: str, tail: str) -> None:
        options = (
            {"preset": "rows", "approximate_kv": tail, "scorer": "auto", "dense_layers": ()} if tail == "off" else {}
        )
        found = []
        for device in ("cpu", "cuda"):
            model = architecture(name)
            for layer in model.model.layers if name in ("gpt_oss", "llama4") else ():
                setattr(layer, "mlp" if name == "gpt_oss" else "feed_forward", nn.Identity())  # experts are too slow
            llm = LLM(model.to(device), policy="infinigen", policy_options=options, host_memory="8MiB", verify="off")
            params = SamplingParams(max_tokens=3, temperature=0)
            found.append([c.token_ids for c in completed(llm.generate([prompt_of(46), prompt_of(40, seed=1)], params))])
        assert found[0] == found[1]

    @pytest.mark.parametrize(("name", "tolerance"), [("gemma2", 0.02), ("gpt_oss", 0.1)])
    def test_approximate_kv_uses_cap_and_sinks(self, name: str, tolerance: float) -> None:
        """If cap or sinks were ignored, the error would be much larger than that of 4-bit KV (a few percent)."""
        model = architecture(name, **({"attn_logit_softcapping": 0.5} if name == "gemma2" else {}))
        for layer in model.model.layers if name == "gpt_oss" else ():
            layer.self_attn.sinks.fill_(3.0)
        prompt, token = prompt_of(120), [prompt_of(1, seed=5)]
        scores = []
        for policy, options in (("full", {}), ("infinigen", {"max_fraction": 0.05, "recent": 4})):
            llm = LLM(model, policy=policy, policy_options=options, host_memory="8MiB")
            scores.append(llm.score([prompt], token, decode_from=100)[0].logprobs[0])
        assert scores[1] == pytest.approx(scores[0], abs=tolerance)
