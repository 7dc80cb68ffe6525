"""Test decode steps against a plain reference: each token attends to its selection, with any policy and pool."""

from __future__ import annotations

import os
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
CELLS = [
    (name, architecture)
    for i, name in enumerate(VARIANTS)
    for j, architecture in enumerate(ARCHITECTURES)
    if "OFFLOAD_RT_STRESS" in os.environ or j == 0 or (i + j) % 5 == 0
]
"""All of them in `make stress PART=composition`."""


def tokens(count: int, vocab: int = 199) -> list[int]:
    return [int(i) % vocab for i in np.random.default_rng(0).integers(1, 199, size=count)]


def both(model: PreTrainedModel, name: str, ids: list[int], start: int, **engine: Any) -> tuple[PlainScore, Score]:
    policy, options = VARIANTS[name]
    llm = LLM(model, policy=policy, policy_options=options, **engine)
    steps = llm.score([ids[: start + 1]], [ids[start + 1 :]], start)[0]
    return plain_scores(load_model(model), policy, options, ids, start, engine), steps


@pytest.mark.parametrize(("name", "architecture"), CELLS)
def test_a_step_attends_to_its_selection(architecture: str, name: str) -> None:
    # In float64, only rounding differs from the reference. A single wrong token changes more than 1e-9.
    plain, steps = both(tiny_model(architecture).double(), name, tokens(130), 116)
    assert steps.logprobs == pytest.approx(plain.logprobs, abs=1e-9)
    assert steps.is_greedy == plain.is_greedy
    stats = steps.stats
    assert stats.exact_fraction == pytest.approx(np.mean(plain.attended), abs=1e-12)
    assert stats.fetched_fraction == pytest.approx(np.mean(plain.fetched), abs=1e-12)
    for (step, theirs), ours in zip(stats.missed_by_step, plain.missed[::16], strict=True):
        assert theirs == pytest.approx(ours, abs=1e-9), step


@pytest.mark.parametrize("name", ["full", "default"])
def test_attention_within_fixed_chunks(name: str) -> None:
    """Llama 4 attends within fixed chunks of tokens. Its norms compute in float32."""
    plain, steps = both(architecture("llama4").double(), name, tokens(70, VOCAB), 40)
    assert steps.logprobs == pytest.approx(plain.logprobs, abs=1e-6)
    assert steps.stats.exact_fraction == pytest.approx(np.mean(plain.attended), abs=1e-12)


def test_without_a_prompt() -> None:
    """Every position is decoded with the policy."""
    ids = tokens(70)
    llm = LLM(tiny_model("llama").double(), policy="infinigen", policy_options={"recent": 4})
    steps = llm.score([ids[:2]], [ids[2:]], 0)[0]
    plain = plain_scores(load_model(tiny_model("llama").double()), "infinigen", {"recent": 4}, ids, 0)
    assert plain.logprobs[1:] == pytest.approx(steps.logprobs, abs=1e-9)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["full", "default", "paper", "oracle", "h2o", "repair"])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int2"])
def test_quantised_kv(name: str, kv_cache_dtype: str) -> None:
    plain, steps = both(tiny_model("llama").double(), name, tokens(140), 110, kv_cache_dtype=kv_cache_dtype)
    assert steps.logprobs == pytest.approx(plain.logprobs, abs=1e-9)
    assert steps.stats.fetched_fraction == pytest.approx(np.mean(plain.fetched), abs=1e-12)


FIFO = {"policy": "fifo", "protect": "none"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "eviction", "start", "more"),
    [
        *((name, "counter", 115, {}) for name in ("full", "default", "paper", "oracle", "repair")),
        ("default", "lru", 115, {}),
        ("default", FIFO, 115, {}),
        ("default", "counter", 1, {}),
        ("default", "lru", 115, {"kv_cache_dtype": "int8"}),
        ("default", FIFO, 115, {"kv_cache_dtype": "int8"}),
    ],
)
def test_a_bounded_pool(name: str, eviction: Any, start: int, more: dict[str, Any]) -> None:
    """The pool has two blocks, so tokens are evicted from the 129th on."""
    model, ids = tiny_model("llama").double(), tokens(146)
    layers = model.config.num_hidden_layers
    limit = 2 * 64 * layers * 2 * 2 * (32 + 4 if more else 32 * 8)  # tokens, layers, K and V, heads, bytes
    plain, steps = both(model, name, ids, start, host_memory=limit, eviction=eviction, **more)
    assert steps.logprobs == pytest.approx(plain.logprobs, abs=1e-9)
    assert steps.stats.exact_fraction == pytest.approx(np.mean(plain.attended), abs=1e-12)
    assert steps.stats.kv_bytes_host == limit
    if eviction == "counter" and name in ("full", "default"):
        free = plain_scores(load_model(model), *VARIANTS[name], ids, start, more)
        room = 128 - start  # the token at 128 is the first to overwrite, and predicts the next one
        assert plain.logprobs[: room - 1] == free.logprobs[: room - 1]
        assert plain.logprobs[room:] != free.logprobs[room:]


def test_a_pool_that_is_too_small() -> None:
    model, ids = tiny_model("llama").double(), tokens(150)
    limit = 2 * 64 * model.config.num_hidden_layers * 2 * 2 * 32 * 8
    with pytest.raises(PoolFullError, match="raise host_memory"):
        LLM(model, policy="full", host_memory=limit).score([ids[:91]], [ids[91:]], 90)
    with pytest.raises(PoolFullError, match="raise host_memory"):
        LLM(model, policy="full", host_memory=limit, eviction="lru").score([ids[:141]], [ids[141:]], 140)


def test_the_reference_equals_transformers_with_full() -> None:
    model, ids = tiny_model("llama").double(), tokens(120)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    wanted = [float(expected[i, ids[i + 1]]) for i in range(60, 119)]
    assert plain_scores(load_model(model), "full", {}, ids, 60).logprobs == pytest.approx(wanted, abs=1e-9)
