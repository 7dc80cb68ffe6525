"""Compare decode steps, with every policy and kind of pool, with a reference in which tokens attend to selections."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.architectures import VOCAB, architecture
from support.plain_sparse import PlainScore, plain_scores
from support.tiny_models import tiny_model
from transformers import PreTrainedModel

from offload_rt import LLM
from offload_rt.engine.scoring import Score
from offload_rt.errors import PoolFullError
from offload_rt.models.loading import load_model

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "default": ("infinigen", {"recent": 8, "max_fraction": 0.3}),
    "paper": ("infinigen", {"preset": "paper"}),
    "normed": ("infinigen", {"source": "normed_input", "recent": 4, "sinks": 1, "dense_layers": ()}),
    "repair": (
        "infinigen",
        {"preset": "rows", "scorer": "int4", "recent": 4, "budget": 0.1, "max_fraction": 0.6, "max_missed_mass": 0.05},
    ),
    "oracle": ("oracle", {"budget": 0.25, "recent": 8}),
    "streaming": ("streaming", {"budget": 0.25, "recent": 8}),
    "h2o": ("h2o", {"budget": 0.25, "recent": 8}),
    "quest": ("quest", {"budget": 0.25, "recent": 8}),
}

ARCHITECTURES = ("llama", "mistral", "qwen3", "opt", "gpt2")


def random_tokens(count: int, vocab: int = 199) -> list[int]:
    return [int(i) % vocab for i in np.random.default_rng(0).integers(1, 199, size=count)]


def reference_and_actual(
    model: PreTrainedModel, name: str, ids: list[int], start: int, **engine: Any
) -> tuple[PlainScore, Score]:
    policy, options = VARIANTS[name]
    llm = LLM(model, policy=policy, policy_options=options, **engine)
    steps = llm.score([ids[: start + 1]], [ids[start + 1 :]], start)[0]
    return plain_scores(load_model(model), policy, options, ids, start, engine), steps


@pytest.mark.sampled
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", VARIANTS)
def test_decode_step_attends_to_its_selection(architecture: str, name: str) -> None:
    # In float64, only rounding differs from the reference. A single wrong token causes a difference above 1e-9.
    reference, steps = reference_and_actual(tiny_model(architecture).double(), name, random_tokens(130), 116)
    assert steps.logprobs == pytest.approx(reference.logprobs, abs=1e-9)
    assert steps.is_greedy == reference.is_greedy
    stats = steps.stats
    assert stats.exact_fraction == pytest.approx(np.mean(reference.attended), abs=1e-12)
    assert stats.fetched_fraction == pytest.approx(np.mean(reference.fetched), abs=1e-12)
    for (step, actual), expected in zip(stats.missed_by_step, reference.missed[::16], strict=True):
        assert actual == pytest.approx(expected, abs=1e-9), step


@pytest.mark.parametrize("name", ["full", "default"])
def test_attention_of_llama4_within_chunks(name: str) -> None:
    reference, steps = reference_and_actual(architecture("llama4").double(), name, random_tokens(70, VOCAB), 40)
    assert steps.logprobs == pytest.approx(reference.logprobs, abs=1e-6)  # norms of Llama 4 are computed in float32
    assert steps.stats.exact_fraction == pytest.approx(np.mean(reference.attended), abs=1e-12)


def test_all_positions_can_be_decoded_with_the_policy() -> None:
    ids = random_tokens(40)
    llm = LLM(tiny_model("llama").double(), policy="infinigen", policy_options={"recent": 4})
    steps = llm.score([ids[:2]], [ids[2:]], 0)[0]
    reference = plain_scores(load_model(tiny_model("llama").double()), "infinigen", {"recent": 4}, ids, 0)
    assert reference.logprobs[1:] == pytest.approx(steps.logprobs, abs=1e-9)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["full", "default", "paper", "oracle", "h2o", "repair"])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int2"])
def test_decode_steps_with_quantised_kv(name: str, kv_cache_dtype: str) -> None:
    reference, steps = reference_and_actual(
        tiny_model("llama").double(), name, random_tokens(135), 120, kv_cache_dtype=kv_cache_dtype
    )
    assert steps.logprobs == pytest.approx(reference.logprobs, abs=1e-9)
    assert steps.stats.fetched_fraction == pytest.approx(np.mean(reference.fetched), abs=1e-12)


FIFO = {"policy": "fifo", "protect": "none"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "eviction", "start", "options"),
    [
        *((name, "counter", 115, {}) for name in ("full", "default", "paper", "oracle", "repair")),
        ("default", "lru", 115, {}),
        ("default", FIFO, 115, {}),
        ("default", "counter", 1, {}),
        ("default", "lru", 115, {"kv_cache_dtype": "int8"}),
        ("default", FIFO, 115, {"kv_cache_dtype": "int8"}),
    ],
)
def test_decode_steps_with_eviction(name: str, eviction: Any, start: int, options: dict[str, Any]) -> None:
    model, ids = tiny_model("llama").double(), random_tokens(137)
    layers = model.config.num_hidden_layers
    # two blocks, so tokens are evicted from the 129th on
    limit = 2 * 64 * layers * 2 * 2 * (32 + 4 if options else 32 * 8)  # tokens, layers, K and V, heads, bytes
    reference, steps = reference_and_actual(model, name, ids, start, host_memory=limit, eviction=eviction, **options)
    assert steps.logprobs == pytest.approx(reference.logprobs, abs=1e-9)
    assert steps.stats.exact_fraction == pytest.approx(np.mean(reference.attended), abs=1e-12)
    assert steps.stats.kv_bytes_host == limit
    if eviction == "counter" and name in ("full", "default"):
        unlimited = plain_scores(load_model(model), *VARIANTS[name], ids, start, options)
        unaffected = 128 - start  # the token at 128 is the first that overwrites another, and it predicts the next
        assert reference.logprobs[: unaffected - 1] == unlimited.logprobs[: unaffected - 1]
        assert reference.logprobs[unaffected:] != unlimited.logprobs[unaffected:]


def test_pool_that_is_too_small_is_an_error() -> None:
    model, ids = tiny_model("llama").double(), random_tokens(150)
    limit = 2 * 64 * model.config.num_hidden_layers * 2 * 2 * 32 * 8
    with pytest.raises(PoolFullError, match="raise host_memory"):
        LLM(model, policy="full", host_memory=limit).score([ids[:91]], [ids[91:]], 90)
    with pytest.raises(PoolFullError, match="raise host_memory"):
        LLM(model, policy="full", host_memory=limit, eviction="lru").score([ids[:141]], [ids[141:]], 140)


def test_reference_with_policy_full_equals_transformers() -> None:
    model, ids = tiny_model("llama").double(), random_tokens(120)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    wanted = [float(expected[i, ids[i + 1]]) for i in range(60, 119)]
    assert plain_scores(load_model(model), "full", {}, ids, 60).logprobs == pytest.approx(wanted, abs=1e-9)
