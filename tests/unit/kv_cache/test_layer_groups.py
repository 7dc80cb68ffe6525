"""Test models that have sliding-window layers.

These layers keep only the KV of their windows. Prefix sharing, forks and eviction work as in other models.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.layer_groups import BOUNDS, MODELS, WINDOW, greedy, make_llm, model_of
from support.outputs import completed
from support.plain_decode import assert_evicts_oldest
from support.pools import peak_of
from support.staged_transfer import staged
from support.tiny_models import assert_greedy, tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.kv_cache.layer_groups import LayerGroups
from offload_rt.models.registry import adapter_for

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "everything": {"policy": "infinigen", "policy_options": {"budget": 1.0, "recent": 8, "dense_layers": ()}},
}


def max_window_blocks(llm: LLM) -> int:
    """Return the largest number of window blocks that any open sequence has."""
    return max((len(sequence.blocks.windows) for sequence in llm.runner._open.values()), default=0)


@pytest.mark.parametrize(
    ("kind", "layers", "group", "storage_layer", "sliding"),
    [
        ("all slide", 2, (1, 1), (0, 1), 1),
        ("half slide", 1, (0, 1), (0, 0), 1),
        ("room to spare", 2, (0, 0, 1, 1, 2), (0, 1, 0, 1, 0), 2),
        ("one slides", 2, (0, 0, 1), (0, 1, 0), 1),
        ("narrow rows", 2, (1, 0, 2, 0), (0, 0, 0, 1), 2),
        ("many heads", 2, (1, 0, 2), (0, 0, 0), 2),
        ("shared", 1, (1, 0, 1, 1, 0, 0), (0, 0, 0, 0, 0, 0), 1),
        ("shared after sliding", 1, (1, 0, 2, 2, 0, 2, 0), (0, 0, 0, 0, 0, 0, 0), 2),
    ],
)
def test_layer_groups_of_each_model(
    kind: str, layers: int, group: tuple[int, ...], storage_layer: tuple[int, ...], sliding: int
) -> None:
    geometry = adapter_for(model_of(kind)).geometry
    window_storage_layers = 2 if kind in ("narrow rows", "many heads") else 1
    assert LayerGroups.from_geometry(geometry) == LayerGroups(
        layers, group, storage_layer, sliding, WINDOW, window_storage_layers
    )


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 66, 127, 128, 129, 130])
def test_number_of_blocks_that_a_window_overlaps(window: int) -> None:
    groups = LayerGroups(1, (0, 1), (0, 0), 1, window)
    seen = [p // BLOCK_SIZE - groups.first_seen(p) // BLOCK_SIZE + 1 for p in range(1000)]
    assert max(seen) == groups.window_blocks


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 66, 127, 128, 129, 130])
def test_reserved_next_window_needs_no_more_blocks(window: int) -> None:
    groups = LayerGroups(1, (0, 1), (0, 0), 1, window)
    for p in range(1000):
        kept, reserved = groups.window_indices(p, p + 1), groups.window_indices(p, p + 1, next_window=True)
        assert kept <= reserved and len(reserved) == groups.window_blocks


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "policy", "device"),
    [(kind, "full", "host") for kind in MODELS]
    + [
        ("half slide", "everything", "host"),
        ("room to spare", "everything", "staged"),
        ("all slide", "full", "staged"),
        ("narrow rows", "full", "staged"),
        ("shared", "everything", "staged"),
    ],
)
def test_greedy_tokens_equal_transformers_far_beyond_the_window(kind: str, policy: str, device: str) -> None:
    llm = make_llm(kind, **POLICIES[policy])
    if device == "staged":
        llm = staged(llm)
    prompts = [tiny_prompt(length, seed=length) for length in (30, 47, 220)]
    reference = model_of(kind)
    for prompt, completion in zip(prompts, completed(llm.generate(prompts, greedy(12))), strict=True):
        assert len(completion.token_ids) == 12
        assert_greedy(reference, prompt, completion.token_ids)
    llm.runner.check_integrity()
    assert llm.runner.pool.sequence_bytes == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", MODELS)
def test_sliding_layers_keep_only_their_window(kind: str) -> None:
    llm = make_llm(kind, enable_prefix_caching=False)
    pool = llm.runner.pool
    peak = peak_of(pool)
    window_blocks = pool.groups.sliding * pool.groups.window_blocks
    for event in llm.stream(tiny_prompt(310), greedy(30)):
        blocks_per_layer = -(-(310 + event.index) // BLOCK_SIZE)
        assert max_window_blocks(llm) <= pool.groups.window_blocks
        full_blocks = pool.bytes_used // pool.block_bytes - window_blocks
        assert full_blocks <= pool.groups.full * (blocks_per_layer + 4), (
            "slots for all 340 tokens were reserved at the start"
        )
    assert 0 < peak() <= (pool.groups.full * 6 + window_blocks) * pool.block_bytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", MODELS)
def test_prompts_share_kv_of_their_common_prefix(kind: str) -> None:
    llm = make_llm(kind)
    document = tiny_prompt(400)
    prompts = [document + tiny_prompt(108, seed=seed) for seed in (1, 2)]
    first, second = (completed(llm.generate([prompt], greedy(8)))[0] for prompt in prompts)
    for prompt, completion in zip(prompts, (first, second), strict=True):
        assert len(completion.token_ids) == 8
        assert_greedy(model_of(kind), prompt, completion.token_ids)
    assert first.stats.reused_tokens == 0 and second.stats.reused_tokens == 400 // BLOCK_SIZE * BLOCK_SIZE
    llm.runner.check_integrity()
    together = completed(llm.generate(prompts, greedy(8)))
    assert [completion.token_ids for completion in together] == [first.token_ids, second.token_ids]
    assert llm.runner.pool.sequence_bytes == 0


def test_cached_window_blocks_are_evicted_if_memory_is_needed() -> None:
    llm = make_llm("half slide")
    pool, needed = llm.runner.pool, llm.runner.pool.groups.blocks(330)
    small_llm = make_llm("half slide", memory=needed * pool.block_bytes)
    for seed in range(4):
        prompt = tiny_prompt(300, seed=seed)
        assert_greedy(model_of("half slide"), prompt, completed(small_llm.generate([prompt], greedy(30)))[0].token_ids)
        small_llm.runner.check_integrity()


@pytest.mark.parametrize(("kind", "dtype"), [("all slide", torch.float64), ("room to spare", torch.float32)], ids=str)
def test_forks_of_samples_and_beams_give_correct_logprobs(kind: str, dtype: torch.dtype) -> None:
    prompt = tiny_prompt(120)
    llm = make_llm(kind, dtype=dtype)
    for completion in completed(llm.generate([prompt], SamplingParams(max_tokens=12, n=3, seed=5))):
        continued = prompt + completion.token_ids
        logits = model_of(kind, dtype)(torch.tensor([continued])).logits[0, len(prompt) - 1 : -1].double()
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        [score] = make_llm(kind, dtype=dtype).score([prompt], [completion.token_ids], len(prompt) - 1)
        assert score.logprobs == pytest.approx(logprobs.tolist(), abs=BOUNDS[dtype])
    ids = torch.tensor([prompt])
    expected: Any = model_of(kind, dtype).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, num_beams=3,
        num_return_sequences=3, pad_token_id=0,
    )  # fmt: skip
    beams = completed(llm.generate([prompt], SamplingParams(max_tokens=12, num_beams=3, n=3, temperature=0)))
    assert [beam.token_ids for beam in beams] == expected[:, len(prompt) :].tolist()
    llm.runner.check_integrity()
    assert llm.runner.pool.sequence_bytes == 0


# ----------------------------------------------------------------------------------------------------------- eviction


@pytest.mark.parametrize(("kind", "dtype"), [("room to spare", torch.float32), ("one slides", torch.float64)], ids=str)
def test_eviction_affects_only_full_attention_layers(kind: str, dtype: torch.dtype) -> None:
    pool = make_llm(kind, dtype=dtype).runner.pool
    memory = pool.block_bytes * (2 + pool.groups.sliding * pool.groups.window_blocks)
    llm = make_llm(kind, memory=memory, dtype=dtype, eviction={"policy": "fifo", "protect": "none"})
    near = partial(torch.testing.assert_close, rtol=0, atol=BOUNDS[dtype])
    assert_evicts_oldest(llm.runner, tiny_prompt(150), 120, near)


@pytest.mark.parametrize(
    ("kind", "eviction"),
    [("all slide", "lru"), ("room to spare", "counter"), ("shared", "lru")],
)
def test_generation_continues_far_past_the_limit(kind: str, eviction: str) -> None:
    pool = make_llm(kind).runner.pool
    memory = pool.block_bytes * (2 * pool.groups.full + pool.groups.sliding * pool.groups.window_blocks)
    options = {"policy": "infinigen", "policy_options": {"recent": 8, "alpha": 2.0}}
    llm = make_llm(kind, memory=memory, eviction=eviction, **options)
    for event in llm.stream(tiny_prompt(110), greedy(50)):
        assert llm.runner.pool.bytes_used <= memory
        if event.index % 20 == 0:
            llm.runner.check_integrity()
    assert llm.last_stats is not None and llm.last_stats.new_tokens == 50 and llm.runner.pool.sequence_bytes == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["qwen2", "mistral"])
def test_scoring_in_a_small_pool_equals_scoring_in_a_large_one(name: str) -> None:
    """While they are scored, sequences allocate window blocks as their windows move, without reserving them first."""
    more = {"use_sliding_window": True, "max_window_layers": 1} if name == "qwen2" else {}
    model = tiny_model(name, num_hidden_layers=2, **more)
    prompts, continuations = (
        [tiny_prompt(60, seed=i // 2) for i in range(6)],
        [tiny_prompt(70, seed=9 + i) for i in range(6)],
    )
    small_llm, large_llm = (LLM(model, policy="full", host_memory=size, verify="off") for size in ("288KiB", "8MiB"))
    small_scores, large_scores = (
        [score.logprobs for score in llm.score(prompts, continuations)] for llm in (small_llm, large_llm)
    )
    assert all(small == pytest.approx(large, abs=1e-4) for small, large in zip(small_scores, large_scores, strict=True))
    assert small_llm.runner.pool.sequence_bytes == 0
