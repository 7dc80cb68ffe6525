"""Test snapshots of recurrent state. The prefill of a prompt with a known prefix starts at the nearest snapshot.

Tokens must equal those of prompts that run alone.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from support.architectures import VOCAB, architecture
from support.cuda_simulator import Late, simulated
from support.hybrids import FAMILIES, make_llm, random_prompt
from support.outputs import completed
from support.tiny_models import assert_greedy

from offload_rt import LLM, ConfigError, MemoryLimitError, RequestOutput, SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.engine.snapshot_keeper import SnapshotKeeper
from offload_rt.kv_cache import state_pool
from offload_rt.kv_cache.state_pool import StatePool
from offload_rt.model_runner.prefill import StateCapture

GREEDY = SamplingParams(max_tokens=6, temperature=0)
STRESS = "OFFLOAD_RT_STRESS" in os.environ
MOST_TOKENS = 70 if STRESS else 40


def generate(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> RequestOutput:
    [output] = llm.generate([prompt], params)
    llm.runner.check_integrity()
    return output


def recomputed_tokens(output: RequestOutput) -> int:
    return len(output.prompt_token_ids) - output.num_cached_tokens


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_continue_at_snapshots(name: str) -> None:
    model, llm = make_llm(name, prefill_chunk_size=48)
    first_prompt = random_prompt(400)
    generate(llm, first_prompt)
    # the same prompt, a longer one, and edits at the end, in the middle and at the beginning
    for prompt, edit in (
        (first_prompt, 1), (first_prompt + random_prompt(5, 1), 1), (first_prompt[:390] + random_prompt(10, 2), 10),
        (first_prompt[:300] + random_prompt(100, 3), 100), (random_prompt(400, 4), 400),
    ):  # fmt: skip
        output = generate(llm, prompt)
        assert_greedy(model, prompt, output.outputs[0].token_ids)
        assert recomputed_tokens(output) <= max(0, len(prompt) - len(first_prompt)) + 2 * edit + BLOCK_SIZE


def test_edit_recomputes_at_most_twice_its_distance_to_the_end() -> None:
    model, llm = make_llm("granite_hybrid")
    prompt = random_prompt(190)
    text = (
        prompt
        + generate(llm, prompt, SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)).outputs[0].token_ids
    )
    text.pop()  # the last token was not computed
    for distance in (1, 2, 64, 65, 130, 200, len(text) - 1):
        edited = text[: len(text) - distance] + random_prompt(distance, distance)
        edited[len(text) - distance] = (text[len(text) - distance] + 1) % VOCAB
        output = generate(llm, edited, SamplingParams(max_tokens=2, temperature=0))
        assert recomputed_tokens(output) <= 2 * distance + BLOCK_SIZE, distance
        assert_greedy(model, edited, output.outputs[0].token_ids)


def test_third_prompt_continues_where_earlier_prompts_diverge() -> None:
    """The second prompt creates a snapshot where it diverges from the first, and later prompts start there."""
    _, llm = make_llm("qwen3_5")
    system = random_prompt(6 * BLOCK_SIZE)
    outputs = [generate(llm, system + random_prompt(500, seed)) for seed in (1, 2, 3)]
    assert outputs[1].outputs[0].stats is not None
    assert outputs[1].num_cached_tokens + outputs[1].outputs[0].stats.recomputed_tokens == len(system)
    assert outputs[2].num_cached_tokens == len(system)
    assert outputs[2].outputs[0].stats.recomputed_tokens == 0  # type: ignore[union-attr]


def test_approximate_states_are_not_shared() -> None:
    """After decoding with a sparse policy, the state is approximate. After prefilling the same tokens, it is exact."""
    options: dict[str, Any] = {"policy": "infinigen", "policy_options": {"recent": 4, "budget": 0.2}}
    _, llm = make_llm("qwen3_5", **options)
    prompt = random_prompt(200)
    text = prompt + generate(llm, prompt, SamplingParams(max_tokens=70, temperature=0)).outputs[0].token_ids
    continued = generate(llm, text)
    assert continued.num_cached_tokens <= len(prompt)
    _, without_caching = make_llm("qwen3_5", **options, enable_prefix_caching=False)
    assert generate(without_caching, text).outputs[0].token_ids == continued.outputs[0].token_ids


def random_requests(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Return requests whose prompts continue, edit or truncate earlier texts. Some request several samples or beams."""
    texts, requests = [random_prompt(rng.randrange(1, 300), rng.randrange(1 << 30))], []
    for _ in range(8 if STRESS else 4):
        text = list(rng.choice(texts))
        change = rng.choice(["same", "longer", "edit", "truncate", "new"])
        if change == "longer":
            text += random_prompt(rng.randrange(1, 150), rng.randrange(1 << 30))
        elif change == "edit":
            start = rng.randrange(len(text))
            text = text[:start] + random_prompt(len(text) - start, rng.randrange(1 << 30))
        elif change == "truncate":
            text = text[: rng.randrange(1, len(text) + 1)]
        elif change == "new":
            text = random_prompt(rng.randrange(1, 300), rng.randrange(1 << 30))
        texts.append(text)
        width = rng.choice([1, 1, 2, 3])
        sampling: dict[str, Any] = (
            {"num_beams": width} if rng.random() < 0.3 else {"seed": 1, "temperature": rng.choice([0, 1])}
        )
        requests.append(
            (
                text,
                SamplingParams(
                    max_tokens=rng.choice([1, 6, 70 if STRESS else 40]), n=width, **({"temperature": 0} | sampling)
                ),
            )
        )
    return requests


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(60) if STRESS else range(3))
def test_random_requests_equal_single_prompts(seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(FAMILIES)
    _, without_caching = make_llm(name, enable_prefix_caching=False)
    _, large_pool = make_llm(name)
    assert large_pool.runner.pool.states is not None
    snapshots = rng.choice([1, 3, 8]) * large_pool.runner.pool.states.slot_bytes
    memory = snapshots + rng.choice([60, 100]) * large_pool.runner.pool.block_bytes
    _, small_pool = make_llm(
        name, host_memory=memory, snapshot_memory=snapshots, prefill_chunk_size=rng.choice([40, 64, 512])
    )
    requests = random_requests(rng)
    expected = [
        [completion.token_ids for completion in completed(without_caching.generate([prompt], params))]
        for prompt, params in requests
    ]
    for llm, batch_size in ((small_pool, 1), (small_pool, 3), (large_pool, 2)):
        actual = []
        for start in range(0, len(requests), batch_size):
            batch = requests[start : start + batch_size]
            outputs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
            actual += [[completion.token_ids for completion in completed([output])] for output in outputs]
            llm.runner.check_integrity()
            table = llm.runner.pool.cached.snapshots
            assert table is not None and not table._pending, "finished requests have no pending snapshots"
        assert actual == expected


def test_snapshot_memory_is_part_of_host_memory() -> None:
    _, llm = make_llm("qwen3_5", host_memory=1 << 20, snapshot_memory=100_000)
    pool = llm.runner.pool
    assert pool.states is not None
    assert pool.states.limit_bytes <= 100_000 < pool.states.limit_bytes + pool.states.slot_bytes
    assert pool.block_count * pool.block_bytes + pool.states.limit_bytes <= 1 << 20
    with pytest.raises(MemoryLimitError, match="snapshot_memory"):
        make_llm("qwen3_5", host_memory=1 << 20, snapshot_memory=1 << 21)
    with pytest.raises(ConfigError, match="snapshot_memory"):
        make_llm("qwen3_5", snapshot_memory="much")


@pytest.mark.parametrize("options", [{"snapshot_memory": 1}, {"enable_prefix_caching": False}])
def test_prompts_are_recomputed_without_snapshots(options: dict[str, Any]) -> None:
    model, llm = make_llm("qwen3_5", **options)
    prompt = random_prompt(200)
    for _ in range(2):
        output = generate(llm, prompt)
        assert output.num_cached_tokens == 0
        assert_greedy(model, prompt, output.outputs[0].token_ids)


def test_preempted_request_continues_at_a_snapshot() -> None:
    prompts = [random_prompt(310, seed=i) for i in range(3)]
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    _, large_pool = make_llm("qwen3_5")
    expected = [completion.token_ids for completion in completed(large_pool.generate(prompts, params))]
    assert large_pool.runner.pool.states is not None
    snapshots = 30 * large_pool.runner.pool.states.slot_bytes
    _, small_pool = make_llm(
        "qwen3_5", host_memory=snapshots + 19 * large_pool.runner.pool.block_bytes, snapshot_memory=snapshots
    )
    engine = small_pool.make_engine()
    requests = [engine.add(prompt, params) for prompt in prompts]
    restored: list[int] = []
    restore_snapshot = SnapshotKeeper.restore

    def record_restore(self: SnapshotKeeper, sequence: Any, *snapshot: Any) -> None:
        restored.append(sequence.position)
        restore_snapshot(self, sequence, *snapshot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SnapshotKeeper, "restore", record_restore)
        while not engine.idle:
            engine.step()
            engine.check_integrity()
    assert engine.scheduler.preemptions and any(restored)
    assert [request.new_tokens for request in requests] == expected


@pytest.mark.sampled(5)
@pytest.mark.parametrize("failing", range(6))
def test_slot_that_cannot_be_page_locked_is_not_used(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page lock fails, in the prefill or a decode step of two requests. Only the affected snapshot is missing."""
    prompts = [random_prompt(180, seed) for seed in (1, 2)]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    expected = [completion.token_ids for completion in completed(make_llm("qwen3_5")[1].generate(prompts, params))]
    _, llm = make_llm("qwen3_5")
    states, table = llm.runner.pool.states, llm.runner.pool.cached.snapshots
    assert states is not None and table is not None
    locked: list[torch.Tensor] = []

    def page_lock(slab: torch.Tensor, owner: object, device: torch.device) -> None:
        locked.append(slab)
        if len(locked) == failing + 1:
            raise MemoryLimitError("cannot pin")

    monkeypatch.setattr(states, "_pin", True)
    monkeypatch.setattr(state_pool, "page_lock", page_lock)
    for _ in range(2):  # the second time from snapshots
        assert [completion.token_ids for completion in completed(llm.generate(prompts, params))] == expected
        llm.runner.check_integrity()
        assert len(locked) > failing and not table._pending


def test_failed_copy_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    _, llm = make_llm("qwen3_5")
    runner = llm.runner
    sequence = runner.new_sequence([*random_prompt(70), 5], 71)
    runner.prefill(sequence, 70)
    assert runner.snapshots is not None and runner.pool.cached.snapshots is not None
    used = len(runner.pool.cached.snapshots)

    def save(*_: Any) -> None:
        raise RuntimeError("copy failed")

    with monkeypatch.context() as patch:
        patch.setattr(StatePool, "save", save)
        with pytest.raises(RuntimeError, match="copy failed"):
            runner.snapshots.copy(sequence)
    assert len(runner.pool.cached.snapshots) == used
    runner.free(sequence)
    runner.check_integrity()


def test_host_waits_for_copies_of_a_snapshot() -> None:
    """The device lags behind. A snapshot must not be read before it is saved, nor overwritten before it is restored."""
    with simulated(Late((0,))):
        llm = LLM(architecture("lfm2").to("cuda"), policy="full", host_memory="8MiB", verify="off")
        states, slots = llm.runner.pool.states, llm.runner.states
        assert states is not None and slots is not None
        source, target = slots.allocate(), slots.allocate()
        recurrent, conv = slots.layer_state(0, source)
        conv.fill_(1.5)
        states.save(0, 0, recurrent, conv)
        saved = states.read(0)
        assert torch.frombuffer(bytearray(saved), dtype=conv.dtype)[: conv.numel()].eq(1.5).all()
        states.restore(0, 0, *slots.layer_state(0, target))
        states.write(0, memoryview(bytearray(len(saved))))
        assert slots.layer_state(0, target)[1].cpu().eq(1.5).all()


class TestFaults:
    """Faults that the tests above must detect."""

    def test_snapshot_that_is_one_block_late_is_detected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, llm = make_llm("qwen3_5")
        original_init = StateCapture.__init__

        def late_init(self: StateCapture, slots: Any, slot: int, pool: Any, targets: Any) -> None:
            original_init(
                self, slots, slot, pool, {position - BLOCK_SIZE: target for position, target in targets.items()}
            )

        monkeypatch.setattr(StateCapture, "__init__", late_init)
        prompt = random_prompt(300)
        generate(llm, prompt)
        tokens = generate(llm, prompt).outputs[0].token_ids
        with pytest.raises(AssertionError):
            assert_greedy(model, prompt, tokens)
