"""Test the recurrent state of hybrid models in prefill chunks, batches, forks, preemption and streaming.

`unit/models/test_architectures.py` compares every family with transformers, alone and in ragged batches.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import architecture
from support.cuda_simulator import Lazy, simulated
from support.hybrids import FAMILIES, SPARSE_DRAFTS, make_llm, random_prompt, rotated_pairs
from support.outputs import completed
from support.tiny_models import assert_greedy

from offload_rt import LLM, InputError, OffloadedCache, SamplingParams, offload
from offload_rt.config import EngineConfig
from offload_rt.core import StateShape
from offload_rt.engine.runner import Runner
from offload_rt.engine.swap import Swap
from offload_rt.errors import DeviceFullError
from offload_rt.models.recurrent import RecurrentState, StateSlots
from offload_rt.models.registry import adapter_for
from offload_rt.models.shape import load_shape
from offload_rt.planning.device_plan import costs_for

GREEDY = SamplingParams(max_tokens=8, temperature=0)
POLICIES: dict[str, dict[str, Any]] = {
    "infinigen": {"recent": 4, "budget": 0.5},
    "full": {},
    "quest": {"recent": 4, "budget": 0.5, "page": 4},
}
SPARSE_DECODE: dict[str, Any] = {"policy": "infinigen", "policy_options": {"recent": 4, "budget": 0.3}}


def generate(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    tokens = [completion.token_ids for completion in completed(llm.generate(prompts, params))]
    llm.runner.check_integrity()
    assert llm.runner.states is not None and llm.runner.states.used == 0
    return tokens


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "disk"), rotated_pairs(FAMILIES, (False, True)))
def test_prefill_in_chunks_of_7_tokens_equals_transformers(name: str, disk: bool, tmp_path: Path) -> None:
    """With KV on disk, each segment passes through all layers before the next segment begins."""
    options = {"disk": tmp_path, "host_memory": "4MiB"} if disk else {}
    model, llm = make_llm(name, prefill_chunk_size=7, **options)
    for length in (75, 8):
        prompt = random_prompt(length)
        assert_greedy(model, prompt, generate(llm, [prompt])[0])


@pytest.mark.sampled(7)  # each policy runs with half of the families
@pytest.mark.parametrize(("name", "policy"), rotated_pairs(FAMILIES, list(POLICIES)))
def test_slot_of_a_finished_sequence_is_reused(name: str, policy: str) -> None:
    _, llm = make_llm(name, max_num_seqs=3, policy=policy, policy_options=POLICIES[policy])
    prompts = [random_prompt(30 + i, seed=i) for i in range(4)]
    params = [SamplingParams(max_tokens=n, temperature=0) for n in (8, 3, 8, 5)]
    expected = [generate(llm, [prompt], param)[0] for prompt, param in zip(prompts, params, strict=True)]
    assert generate(llm, prompts, params) == expected


def test_gathering_states_does_not_synchronise_the_host() -> None:
    with simulated(Lazy()) as sim:
        model = architecture("lfm2").to("cuda")
        runner = LLM(model, policy="full", host_memory="8MiB", verify="off", enable_prefix_caching=False).runner
        batch = [runner.new_sequence(random_prompt(22, seed=i), 22) for i in range(3)]
        for sequence in batch:
            runner.prefill(sequence, 20)
        runner.free(batch.pop(1))  # the first and the last of three slots remain
        before = len(sim.syncs)
        runner.decode(batch)
        assert not sim.syncs[before:]
        for sequence in batch:
            runner.free(sequence)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_samples_and_beams_equal_transformers(name: str) -> None:
    model, llm = make_llm(name)
    prompt = random_prompt(30)
    [output] = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=1, seed=0, n=3, logprobs=0))
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    for completion in output.outputs:
        logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None]).sum()
        assert completion.cumulative_logprob == pytest.approx(float(expected), abs=1e-3)
    ids = torch.tensor([prompt])
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, num_beams=3, num_return_sequences=3)
    beams = completed(llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0, num_beams=3, n=3)))
    assert [completion.token_ids for completion in beams] == expected[:, len(prompt) :].tolist()


@pytest.mark.parametrize("slots", [0, 8])
@pytest.mark.parametrize(
    ("options", "reference"),
    [({}, {}), (SPARSE_DECODE, SPARSE_DECODE), (SPARSE_DRAFTS, {})],
    ids=["full", "infinigen", "lossless"],
)
def test_preempted_requests_give_the_same_tokens(
    options: dict[str, Any], reference: dict[str, Any], slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three growing sequences do not fit into the pool together.

    If there is memory for snapshots, KV and the exact state are swapped. Otherwise, they are recomputed.
    """
    monkeypatch.setattr(Swap, "_recompute_seconds", lambda *_: float("inf"))
    prompts = [random_prompt(60, seed=i) for i in range(3)]
    params = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
    _, large_pool = make_llm("qwen3_5", **reference)
    states = large_pool.runner.pool.states
    assert states is not None
    snapshots = max(1, slots * states.slot_bytes)
    memory = 3 * large_pool.runner.pool.block_bytes + snapshots
    _, small_pool = make_llm("qwen3_5", host_memory=memory, snapshot_memory=snapshots, swap=tmp_path, **options)
    engine = small_pool.make_engine()
    requests = [engine.add(prompt, params) for prompt in prompts]
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert engine.scheduler.preemptions and bool(engine.scheduler.restored) == bool(slots)
    table = small_pool.runner.pool.cached.snapshots
    assert table is not None and not table._pending
    assert [request.new_tokens for request in requests] == generate(large_pool, prompts, params)


def test_scores_equal_transformers() -> None:
    model, llm = make_llm("granite_hybrid")
    # Both continuations fork the state of the prompt.
    prompt, continuations = random_prompt(20), [random_prompt(n, seed=n) for n in (3, 5)]
    for continuation, score in zip(continuations, llm.score([prompt] * 2, continuations), strict=True):
        logits = model(torch.tensor([prompt + continuation])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(score.logprobs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_drop_in_generate_equals_transformers(name: str) -> None:
    model = architecture(name)
    ids = torch.tensor([random_prompt(30), random_prompt(30, seed=1)])
    expected = model.generate(ids, max_new_tokens=6, do_sample=False), model(ids).logits
    with offload(model, policy="full", host_memory="8MiB", verify="off") as llm:
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected[0])
        cache = OffloadedCache(llm)
        first, second = (model(part, past_key_values=cache).logits for part in (ids[:, :13], ids[:, 13:]))
        torch.testing.assert_close(torch.cat((first, second), 1), expected[1], rtol=0, atol=1e-3)
        with pytest.raises(InputError, match="recurrent layers"):
            cache.crop(-1)


@pytest.mark.parametrize(("name", "options"), [("qwen3_5", {"policy": "full"}), ("nemotron_h", SPARSE_DRAFTS)])
def test_streamed_recurrent_layers_equal_transformers(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = architecture(name)
    model.save_pretrained(tmp_path)
    shape = load_shape(tmp_path, device="cpu")
    costs = costs_for(EngineConfig(**options, prefill_chunk_size=64), shape)
    limit = shape.sizes.fixed + 2 * max(shape.sizes.layers) + costs.total([64]) + (1 << 14)
    llm = LLM(
        tmp_path, device="cpu", device_memory=limit, max_model_len=64, host_memory="8MiB", prefill_chunk_size=64,
        verify="off", **options,
    )  # fmt: skip
    assert llm.runner.weights is not None and llm.runner.weights.stream is not None
    streamed = set(llm.runner.weights.stream.layers)
    assert streamed & {*shape.geometry.attention_at} and streamed & {state.layer for state in shape.geometry.states}
    prompt = random_prompt(40)
    assert_greedy(model, prompt, generate(llm, [prompt])[0])


def test_planned_state_memory_covers_the_memory_in_use() -> None:
    model, llm = make_llm("granite_hybrid", dtype="float32")
    slots, geometry = llm.runner.states, llm.runner.adapter.geometry
    assert slots is not None
    costs = costs_for(EngineConfig(policy="full"), load_shape(model))
    for sequences in range(1, 12):
        slots.allocate()
        assert sequences * geometry.state_bytes(torch.float32) <= slots.bytes <= costs.states(sequences)
    assert costs.total([64]) - costs.states(1) == costs_without_states(costs)


def costs_without_states(costs: Any) -> int:
    return costs.fixed() + costs.scoring(64) + costs.resident + max(
        costs.prefill(64), costs.calibration(), costs.staging([64]) + costs.decode([64])
    )  # fmt: skip


class TestFaults:
    """Faults that the checks must detect."""

    def test_layer_that_misses_tokens_is_detected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, llm = make_llm("qwen3_5")
        monkeypatch.setattr(RecurrentState, "finish", lambda *_: None)
        with pytest.raises(Exception, match="recurrent layers saw"):
            generate(llm, [random_prompt(9)])

    def test_slot_that_is_not_reset_is_detected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, llm = make_llm("qwen3_5")
        generate(llm, [random_prompt(30)])
        old_states = {layer: states.clone() for layer, states in llm.runner.states.recurrent.items()}  # type: ignore[union-attr]
        allocate = StateSlots.allocate

        def allocate_without_reset(self: StateSlots, origin: int | None = None) -> int:
            slot = allocate(self, origin)
            for layer, states in old_states.items():
                self.recurrent[layer][: len(states)] = states
            return slot

        monkeypatch.setattr(StateSlots, "allocate", allocate_without_reset)
        prompt = random_prompt(3, seed=1)
        [tokens] = generate(llm, [prompt])
        with pytest.raises(AssertionError):
            assert_greedy(model, prompt, tokens)


def test_slots_are_unchanged_and_can_grow_after_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = (StateShape(0, -1, (4, 3), (2, 2)), StateShape(1, 0, (4, 3), ()))
    geometry = replace(adapter_for(architecture("lfm3")).geometry, states=shapes)
    for fails_at in range(3):
        slots = StateSlots(geometry, torch.float32, torch.device("cpu"))
        first, calls, allocate = slots.allocate(), itertools.count(), torch.empty

        def failing_empty(
            *shape: Any, calls: Any = calls, allocate: Any = allocate, failing: int = fails_at, **options: Any
        ) -> torch.Tensor:
            if next(calls) == failing:
                raise MemoryError
            return allocate(*shape, **options)  # type: ignore[no-any-return]

        slots.conv[0][first] = 7
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", failing_empty)
            with pytest.raises(MemoryError):
                slots.allocate()
        assert slots.used == 1
        assert slots.allocate(first) != first and slots.used == 2
        assert slots.conv[0].eq(7).all()
        assert all(len(counts) == len(slots.conv[0]) for counts in slots.processed.values())


def test_failed_fork_does_not_change_the_original_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_llm("qwen3_5")[1].runner
    sequence = runner.new_sequence(random_prompt(30), 40)
    runner.prefill(sequence, 29)

    def raise_device_full(self: Runner) -> None:
        raise DeviceFullError("no device memory")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_check_device", raise_device_full)
        with pytest.raises(DeviceFullError):
            runner.fork(sequence, 40)
    runner.check_integrity()
    runner.free(sequence)
    runner.check_integrity()
