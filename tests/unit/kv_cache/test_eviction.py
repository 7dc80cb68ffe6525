"""Test a bounded pool: memory stays below the limit, and a plain model evicts the same tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plain_decode import assert_evicts_oldest
from support.sampling import examples
from support.tiny_models import depth, tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, PoolFullError, SamplingParams
from offload_rt.config import EvictionOptions
from offload_rt.core import BLOCK_SIZE
from offload_rt.model_runner.sequence import Sequence
from offload_rt.model_runner.slot_table import InPlaceEviction
from offload_rt.models.shape import load_shape

BLOCK_BYTES = 2 * 2 * 32 * BLOCK_SIZE * 4
"""Size of a block's K and V in one layer, with two KV heads in float32."""

POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("infinigen", {"recent": 8}),
    ("infinigen", {"preset": "paper"}),
    ("infinigen", {"preset": "rows", "recent": 5, "sinks": 3, "scorer": "int4", "dense_layers": ()}),
    ("infinigen", {"preset": "rows", "recent": 5, "scorer": "int2", "source": "attention_input"}),
    ("infinigen", {"recent": 8, "approximate_kv": "int2", "budget": 0.3}),
    ("oracle", {"budget": 0.3, "recent": 16}),
]


def make_llm(
    policy: str,
    options: dict[str, Any],
    blocks: int,
    eviction: Any,
    name: str = "llama",
    layers: int = 3,
    dtype: torch.dtype = torch.float32,
) -> LLM:
    model = tiny_model(name, dtype=dtype, **depth(name, layers))
    return LLM(
        model,
        policy=policy,
        policy_options=options,
        dtype=dtype,
        host_memory=blocks * load_shape(model).geometry.kv_bytes(BLOCK_SIZE, dtype),
        eviction=eviction,
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("policy", "options", "eviction"),
    [(*chosen, "counter") for chosen in POLICIES] + [(*POLICIES[1], "fifo"), (*POLICIES[1], "lru")],
)
def test_generation_continues_far_past_the_limit_in_constant_memory(
    policy: str, options: dict[str, Any], eviction: str
) -> None:
    llm = make_llm(policy, options, 2, eviction, layers=2)
    pool, runner = llm.runner.pool, llm.runner
    for event in llm.stream(tiny_prompt(100), SamplingParams(max_tokens=BLOCK_SIZE, temperature=0)):
        assert pool.bytes_used <= 2 * 2 * BLOCK_BYTES
        if event.index % 20 == 0:
            runner.check_integrity()
    stats = llm.last_stats
    assert stats is not None and stats.new_tokens == BLOCK_SIZE
    assert stats.kv_bytes_host == 2 * 2 * BLOCK_BYTES and pool.sequence_bytes == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("protect", ["window", "none"])
@pytest.mark.parametrize(
    ("name", "dtype", "bound"),
    [
        ("llama", torch.float64, 1e-6),
        ("llama", torch.float32, 1e-4),
        ("gpt2", torch.float64, 1e-6),
        ("opt", torch.float64, 1e-6),
    ],
    ids=str,
)
def test_full_with_fifo_equals_attention_over_the_newest_tokens(
    name: str, dtype: torch.dtype, bound: float, protect: str
) -> None:
    """Policy `full` protects one recent token and no sinks, so FIFO keeps the newest tokens.

    The K and V of these tokens still depend on evicted tokens.
    """
    runner = make_llm("full", {}, 2, {"policy": "fifo", "protect": protect}, name, dtype=dtype).runner
    assert_evicts_oldest(runner, tiny_prompt(150), 120, partial(torch.testing.assert_close, rtol=0, atol=bound))


@settings(deadline=None, max_examples=examples(25))
@given(
    policy=st.sampled_from(["fifo", "lru", "counter"]),
    protect=st.sampled_from(["window", "none"]),
    sinks=st.integers(0, 5),
    recent=st.integers(1, 70),
    prompt=st.integers(1, 120),
    steps=st.integers(1, 150),
    given_at=st.integers(0, 150),
    seed=st.integers(0, 9),
)
def test_in_place_eviction_equals_a_plain_list(
    policy: str, protect: str, sinks: int, recent: int, prompt: int, steps: int, given_at: int, seed: int
) -> None:
    llm = make_llm("oracle", {"budget": 0.2, "sinks": sinks, "recent": recent, "dense_layers": ()}, 2, None)
    pool = llm.runner.pool
    blocks = pool.new_block_table(prompt)
    slots = InPlaceEviction(pool, EvictionOptions(policy, protect), sinks, recent)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    rows = [[float(p) for p in range(prompt)] for _ in range(3)]
    for layer in range(3):
        value = torch.tensor(rows[layer])[None, :, None].expand(2, -1, 32)
        pool.write(blocks, layer, 0, value, -value)
    pool.commit(blocks, prompt)
    for position in range(prompt, prompt + steps):
        slots.begin_step(blocks, position)
        for layer in range(3):
            value = torch.full((2, 1, 32), float(position), dtype=torch.float32)
            if (moved := slots.moves.get(layer)) is not None:
                [row] = pool.runs(blocks, layer, range(moved[0], moved[0] + 1))
                pool.write(blocks, layer, moved[1], row.k, row.v)
                rows[layer][moved[1]] = rows[layer][moved[0]]
            pool.write(blocks, layer, slots.newest, value, -value)
            rows[layer][slots.newest :] = [float(position), *rows[layer][slots.newest + 1 :]]
            chosen = torch.randint(0, slots.context, (2, 7), generator=generator)
            slots.record_selected(layer, chosen)
        pool.commit(blocks, slots.context)
        if position == prompt + given_at and (moves := slots.shrink(blocks)) is not None:
            before = slots.context + BLOCK_SIZE if prompt + given_at >= 2 * BLOCK_SIZE else position + 1
            for layer, pairs in enumerate(moves):
                for source, target in pairs:
                    pool.move(blocks, layer, source, target)
                    rows[layer][target] = rows[layer][source]
                evicted = set(range(position + 1)) - set(rows[layer][: slots.context])
                assert len(rows[layer]) == before and len(evicted) >= position + 1 - slots.context
                del rows[layer][slots.context :]
            pool.truncate(blocks, slots.context)
            assert blocks.capacity == slots.context == BLOCK_SIZE and not slots.grows
    state = slots._state
    for layer in range(3):
        [run] = pool.runs(blocks, layer, range(slots.context))
        assert run.k[0, :, 0].tolist() == rows[layer] == state.position[layer, : slots.context].tolist()
        assert len(set(rows[layer])) == slots.context, "a token is stored twice"
        newest = set(range(max(0, prompt + steps - recent), prompt + steps))
        protected = newest | (set(range(min(sinks, prompt))) if protect == "window" else set())
        assert protected <= set(rows[layer])
        assert set(rows[layer][-min(recent, slots.context) :]) == set(
            sorted(rows[layer])[-min(recent, slots.context) :]
        )
    pool.release(blocks)
    pool.check_integrity()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("policy", "options", "more"),
    [(*chosen, {}) for chosen in POLICIES] + [(*POLICIES[1], {"kv_cache_dtype": "int8"})],
)
def test_longest_sequence_shrinks_without_changing_a_shorter_one(
    policy: str, options: dict[str, Any], more: dict[str, Any]
) -> None:
    row = 32 + 4 if more else 32 * 4
    settings = {"policy": policy, "policy_options": options, "dtype": "float32", "eviction": "counter", **more}
    llm = LLM(
        tiny_model("llama", dtype=torch.float32, num_hidden_layers=2),
        host_memory=4 * 2 * 2 * 2 * BLOCK_SIZE * row,
        **settings,
    )
    runner, prompts = llm.runner, [tiny_prompt(180), tiny_prompt(60, seed=3)]

    def run(prompts: list[list[int]], steps: int) -> list[Sequence]:
        sequences = [runner.new_sequence(prompt, len(prompt)) for prompt in prompts]
        for sequence in sequences:
            runner.prefill(sequence, len(sequence.tokens) - 1)
        for _ in range(steps):
            for sequence, logits in zip(sequences, runner.decode(sequences), strict=True):
                if sequence.position == len(sequence.tokens):
                    sequence.tokens.append(int(logits.argmax()))
            blocks.append([len(sequence.blocks.ids) for sequence in sequences])
            assert runner.pool.bytes_used <= runner.pool.limit_bytes
        runner.check_integrity()
        assert [sequence.slots.grows for sequence in sequences] == [len(sequences) == 1] * len(sequences)
        for sequence in sequences:
            runner.free(sequence)
        assert runner.pool.sequence_bytes == 0
        return sequences

    blocks: list[list[int]] = []
    _, short = run(prompts, 80)
    assert [c for i, c in enumerate(blocks) if i == 0 or c != blocks[i - 1]] == [[3, 1], [2, 2]]
    [expected] = run(prompts[1:], 2 * BLOCK_SIZE - 60)
    assert short.tokens[: 2 * BLOCK_SIZE] == expected.tokens[: 2 * BLOCK_SIZE]


def test_eviction_does_not_overwrite_blocks_shared_with_a_fork() -> None:
    expected = make_llm("full", {}, 30, None).score([tiny_prompt(128)], [tiny_prompt(40, seed=5)])[0]
    llm = make_llm("full", {}, 5, "fifo")
    runner = llm.runner
    first = runner.new_sequence(tiny_prompt(128), 129)
    runner.prefill(first, 127)
    second = runner.fork(first, 168)
    first.tokens += tiny_prompt(200, seed=4)
    second.tokens += tiny_prompt(40, seed=5)
    logprobs: list[float] = []
    runner.decode([second])
    for step in range(140):
        logits = runner.decode([first])
        if step < 39:
            logprobs.append(torch.log_softmax(runner.decode([second])[0], -1)[second.tokens[second.position]].item())
    runner.check_integrity()
    assert isinstance(first.slots, InPlaceEviction) and not first.slots.grows and logits.isfinite().all()
    assert logprobs[:38] == pytest.approx(expected.logprobs[1:39], abs=1e-9)
    for sequence in (first, second):
        runner.free(sequence)
    assert runner.pool.sequence_bytes == 0


def test_invalid_eviction_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="moves tokens to other slots"):
        make_llm("h2o", {"budget": 0.2}, 3, "lru")
    with pytest.raises(ConfigError, match="did you mean 'lru'"):
        make_llm("full", {}, 3, "lrru")
    with pytest.raises(ConfigError, match="protects"):
        make_llm("full", {}, 3, {"policy": "fifo", "protects": "none"})
    llm = make_llm("infinigen", {"recent": 200}, 3, "counter")
    with pytest.raises(PoolFullError, match="can be evicted: 4 sinks, 200 recent"):
        llm.generate([tiny_prompt(100)], SamplingParams(max_tokens=200))
    assert llm.runner.pool.sequence_bytes == 0


@pytest.mark.parametrize("eviction", [None, "counter"])
def test_scoring_uses_smaller_batches_in_a_small_pool(eviction: str | None) -> None:
    prompt, continuation = tiny_prompt(100), tiny_prompt(130, seed=3)
    large_llm = make_llm("full", {}, 40, None)
    small_llm = make_llm("full", {}, 4, eviction)
    prompts, continuations = [prompt] * 5 + [prompt[:90]], [continuation[i : i + 30] for i in range(6)]
    expected = [score.logprobs for score in large_llm.score(prompts, continuations)]
    assert [s.logprobs for s in small_llm.score(prompts, continuations)] == [pytest.approx(row) for row in expected]
    if eviction is None:
        with pytest.raises(PoolFullError):
            small_llm.score([prompt], [tiny_prompt(200)])
    else:
        [long] = small_llm.score([prompt], [tiny_prompt(180, seed=7)])
        assert len(long.logprobs) == 180
    assert small_llm.runner.pool.sequence_bytes == 0
    small_llm.runner.check_integrity()
