"""Test snapshots of recurrent state, which let prompts with a known prefix continue at the nearest snapshot.

Tokens must equal those of each prompt alone.
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


def run(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> RequestOutput:
    [output] = llm.generate([prompt], params)
    llm.runner.check_integrity()
    return output


def recomputed(output: RequestOutput) -> int:
    """Return the number of prompt tokens that were computed."""
    return len(output.prompt_token_ids) - output.num_cached_tokens


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_continue_at_snapshots(name: str) -> None:
    """Cover the same prompt, a longer one, and edits at the end, in the middle and at the beginning."""
    model, llm = make_llm(name, prefill_chunk_size=48)
    stem = random_prompt(400)
    run(llm, stem)
    for prompt, edit in (
        (stem, 1), (stem + random_prompt(5, 1), 1), (stem[:390] + random_prompt(10, 2), 10),
        (stem[:300] + random_prompt(100, 3), 100), (random_prompt(400, 4), 400),
    ):  # fmt: skip
        output = run(llm, prompt)
        assert_greedy(model, prompt, output.outputs[0].token_ids)
        assert recomputed(output) <= max(0, len(prompt) - len(stem)) + 2 * edit + BLOCK_SIZE


def test_every_edit_recomputes_little() -> None:
    """An edit d tokens before the end of prompt and answer recomputes at most 2 d + 64 tokens."""
    model, llm = make_llm("granite_hybrid")
    prompt = random_prompt(190)
    text = prompt + run(llm, prompt, SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)).outputs[0].token_ids
    text.pop()  # the last token was not computed
    for d in (1, 2, 64, 65, 130, 200, len(text) - 1):
        edited = text[: len(text) - d] + random_prompt(d, d)
        edited[len(text) - d] = (text[len(text) - d] + 1) % VOCAB
        output = run(llm, edited, SamplingParams(max_tokens=2, temperature=0))
        assert recomputed(output) <= 2 * d + BLOCK_SIZE, d
        assert_greedy(model, edited, output.outputs[0].token_ids)


def test_diverging_prompts_share_from_the_second_time_on() -> None:
    """The second prompt takes a snapshot where it diverges from the first one. Later prompts start there."""
    _, llm = make_llm("qwen3_5")
    system = random_prompt(6 * BLOCK_SIZE)
    outputs = [run(llm, system + random_prompt(500, seed)) for seed in (1, 2, 3)]
    assert outputs[1].outputs[0].stats is not None
    assert outputs[1].num_cached_tokens + outputs[1].outputs[0].stats.recomputed_tokens == len(system)
    assert outputs[2].num_cached_tokens == len(system)
    assert outputs[2].outputs[0].stats.recomputed_tokens == 0  # type: ignore[union-attr]


def test_approximate_states_are_not_shared() -> None:
    """Decoded tokens of a sparse policy have an approximate state. As a prompt, the same tokens are exact."""
    options: dict[str, Any] = {"policy": "infinigen", "policy_options": {"recent": 4, "budget": 0.2}}
    _, llm = make_llm("qwen3_5", **options)
    prompt = random_prompt(200)
    text = prompt + run(llm, prompt, SamplingParams(max_tokens=70, temperature=0)).outputs[0].token_ids
    again = run(llm, text)
    assert again.num_cached_tokens <= len(prompt)
    _, alone = make_llm("qwen3_5", **options, enable_prefix_caching=False)
    assert run(alone, text).outputs[0].token_ids == again.outputs[0].token_ids


def stream(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Return requests whose prompts continue, edit or truncate earlier texts. Some use n > 1 or beam search."""
    texts, requests = [random_prompt(rng.randrange(1, 300), rng.randrange(1 << 30))], []
    for _ in range(8 if STRESS else 4):
        text = list(rng.choice(texts))
        change = rng.choice(["same", "longer", "edit", "cut", "new"])
        if change == "longer":
            text += random_prompt(rng.randrange(1, 150), rng.randrange(1 << 30))
        elif change == "edit":
            at = rng.randrange(len(text))
            text = text[:at] + random_prompt(len(text) - at, rng.randrange(1 << 30))
        elif change == "cut":
            text = text[: rng.randrange(1, len(text) + 1)]
        elif change == "new":
            text = random_prompt(rng.randrange(1, 300), rng.randrange(1 << 30))
        texts.append(text)
        width = rng.choice([1, 1, 2, 3])
        kind: dict[str, Any] = (
            {"num_beams": width} if rng.random() < 0.3 else {"seed": 1, "temperature": rng.choice([0, 1])}
        )
        requests.append(
            (
                text,
                SamplingParams(
                    max_tokens=rng.choice([1, 6, 70 if STRESS else 40]), n=width, **({"temperature": 0} | kind)
                ),
            )
        )
    return requests


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(60) if STRESS else range(3))
def test_streams_of_prompts_give_the_tokens_of_each_alone(seed: int) -> None:
    """Cover random edits, forks and evictions with memory for few blocks and few snapshots."""
    rng = random.Random(seed)
    name = rng.choice(FAMILIES)
    _, alone = make_llm(name, enable_prefix_caching=False)
    _, roomy = make_llm(name)
    assert roomy.runner.pool.states is not None
    snapshots = rng.choice([1, 3, 8]) * roomy.runner.pool.states.slot_bytes
    memory = snapshots + rng.choice([60, 100]) * roomy.runner.pool.block_bytes
    _, tight = make_llm(
        name, host_memory=memory, snapshot_memory=snapshots, prefill_chunk_size=rng.choice([40, 64, 512])
    )
    requests = stream(rng)
    expected = [[one.token_ids for one in completed(alone.generate([prompt], params))] for prompt, params in requests]
    for llm, at_once in ((tight, 1), (tight, 3), (roomy, 2)):
        found = []
        for at in range(0, len(requests), at_once):
            part = requests[at : at + at_once]
            outputs = llm.generate([prompt for prompt, _ in part], [params for _, params in part])
            found += [[one.token_ids for one in completed([output])] for output in outputs]
            llm.runner.check_integrity()
            table = llm.runner.pool.cached.snapshots
            assert table is not None and not table._pending, "ended requests leave no pending snapshots"
        assert found == expected


def test_the_memory_of_snapshots_is_a_part_of_host_memory() -> None:
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
def test_without_snapshots_nothing_is_shared(options: dict[str, Any]) -> None:
    model, llm = make_llm("qwen3_5", **options)
    prompt = random_prompt(200)
    for _ in range(2):
        output = run(llm, prompt)
        assert output.num_cached_tokens == 0
        assert_greedy(model, prompt, output.outputs[0].token_ids)


def test_a_preempted_request_continues_at_a_snapshot() -> None:
    """Three growing prompts do not fit together."""
    prompts = [random_prompt(310, seed=i) for i in range(3)]
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    _, roomy = make_llm("qwen3_5")
    expected = [one.token_ids for one in completed(roomy.generate(prompts, params))]
    assert roomy.runner.pool.states is not None
    snapshots = 30 * roomy.runner.pool.states.slot_bytes
    _, tight = make_llm(
        "qwen3_5", host_memory=snapshots + 19 * roomy.runner.pool.block_bytes, snapshot_memory=snapshots
    )
    engine = tight.make_engine()
    requests = [engine.add(prompt, params) for prompt in prompts]
    restored: list[int] = []
    own = SnapshotKeeper.restore

    def restore(self: SnapshotKeeper, sequence: Any, *snapshot: Any) -> None:
        restored.append(sequence.position)
        own(self, sequence, *snapshot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SnapshotKeeper, "restore", restore)
        while not engine.idle:
            engine.step()
            engine.check_integrity()
    assert engine.scheduler.preemptions and any(restored)
    assert [one.new_tokens for one in requests] == expected


@pytest.mark.sampled(5)
@pytest.mark.parametrize("failing", range(6))
def test_a_slot_that_cannot_be_page_locked_is_not_used(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lock fails in the prefill or in a decode step of two requests. Only this snapshot is missing."""
    prompts = [random_prompt(180, seed) for seed in (1, 2)]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    expected = [one.token_ids for one in completed(make_llm("qwen3_5")[1].generate(prompts, params))]
    _, llm = make_llm("qwen3_5")
    states, table = llm.runner.pool.states, llm.runner.pool.cached.snapshots
    assert states is not None and table is not None
    locked: list[torch.Tensor] = []

    def page_lock(slab: torch.Tensor, owner: object) -> None:
        locked.append(slab)
        if len(locked) == failing + 1:
            raise MemoryLimitError("cannot pin")

    monkeypatch.setattr(states, "_pin", True)
    monkeypatch.setattr(state_pool, "page_lock", page_lock)
    for _ in range(2):  # the second time from snapshots
        assert [one.token_ids for one in completed(llm.generate(prompts, params))] == expected
        llm.runner.check_integrity()
        assert len(locked) > failing and not table._pending


def test_a_failed_copy_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_host_waits_for_copies_of_a_snapshot() -> None:
    """A snapshot is read after it has been saved, and overwritten after it has been restored, even if the device is
    late.
    """
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
    """A wrong snapshot must change the tokens, so that the tests above notice it."""

    def test_a_snapshot_one_block_late(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, llm = make_llm("qwen3_5")
        own = StateCapture.__init__

        def init(self: StateCapture, slots: Any, slot: int, pool: Any, targets: Any) -> None:
            own(self, slots, slot, pool, {position - BLOCK_SIZE: target for position, target in targets.items()})

        monkeypatch.setattr(StateCapture, "__init__", init)
        prompt = random_prompt(300)
        run(llm, prompt)
        with pytest.raises(AssertionError):
            assert_greedy(model, prompt, run(llm, prompt).outputs[0].token_ids)
