"""Test requests that share prefixes: tokens equal those of single requests, and shared work is done only once."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from support.outputs import completed
from support.pools import peak_of
from support.sharing import BLOCK_BYTES, LAYERS, ROW, greedy, make_llm
from support.tiny_models import depth, tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, PoolFullError, SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.engine.engine import Engine
from offload_rt.model_runner.batch import NEVER_SHARE, SharedPrefixes

STRESS = "OFFLOAD_RT_STRESS" in os.environ
"""Whether to run each policy both with KV in place and with staged KV. Otherwise, each policy runs in one mode."""

REQUESTS = 500 if STRESS else 40


def tokens_without_sharing(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], name: str = "llama"
) -> list[list[int]]:
    """Run each request alone, without prefix caching, and return the tokens."""
    model = tiny_model(name, dtype=torch.float32, **depth(name, LAYERS))
    separate = LLM(model, policy="full", dtype="float32", host_memory="16MiB", enable_prefix_caching=False)
    separate.runner.policy = llm.runner.policy
    return [
        output.token_ids
        for prompt, p in zip(prompts, params, strict=True)
        for output in completed(separate.generate([prompt], p))
    ]


def drain(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def branching_prompts(rng: random.Random, count: int) -> list[list[int]]:
    prompts = [tiny_prompt(rng.randint(1, 200), seed=rng.randint(0, 1000))]
    for _ in range(count - 1):
        parent = rng.choice(prompts)
        prompts.append(
            parent[: rng.randint(0, len(parent))] + tiny_prompt(rng.randint(1, 120), seed=rng.randint(0, 1000))
        )
    return prompts


POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("infinigen", {"recent": 8, "sinks": 2}),
    ("infinigen", {"preset": "rows", "scorer": "int4", "recent": 16, "max_missed_mass": 0.05}),
    ("infinigen", {"approximate_kv": "int2", "recent": 16, "max_missed_mass": 0.2}),
    ("infinigen", {"preset": "paper"}),
    ("quest", {"budget": 0.4, "recent": 16}),
    ("h2o", {"budget": 0.4, "recent": 16}),
]


@pytest.mark.sampled(features=lambda policy, options, staged: {policy, staged})
@pytest.mark.parametrize(
    ("policy", "options", "staged"),
    [(*policy, staged) for i, policy in enumerate(POLICIES) for staged in ((False, True) if STRESS else (i % 2 == 1,))],
)
def test_prompts_with_shared_prefixes_equal_single_requests(policy: str, options: dict[str, Any], staged: bool) -> None:
    llm = make_llm(policy=policy, policy_options=options, staged=staged)
    prompts = branching_prompts(random.Random(3), 6)
    params = [greedy(4 + 2 * i) for i in range(6)]
    expected = tokens_without_sharing(llm, prompts, params)
    assert [c.token_ids for c in completed(llm.generate(prompts, params))] == expected
    cached = completed(llm.generate(prompts, params))
    assert [c.token_ids for c in cached] == expected, "all prompts are cached"
    reused = sum(c.stats.reused_tokens for c in cached)
    assert reused == (
        0 if llm.runner.policy.wants_queries else sum((len(p) - 1) // BLOCK_SIZE * BLOCK_SIZE for p in prompts)
    )
    llm.runner.check_integrity()
    assert llm.runner.pool.sequence_bytes == 0


# sliding windows shorter than shared prefixes, learned positions, QK-norm
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "policy"), [("mistral", "full"), ("mistral", "infinigen"), ("gpt2", "full"), ("qwen3", "infinigen")]
)
def test_prompts_with_shared_prefixes_on_other_models(name: str, policy: str) -> None:
    llm = make_llm(name, policy=policy, host_memory="64MiB")
    prompts = branching_prompts(random.Random(4), 5)
    params = [greedy(8)] * 5
    expected = tokens_without_sharing(llm, prompts, params, name)
    for _ in range(2):
        assert [c.token_ids for c in completed(llm.generate(prompts, params))] == expected


def test_samples_and_beams_share_a_pool_with_other_requests() -> None:
    llm = make_llm()
    prompts = branching_prompts(random.Random(5), 4)
    params = [
        SamplingParams(max_tokens=20, seed=1, n=3),
        SamplingParams(max_tokens=30, temperature=0, num_beams=3, n=2),
        greedy(40),
        SamplingParams(max_tokens=25, seed=2, temperature=0.7),
    ]
    assert [c.token_ids for c in completed(llm.generate(prompts, params))] == tokens_without_sharing(
        llm, prompts, params
    )


@pytest.mark.parametrize(("policy", "kv_cache_dtype"), [("full", "auto"), ("infinigen", "auto"), ("full", "int8")])
def test_preempted_requests_give_the_same_tokens(policy: str, kv_cache_dtype: str) -> None:
    """With quantised KV or selection, tokens that were decoded must be decoded again, not prefilled."""
    large_pool = make_llm(policy=policy, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False)
    memory = 5 * large_pool.runner.pool.block_bytes  # four requests need three blocks each
    small_pool = make_llm(policy=policy, kv_cache_dtype=kv_cache_dtype, host_memory=memory)
    prompts, params = [tiny_prompt(120, seed=i) for i in range(4)], [greedy(12)] * 4
    engine = Engine(small_pool.runner, max_num_seqs=4)
    requests = [engine.add(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert engine.scheduler.preemptions > 0
    expected = [
        completed(large_pool.generate([prompt], p))[0].token_ids for prompt, p in zip(prompts, params, strict=True)
    ]
    assert [request.completions()[0].token_ids for request in requests] == expected
    stats = [request.completions()[0].stats for request in requests]
    assert all((s.prompt_tokens, s.reused_tokens) == (120, 0) for s in stats), "no part was computed before"


def test_32_requests_compute_store_and_copy_a_shared_prompt_once() -> None:
    llm = make_llm(blocks=32 + 64 + 8)
    pool, shared, batch = llm.runner.pool, 32 * BLOCK_SIZE, 32
    peak = peak_of(pool)
    prompts = [tiny_prompt(shared) + tiny_prompt(40, seed=i + 1) for i in range(batch)]
    outputs = completed(llm.generate(prompts, greedy(16)))
    saved = sum(c.stats.reused_tokens for c in outputs)
    assert saved == (batch - 1) * shared
    assert 0 < peak() <= (32 + 2 * batch) * BLOCK_BYTES
    assert peak() - 2 * batch * BLOCK_BYTES <= 0.1 * batch * 32 * BLOCK_BYTES
    copied = sum(c.stats.h2d_bytes for c in outputs)
    prefill = (batch - 1) * shared * LAYERS * ROW
    steps = [len(c.stats.attended_by_step) for c in outputs]
    assert steps == [15] * batch
    copied_without_sharing = sum(sum(range(shared + 40, shared + 55)) for _ in outputs) * LAYERS * ROW
    assert copied - prefill < 0.12 * copied_without_sharing


def test_full_attention_copies_a_shared_prefix_once_per_step() -> None:
    llm = make_llm()
    runner = llm.runner
    first = runner.new_sequence(tiny_prompt(5 * BLOCK_SIZE + 1), 6 * BLOCK_SIZE)
    runner.prefill(first, 5 * BLOCK_SIZE)
    batch = [first, *(runner.fork(first, 6 * BLOCK_SIZE) for _ in range(3))]
    before = sum(s.trace.bytes_to_device for s in batch)
    logits = runner.decode(batch)
    assert sum(s.trace.bytes_to_device for s in batch) - before == 5 * BLOCK_SIZE * LAYERS * ROW
    torch.testing.assert_close(logits, logits[:1].expand_as(logits), rtol=0, atol=1e-5)  # MKL rounds rows differently
    for sequence in batch:
        runner.free(sequence)


def test_short_shared_runs_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    runner, prompts = llm.runner, [tiny_prompt(3 * BLOCK_SIZE + 9, seed=i) for i in range(3)]
    sequences = [runner.new_sequence(prompt, len(prompt) + 4) for prompt in prompts]
    for sequence in sequences:
        runner.prefill(sequence, len(sequence.tokens) - 1)
    sequences.append(runner.fork(sequences[0], len(prompts[0]) + 4))
    monkeypatch.setattr("offload_rt.model_runner.per_sequence.attend_runs", None)  # a call raises TypeError
    # a single sequence, no common block, a short shared run
    for batch, min_saved in (([0], 1), ([0, 1, 2], 1), ([0, 3, 1], 3 * BLOCK_SIZE * ROW // 4 + 1)):
        logits = []
        for rule in (NEVER_SHARE, min_saved):
            runner.prefixes = SharedPrefixes(ROW, rule)
            forks = [runner.fork(sequences[i], len(prompts[0]) + 4) for i in batch]
            logits.append(runner.decode(forks))
            for fork in forks:
                runner.free(fork)
        assert torch.equal(*logits)
    runner.prefixes = SharedPrefixes(ROW, 3 * BLOCK_SIZE * ROW // 4)
    with pytest.raises(TypeError):
        runner.decode([sequences[0], sequences[3]])


@pytest.mark.parametrize("staged", [False, True], ids=["in place", "staged"])
def test_equal_selections_are_copied_once(staged: bool) -> None:
    options = {"dense_layers": (), "sinks": 2, "recent": 8, "max_fraction": 0.3}
    llm = make_llm(policy="infinigen", policy_options=options, staged=staged)
    runner = llm.runner
    first = runner.new_sequence(tiny_prompt(4 * BLOCK_SIZE + 1), 5 * BLOCK_SIZE)
    runner.prefill(first, 4 * BLOCK_SIZE)
    # Identical forks select the same KV entries.
    batch = [first, *(runner.fork(first, 5 * BLOCK_SIZE) for _ in range(3))]
    start = [s.trace.bytes_to_device for s in batch]
    runner.decode(batch)
    copied = [s.trace.bytes_to_device - before for s, before in zip(batch, start, strict=True)]
    fetched = [sum(s.trace.fetched[-1]) for s in batch]
    assert sorted(copied)[:3] == [0, 0, 0] and fetched[0] > 0
    assert max(copied) == round(fetched[0] * (4 * BLOCK_SIZE + 1)) * ROW
    for sequence in batch:
        runner.free(sequence)


def test_request_that_exceeds_the_free_memory_fails() -> None:
    llm = make_llm(blocks=6)
    other_blocks = llm.runner.pool.new_block_table(4 * BLOCK_SIZE)  # outside the engine
    engine = Engine(llm.runner, max_num_seqs=2)
    engine.add(tiny_prompt(100), greedy(60))
    waiting = engine.add(tiny_prompt(90), greedy(5))  # waits, and runs after the first has failed
    with pytest.raises(PoolFullError, match=r"1 blocks of 64 tokens .* are needed"):
        drain(engine)
    drain(engine)
    assert len(waiting.completions()[0].token_ids) == 5
    assert llm.runner.pool.sequence_bytes == 4 * BLOCK_BYTES
    llm.runner.pool.release(other_blocks)
    assert len(completed(llm.generate([tiny_prompt(100)], greedy(60)))[0].token_ids) == 60


@pytest.mark.slow
def test_random_requests_with_cancellations_in_a_small_pool() -> None:
    rng = random.Random(7)
    llm = make_llm(blocks=16)
    prefixes = [tiny_prompt(rng.choice([0, 64, 130, 200]), seed=i) for i in range(6)]
    prompts = [rng.choice(prefixes) + tiny_prompt(rng.randint(1, 60), seed=i) for i in range(REQUESTS)]
    params = [greedy(rng.choice([1, 7, 20, 140])) for _ in prompts]
    engine = Engine(llm.runner, max_num_seqs=24)
    requests = [engine.add(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    cancelled, steps = set(), 0
    while not engine.idle:
        engine.step()
        steps += 1
        if rng.random() < 0.05:
            index = rng.randrange(REQUESTS)
            if requests[index].finish_reason is None:
                cancelled.add(index)
            engine.cancel(requests[index])
        if steps % 100 == 0:
            engine.check_integrity()
    assert {i for i, request in enumerate(requests) if request.finish_reason == "abort"} == cancelled
    assert engine.scheduler.preemptions > 0 and REQUESTS / 40 < len(cancelled) < REQUESTS / 2
    checked = [i for i in range(0, REQUESTS, 10) if i not in cancelled]
    expected = tokens_without_sharing(llm, [prompts[i] for i in checked], [params[i] for i in checked])
    assert [requests[i].completions()[0].token_ids for i in checked] == expected
    assert llm.runner.pool.sequence_bytes == 0
    llm.runner.check_integrity()


@pytest.mark.parametrize(("policy", "reuses_decoded"), [("full", True), ("infinigen", False)])
def test_decoded_kv_is_reused_as_exact_only_with_full_attention(policy: str, reuses_decoded: bool) -> None:
    options = {} if policy == "full" else {"recent": 8, "sinks": 2, "max_fraction": 0.1, "dense_layers": ()}
    llm = make_llm(policy=policy, policy_options=options)
    prompt = tiny_prompt(2 * BLOCK_SIZE + 5)
    [first] = completed(llm.generate([prompt], greedy(2 * BLOCK_SIZE)))
    [continued] = completed(llm.generate([prompt + first.token_ids], greedy(1)))
    assert (
        continued.stats.reused_tokens
        == (len(prompt + first.token_ids) // BLOCK_SIZE if reuses_decoded else 2) * BLOCK_SIZE
    )


def test_another_policy_reuses_prefilled_kv() -> None:
    options = {"budget": 0.3, "recent": 8, "sinks": 2}
    prompt = tiny_prompt(3 * BLOCK_SIZE + 5)
    first = make_llm(policy="full")
    first.generate([prompt], greedy(4))
    other = first.under("quest", options)
    [output] = completed(other.generate([prompt], greedy(24)))
    [expected] = completed(make_llm(policy="quest", policy_options=options).generate([prompt], greedy(24)))
    assert output.token_ids == expected.token_ids and output.stats.exact_fraction == expected.stats.exact_fraction < 1
    # The second policy computes only the last partial block.
    assert (output.stats.reused_tokens, expected.stats.reused_tokens) == (3 * BLOCK_SIZE, 0)
    assert other.config.policy == "quest" and first.config.policy == "full"
    assert other.runner.adapter is first.runner.adapter
    [repeated] = completed(first.generate([prompt], greedy(4)))
    assert repeated.stats.reused_tokens == 3 * BLOCK_SIZE
    first.runner.check_integrity()
    with pytest.raises(ConfigError, match="planned for one policy"):
        make_llm(policy="full", device_memory="1GiB").under("quest", options)
    with pytest.raises(ConfigError, match="budgt"):
        first.under("quest", {"budgt": 0.3})
