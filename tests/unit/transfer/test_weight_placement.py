"""Test experts and embeddings in host memory: results equal those of a model that is entirely on the device.

Weights are random, so the hit rates say nothing about trained models.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.allocations import count_device_bytes, device_selection
from support.architectures import VOCAB, architecture
from support.outputs import completed
from support.sampling import examples
from transformers import PreTrainedModel

from offload_rt import LLM, ConfigError, EngineConfig, MemoryLimitError, SamplingParams
from offload_rt.cli import main
from offload_rt.models.shape import load_shape
from offload_rt.models.weights import Placement, decoder_layers, experts_of
from offload_rt.planning.device_plan import plan_for
from offload_rt.transfer.weights.experts import ExpertCache
from offload_rt.transfer.weights.streamed import BUFFERS

ALL = os.environ.get("OFFLOAD_RT_SCHEDULES") == "all"
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
"""Mixture-of-experts models with four experts, of which two are chosen for each token. qwen2_moe also has a shared
expert and layers without experts."""
EXPERTS, CHOSEN = 4, 2
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
GENERATOR = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(1, VOCAB, (length,), generator=GENERATOR).tolist() for length in (40, 7, 23)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            architecture(name).save_pretrained(made[name])
        return made[name]

    return save


def make_llm(folder: Path, **settings: Any) -> LLM:
    settings = {"policy": "full", "device": "cpu", "dtype": "float32", "host_memory": "4MiB"} | settings
    return LLM(folder, **settings)


def logits_of(llm: LLM) -> torch.Tensor:
    """Return logits `[9, V]`: for the last prompt token of each sequence, then for two decode steps of the batch."""
    runner = llm.runner
    sequences = [runner.new_sequence([*prompt, 1, 2], len(prompt) + 2) for prompt in PROMPTS]
    found = [runner.prefill(s, len(p), want_logits=True)[None] for s, p in zip(sequences, PROMPTS, strict=True)]
    found += [runner.decode(sequences) for _ in range(2)]
    for sequence in sequences:
        runner.free(sequence)
    runner.check_integrity()
    return torch.cat(found)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [completion.token_ids for completion in completed(llm.generate(PROMPTS, GREEDY))]


# ------------------------------------------------------------------------------------------------------- same answers


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_in_host_memory_give_the_same_logits(folder: Any, name: str) -> None:
    expected = logits_of(make_llm(folder(name)))
    # fewer slots than one token's experts need, and enough for nearly all experts
    for slots in (1, 3):
        llm = make_llm(folder(name), experts_on_device=slots)
        # float32 sums have another order
        torch.testing.assert_close(logits_of(llm), expected, rtol=1e-5, atol=1e-5)
        assert llm.runner.weights is not None and all(cache.bytes for cache in llm.runner.weights.experts)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["full", "infinigen", "quest"])
def test_tokens_are_the_same_under_every_policy(folder: Any, policy: str) -> None:
    options = {} if policy == "full" else {"sinks": 2, "recent": 8}
    settings = {"policy": policy, "policy_options": options}
    there = make_llm(folder("qwen3_moe"), experts_on_device=2, embedding_on_host=True, **settings)
    assert tokens_of(there) == tokens_of(make_llm(folder("qwen3_moe"), **settings))


@pytest.mark.parametrize("name", ["mixtral", "opt"])
def test_embedding_in_host_memory_gives_the_same_logits(folder: Any, name: str) -> None:
    llm, whole = (make_llm(folder(name), embedding_on_host=where) for where in (True, False))
    assert torch.equal(logits_of(llm), logits_of(whole))
    used = llm.runner.weights
    assert used is not None and used.embedding is not None
    tokens = sum(map(len, PROMPTS)) + 2 * len(PROMPTS)
    assert used.use.bytes == tokens * llm.runner.adapter.geometry.hidden * 4, "only the embedding rows of tokens"
    [completion] = completed(llm.generate([PROMPTS[0]], GREEDY))
    [other] = completed(whole.generate([PROMPTS[0]], GREEDY))
    assert other.stats.weight_bytes_device - completion.stats.weight_bytes_device == used.embedding.host_bytes


def test_statistics_count_transferred_weights(folder: Any) -> None:
    llm = make_llm(folder("mixtral"), experts_on_device=3)
    [completion] = completed(llm.generate([PROMPTS[0]], GREEDY))
    stats, weights = completion.stats, llm.runner.weights
    assert weights is not None and stats.h2d_weight_bytes == weights.use.bytes
    one = weights.experts[0].host_bytes // EXPERTS
    steps, layers = GREEDY.max_tokens - 1, len(weights.experts)
    missed = round((1 - stats.expert_hit_rate) * steps * layers * CHOSEN)
    assert stats.h2d_weight_bytes_steps == missed * one > 0
    assert stats.h2d_weight_bytes - stats.h2d_weight_bytes_steps == (2 * EXPERTS + CHOSEN) * one, (
        "the last layer computes only the last token"
    )
    assert stats.weight_bytes_device == stats.weight_bytes - layers * one


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("name", MIXTURES if ALL else MIXTURES[:1])
def test_tokens_on_a_device_equal_the_cpu_path(folder: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the simulated device has no grouped expert products
    monkeypatch.setattr(PreTrainedModel, "get_correct_experts_implementation", lambda self, asked: "batched_mm")
    few = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    prompts = [prompt[:6] for prompt in PROMPTS[: 3 if ALL else 2]]

    def tokens(device: str, **settings: Any) -> list[list[int]]:
        llm = make_llm(folder(name), device=device, **settings)
        found = [completion.token_ids for completion in completed(llm.generate(prompts, few))]
        llm.runner.check_integrity()
        if llm.runner.weights is not None:
            assert all(own.is_pinned() for cache in llm.runner.weights.experts for own in cache._host)
        return found

    assert tokens("cuda", experts_on_device=2, embedding_on_host=True) == tokens("cpu")


# ---------------------------------------------------------------------------------------------------------- the cache


@pytest.fixture(scope="module")
def expert_module() -> Any:
    model = architecture("mixtral", num_local_experts=6, num_hidden_layers=1)
    return experts_of(decoder_layers(model)[0])


@given(
    calls=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 99)), min_size=1, max_size=5),
    slots=st.integers(1, 6),
)
@settings(max_examples=examples(15), deadline=None)
def test_cached_experts_give_the_outputs_of_the_original_module(
    expert_module: Any, calls: list[tuple[int, int, int]], slots: int
) -> None:
    """`calls` are tuples (tokens, experts per token, seed)."""
    cache = ExpertCache(copy.deepcopy(expert_module), slots, torch.device("cpu"))
    one = cache.host_bytes // 6
    used: dict[int | None, int] = {}
    for now, (tokens, k, seed) in enumerate(calls):
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(tokens, 32, generator=generator)
        index = torch.stack([torch.randperm(6, generator=generator)[:k] for _ in range(tokens)])
        weights = torch.rand(tokens, k, generator=generator)
        before, held, chosen = cache.bytes, set(cache._expert_in_slot) - {None}, set(index.flatten().tolist())
        torch.testing.assert_close(
            cache(hidden, index, weights), expert_module(hidden, index, weights), rtol=1e-5, atol=1e-6
        )
        cache.check_integrity()
        assert cache.bytes - before == one * len(chosen - held)
        if len(chosen) <= slots:
            left, stayed = held - set(cache._expert_in_slot), held & set(cache._expert_in_slot) - chosen
            assert set(cache._expert_in_slot) >= chosen
            # the least recently used experts are evicted
            assert max((used[expert] for expert in left), default=-1) <= min((used[e] for e in stayed), default=now)
        used |= dict.fromkeys(chosen, now)
    assert cache.device_bytes == min(slots, 6) * one


# ------------------------------------------------------------------------------------------------------------ the plan


def test_plan_keeps_as_many_experts_as_fit(folder: Any) -> None:
    shape = load_shape(folder("mixtral"), device="cpu", dtype="float32")
    assert shape.sizes.experts is not None
    config = EngineConfig(policy="full", device_memory="1GiB", max_model_len=64, host_memory="4MiB")
    whole = plan_for(config, shape)
    assert whole.placement == Placement()
    rest, step = whole.costs.total([64]), sum(shape.sizes.experts.one_expert)
    for slots in (3, 2, 1):
        limit = shape.sizes.fixed + sum(shape.sizes.layers) - (EXPERTS - slots) * step + rest
        llm = make_llm(folder("mixtral"), device_memory=limit, max_model_len=64)
        plan, weights = llm.runner.plan, llm.runner.weights
        assert plan is not None and weights is not None and plan.placement == Placement(experts=slots)
        assert weights.device_bytes == slots * step
        [completion] = completed(llm.generate([PROMPTS[0]], GREEDY))
        assert completion.stats.weight_bytes_device <= plan.weights <= limit - rest
        assert plan.weights - completion.stats.weight_bytes_device < 64 * 12 * 3, "the difference is alignment"
    # experts leave the device before layers
    least = make_llm(folder("mixtral"), device_memory=limit - 1, max_model_len=64)
    assert least.runner.plan is not None and len(least.runner.plan.streamed) > BUFFERS - 1
    assert least.runner.plan.placement.experts == 1
    assert tokens_of(least) == tokens_of(make_llm(folder("mixtral")))
    least.runner.check_integrity()


def test_limit_too_small_for_one_expert_is_refused(folder: Any) -> None:
    with pytest.raises(MemoryLimitError, match="device_memory"):
        make_llm(folder("mixtral"), device_memory="64KiB", max_model_len=64)


def test_info_shows_where_experts_and_embedding_are(folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(folder("mixtral"))
    arguments = ["info", place, "--context", "64", "--device", "cpu", "--dtype", "float32"]
    assert main([*arguments, "--experts-on-device", "2", "--embedding-on-host"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "experts on the device" in output and "2 of 4 in each layer, 18 KiB each" in output
    assert "experts copied per token" in output and "at most 108 KiB" in output, "2 of 18 KiB in each of 3 layers"
    assert "embedding" in output and "in host memory, 12.1 KiB" in output
    assert main(arguments) == 0
    assert "expert" not in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------ refusals


def test_impossible_placements_are_refused(folder: Any, tmp_path: Path) -> None:
    architecture("llama3", tie_word_embeddings=True).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no mixture of experts"):
        make_llm(folder("llama3"), experts_on_device=2)
    with pytest.raises(ConfigError, match="experts_on_device=0"):
        make_llm(folder("mixtral"), experts_on_device=0)
    with pytest.raises(ConfigError, match="head is its embedding"):
        make_llm(tmp_path, embedding_on_host=True)
    with pytest.raises(ConfigError, match="pass the model's folder"):
        make_llm(architecture("mixtral"), experts_on_device=2)  # type: ignore[arg-type]
    assert make_llm(folder("mixtral"), experts_on_device=EXPERTS).runner.weights is None


WIDE: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 96}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "more", "slots"), [("qwen3_moe", WIDE, 15), ("gpt_oss", {}, 1)])
def test_peak_memory_is_below_the_limit(name: str, more: dict[str, Any], slots: int, tmp_path: Path) -> None:
    """The peak includes the outputs of eight experts (qwen3_moe) or attention scores with a sink (gpt_oss)."""
    architecture(name, **more).save_pretrained(tmp_path)
    config = EngineConfig("full", device_memory="1GiB", max_model_len=128, host_memory="8MiB", experts_on_device=slots)
    plan = plan_for(config, load_shape(tmp_path, device="cpu", dtype="float32"))
    limit = plan.weights + plan.costs.total([128, 128])

    def on_host(llm: LLM) -> set[int]:
        weights = llm.runner.weights
        assert weights is not None
        blocks = [own for cache in weights.experts for own in cache._host]
        return {each.untyped_storage().data_ptr() for each in (llm.runner.pool.rows, *blocks)}

    prompts = [[1 + (7 * i + seed) % 90 for i in range(110)] for seed in (1, 2)]
    with device_selection():
        _, counted = count_device_bytes(
            lambda: LLM(tmp_path, config, device="cpu", dtype="float32", device_memory=limit),
            on_host,
            lambda llm: completed(llm.generate(prompts, GREEDY)),
        )
    assert plan.weights - 64 * 12 * 3 <= counted.before <= plan.weights
    assert 0.3 * limit <= counted.peak <= limit
