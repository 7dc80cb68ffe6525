"""Test requests that share prefixes: tokens equal those of each alone, shared work is done once, and preemption loses
nothing.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from support.outputs import completed
from support.sharing import BLOCK_BYTES, LAYERS, ROW, greedy, make_llm
from support.tiny_models import depth, tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, PoolFullError, SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.engine.engine import Engine
from offload_rt.model_runner.batch import NEVER_SHARE, SharedPrefixes

STRESS = "OFFLOAD_RT_STRESS" in os.environ
"""Run each policy with KV in place and with staged KV. Otherwise each policy runs in one of the two modes."""

REQUESTS = 500 if STRESS else 40


def alone(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], name: str = "llama") -> list[list[int]]:
    """Return the tokens of each request run alone, without prefix caching."""
    model = tiny_model(name, dtype=torch.float32, **depth(name, LAYERS))
    bare = LLM(model, policy="full", dtype="float32", host_memory="16MiB", enable_prefix_caching=False)
    bare.runner.policy = llm.runner.policy
    return [
        c.token_ids for prompt, p in zip(prompts, params, strict=True) for c in completed(bare.generate([prompt], p))
    ]


def drain(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def tree(rng: random.Random, count: int) -> list[list[int]]:
    """Return random prompts that branch off each other."""
    prompts = [tiny_prompt(rng.randint(1, 200), seed=rng.randint(0, 1000))]
    for _ in range(count - 1):
        stem = rng.choice(prompts)
        prompts.append(stem[: rng.randint(0, len(stem))] + tiny_prompt(rng.randint(1, 120), seed=rng.randint(0, 1000)))
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


@pytest.mark.parametrize(
    ("policy", "options", "staged"),
    [(*policy, staged) for i, policy in enumerate(POLICIES) for staged in ((False, True) if STRESS else (i % 2 == 1,))],
)
def test_prompts_with_shared_prefixes_get_the_tokens_of_each_alone(
    policy: str, options: dict[str, Any], staged: bool
) -> None:
    llm = make_llm(policy=policy, policy_options=options, staged=staged)
    prompts = tree(random.Random(3), 6)
    params = [greedy(4 + 2 * i) for i in range(6)]
    expected = alone(llm, prompts, params)
    assert [c.token_ids for c in completed(llm.generate(prompts, params))] == expected
    again = completed(llm.generate(prompts, params))
    assert [c.token_ids for c in again] == expected, "everything is in the tree by now"
    reused = sum(c.stats.reused_tokens for c in again)
    assert reused == (
        0 if llm.runner.policy.wants_queries else sum((len(p) - 1) // BLOCK_SIZE * BLOCK_SIZE for p in prompts)
    )
    llm.runner.check_integrity()
    assert llm.runner.pool.sequence_bytes == 0


@pytest.mark.parametrize(
    ("name", "policy"), [("mistral", "full"), ("mistral", "infinigen"), ("gpt2", "full"), ("qwen3", "infinigen")]
)
def test_prompts_with_shared_prefixes_on_other_models(name: str, policy: str) -> None:
    """Cover sliding windows shorter than shared prefixes, learned positions, and QK-norm."""
    llm = make_llm(name, policy=policy, host_memory="64MiB")
    prompts = tree(random.Random(4), 5)
    params = [greedy(8)] * 5
    expected = alone(llm, prompts, params, name)
    for _ in range(2):
        assert [c.token_ids for c in completed(llm.generate(prompts, params))] == expected


def test_samples_and_beams_share_a_pool_with_others() -> None:
    llm = make_llm()
    prompts = tree(random.Random(5), 4)
    params = [
        SamplingParams(max_tokens=20, seed=1, n=3),
        SamplingParams(max_tokens=30, temperature=0, num_beams=3, n=2),
        greedy(40),
        SamplingParams(max_tokens=25, seed=2, temperature=0.7),
    ]
    assert [c.token_ids for c in completed(llm.generate(prompts, params))] == alone(llm, prompts, params)


@pytest.mark.parametrize(("policy", "kv_cache_dtype"), [("full", "auto"), ("infinigen", "auto"), ("full", "int8")])
def test_preemption_loses_nothing(policy: str, kv_cache_dtype: str) -> None:
    """Four requests need three blocks each in a pool of five, so the youngest are preempted.

    With quantised KV or selection, decoded tokens are decoded again and not prefilled.
    """
    roomy = make_llm(policy=policy, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False)
    memory = 5 * roomy.runner.pool.block_bytes
    tight = make_llm(policy=policy, kv_cache_dtype=kv_cache_dtype, host_memory=memory)
    prompts, params = [tiny_prompt(120, seed=i) for i in range(4)], [greedy(12)] * 4
    engine = Engine(tight.runner, max_num_seqs=4)
    requests = [engine.add(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert engine.scheduler.preemptions > 0
    apart = [completed(roomy.generate([prompt], p))[0].token_ids for prompt, p in zip(prompts, params, strict=True)]
    assert [one.completions()[0].token_ids for one in requests] == apart
    stats = [one.completions()[0].stats for one in requests]
    assert all((one.prompt_tokens, one.reused_tokens) == (120, 0) for one in stats), "no part was computed before"


def test_32_requests_compute_store_and_fetch_a_shared_prompt_once() -> None:
    """32 questions on a 2k prompt save at least 90 % of prefill, KV and transfers."""
    llm = make_llm(blocks=32 + 64 + 8)
    pool, shared, batch = llm.runner.pool, 32 * BLOCK_SIZE, 32
    prompts = [tiny_prompt(shared) + tiny_prompt(40, seed=i + 1) for i in range(batch)]
    done = completed(llm.generate(prompts, greedy(16)))
    saved = sum(c.stats.reused_tokens for c in done)
    assert saved == (batch - 1) * shared
    assert pool.bytes_peak <= (32 + 2 * batch) * BLOCK_BYTES
    assert pool.bytes_peak - 2 * batch * BLOCK_BYTES <= 0.1 * batch * 32 * BLOCK_BYTES
    crossed = sum(c.stats.h2d_bytes for c in done)
    prefill = (batch - 1) * shared * LAYERS * ROW
    steps = [len(c.stats.attended_by_step) for c in done]
    assert steps == [15] * batch
    every_step_apart = sum(sum(range(shared + 40, shared + 55)) for _ in done) * LAYERS * ROW
    assert crossed - prefill < 0.12 * every_step_apart


def test_bytes_of_a_step_with_full_count_the_shared_part_once() -> None:
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
    """Cover a single sequence, no common block, and a short shared run. Logits are bit-identical to those without
    sharing.
    """
    llm = make_llm()
    runner, prompts = llm.runner, [tiny_prompt(3 * BLOCK_SIZE + 9, seed=i) for i in range(3)]
    sequences = [runner.new_sequence(prompt, len(prompt) + 4) for prompt in prompts]
    for sequence in sequences:
        runner.prefill(sequence, len(sequence.tokens) - 1)
    sequences.append(runner.fork(sequences[0], len(prompts[0]) + 4))
    monkeypatch.setattr("offload_rt.model_runner.per_sequence.attend_runs", None)  # a call raises TypeError
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
def test_bytes_of_a_selection_count_the_union(staged: bool) -> None:
    """Four equal forks select the same KV entries, which are copied once."""
    options = {"dense_layers": (), "sinks": 2, "recent": 8, "max_fraction": 0.3}
    llm = make_llm(policy="infinigen", policy_options=options, staged=staged)
    runner = llm.runner
    first = runner.new_sequence(tiny_prompt(4 * BLOCK_SIZE + 1), 5 * BLOCK_SIZE)
    runner.prefill(first, 4 * BLOCK_SIZE)
    batch = [first, *(runner.fork(first, 5 * BLOCK_SIZE) for _ in range(3))]
    start = [s.trace.bytes_to_device for s in batch]
    runner.decode(batch)
    crossed = [s.trace.bytes_to_device - before for s, before in zip(batch, start, strict=True)]
    fetched = [sum(s.trace.fetched[-1]) for s in batch]
    assert sorted(crossed)[:3] == [0, 0, 0] and fetched[0] > 0
    assert max(crossed) == round(fetched[0] * (4 * BLOCK_SIZE + 1)) * ROW
    for sequence in batch:
        runner.free(sequence)


def test_a_request_that_exceeds_the_free_memory_is_refused() -> None:
    """A block table outside the engine occupies most of the pool."""
    llm = make_llm(blocks=6)
    held = llm.runner.pool.new_block_table(4 * BLOCK_SIZE)
    engine = Engine(llm.runner, max_num_seqs=2)
    engine.add(tiny_prompt(100), greedy(60))
    after = engine.add(tiny_prompt(90), greedy(5))  # waits, and runs after the first has failed
    with pytest.raises(PoolFullError, match=r"1 blocks of 64 tokens .* are needed"):
        drain(engine)
    drain(engine)
    assert len(after.completions()[0].token_ids) == 5
    assert llm.runner.pool.sequence_bytes == 4 * BLOCK_BYTES
    llm.runner.pool.release(held)
    assert len(completed(llm.generate([tiny_prompt(100)], greedy(60)))[0].token_ids) == 60


@pytest.mark.slow
def test_many_requests_in_a_pool_too_small_for_them() -> None:
    """Cover random lengths, sharing, cancellations and preemptions. `make stress` runs 500 requests."""
    rng = random.Random(7)
    llm = make_llm(blocks=16)
    stems = [tiny_prompt(rng.choice([0, 64, 130, 200]), seed=i) for i in range(6)]
    prompts = [rng.choice(stems) + tiny_prompt(rng.randint(1, 60), seed=i) for i in range(REQUESTS)]
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
    assert {i for i, one in enumerate(requests) if one.finish_reason == "abort"} == cancelled
    assert engine.scheduler.preemptions > 0 and REQUESTS / 40 < len(cancelled) < REQUESTS / 2
    checked = [i for i in range(0, REQUESTS, 10) if i not in cancelled]
    expected = alone(llm, [prompts[i] for i in checked], [params[i] for i in checked])
    assert [requests[i].completions()[0].token_ids for i in checked] == expected
    assert llm.runner.pool.sequence_bytes == 0
    llm.runner.check_integrity()


@pytest.mark.parametrize(("policy", "beyond"), [("full", True), ("infinigen", False)])
def test_decoded_kv_of_a_policy_is_never_reused_as_exact(policy: str, beyond: bool) -> None:
    options = {} if policy == "full" else {"recent": 8, "sinks": 2, "max_fraction": 0.1, "dense_layers": ()}
    llm = make_llm(policy=policy, policy_options=options)
    prompt = tiny_prompt(2 * BLOCK_SIZE + 5)
    [first] = completed(llm.generate([prompt], greedy(2 * BLOCK_SIZE)))
    [again] = completed(llm.generate([prompt + first.token_ids], greedy(1)))
    assert again.stats.reused_tokens == (len(prompt + first.token_ids) // BLOCK_SIZE if beyond else 2) * BLOCK_SIZE


def test_another_policy_reuses_prefilled_kv() -> None:
    """Two policies share weights and pool. The second one computes only the last partial block."""
    options = {"budget": 0.3, "recent": 8, "sinks": 2}
    prompt = tiny_prompt(3 * BLOCK_SIZE + 5)
    first = make_llm(policy="full")
    first.generate([prompt], greedy(4))
    other = first.under("quest", options)
    [done] = completed(other.generate([prompt], greedy(24)))
    [own] = completed(make_llm(policy="quest", policy_options=options).generate([prompt], greedy(24)))
    assert done.token_ids == own.token_ids and done.stats.exact_fraction == own.stats.exact_fraction < 1
    assert (done.stats.reused_tokens, own.stats.reused_tokens) == (3 * BLOCK_SIZE, 0)
    assert other.config.policy == "quest" and first.config.policy == "full"
    assert other.runner.adapter is first.runner.adapter
    [back] = completed(first.generate([prompt], greedy(4)))
    assert back.stats.reused_tokens == 3 * BLOCK_SIZE
    first.runner.check_integrity()
    with pytest.raises(ConfigError, match="planned for one policy"):
        make_llm(policy="full", device_memory="1GiB").under("quest", options)
    with pytest.raises(ConfigError, match="budgt"):
        first.under("quest", {"budgt": 0.3})
