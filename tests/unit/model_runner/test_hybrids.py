"""Test recurrent state of hybrid models in prefill chunks, batches, forks, preemption and streaming.

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


def texts(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    found = [completion.token_ids for completion in completed(llm.generate(prompts, params))]
    llm.runner.check_integrity()
    assert llm.runner.states is not None and llm.runner.states.used == 0
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "disk"), rotated_pairs(FAMILIES, (False, True)))
def test_a_prompt_in_odd_chunks(name: str, disk: bool, tmp_path: Path) -> None:
    """State passes from chunk to chunk within a layer. With KV on disk, each segment passes all layers."""
    options = {"disk": tmp_path, "host_memory": "4MiB"} if disk else {}
    model, llm = make_llm(name, prefill_chunk_size=7, **options)
    for length in (75, 8):
        prompt = random_prompt(length)
        assert_greedy(model, prompt, texts(llm, [prompt])[0])


@pytest.mark.sampled(7)  # half of the families, with each policy
@pytest.mark.parametrize(("name", "policy"), rotated_pairs(FAMILIES, list(POLICIES)))
def test_sequences_that_leave_a_batch(name: str, policy: str) -> None:
    """The middle one of three slots becomes free, and a fourth prompt reuses it."""
    _, llm = make_llm(name, max_num_seqs=3, policy=policy, policy_options=POLICIES[policy])
    prompts = [random_prompt(30 + i, seed=i) for i in range(4)]
    params = [SamplingParams(max_tokens=n, temperature=0) for n in (8, 3, 8, 5)]
    alone = [texts(llm, [prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert texts(llm, prompts, params) == alone


def test_the_host_does_not_wait_if_states_are_gathered() -> None:
    """A decode step uses the first and the last of three slots."""
    with simulated(Lazy()) as sim:
        model = architecture("lfm2").to("cuda")
        runner = LLM(model, policy="full", host_memory="8MiB", verify="off", enable_prefix_caching=False).runner
        batch = [runner.new_sequence(random_prompt(22, seed=i), 22) for i in range(3)]
        for sequence in batch:
            runner.prefill(sequence, 20)
        runner.free(batch.pop(1))
        before = len(sim.syncs)
        runner.decode(batch)
        assert not sim.syncs[before:]
        for sequence in batch:
            runner.free(sequence)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_forks(name: str) -> None:
    """Parallel samples copy the state after the prompt. Beams copy it in every step."""
    model, llm = make_llm(name)
    prompt = random_prompt(30)
    [output] = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=1, seed=0, n=3, logprobs=0))
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    for one in output.outputs:
        logits = model(torch.tensor([prompt + one.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None]).sum()
        assert one.cumulative_logprob == pytest.approx(float(expected), abs=1e-3)
    ids = torch.tensor([prompt])
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, num_beams=3, num_return_sequences=3)
    found = completed(llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0, num_beams=3, n=3)))
    assert [one.token_ids for one in found] == expected[:, len(prompt) :].tolist()


@pytest.mark.parametrize(("slots", "policy"), [(0, "full"), (8, "full"), (8, "infinigen")])
def test_preempted_requests(slots: int, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three growing prompts do not fit together. With snapshots, KV and exact state are swapped,
    otherwise recomputed.
    """
    monkeypatch.setattr(Swap, "_recompute_seconds", lambda *_: float("inf"))
    options: dict[str, Any] = {"policy": policy}
    if policy != "full":
        options["policy_options"] = {"recent": 4, "budget": 0.3}
    prompts = [random_prompt(60, seed=i) for i in range(3)]
    params = SamplingParams(max_tokens=14, temperature=0)
    _, roomy = make_llm("qwen3_5", **options)
    states = roomy.runner.pool.states
    assert states is not None
    snapshots = max(1, slots * states.slot_bytes)
    memory = 3 * roomy.runner.pool.block_bytes + snapshots
    _, tight = make_llm("qwen3_5", host_memory=memory, snapshot_memory=snapshots, swap=tmp_path, **options)
    engine = tight.make_engine()
    requests = [engine.add(prompt, params) for prompt in prompts]
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert engine.scheduler.preemptions and bool(engine.scheduler.restored) == bool(slots)
    table = tight.runner.pool.cached.snapshots
    assert table is not None and not table._pending
    assert [one.new_tokens for one in requests] == texts(roomy, prompts, params)


def test_scores_equal_transformers() -> None:
    """Continuations of one prompt fork its state."""
    model, llm = make_llm("granite_hybrid")
    prompt, ends = random_prompt(20), [random_prompt(n, seed=n) for n in (3, 5)]
    for end, score in zip(ends, llm.score([prompt] * 2, ends), strict=True):
        logits = model(torch.tensor([prompt + end])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(end)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(score.logprobs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_transformers_generate(name: str) -> None:
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
def test_streamed_weights(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Recurrent layers are streamed too. In lossless mode, they compute accepted tokens again."""
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
    assert_greedy(model, prompt, texts(llm, [prompt])[0])


def test_planned_state_is_the_state_in_use() -> None:
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
    """Faults that must be found: a layer that misses tokens, and a state that is not reset."""

    def test_a_layer_that_misses_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, llm = make_llm("qwen3_5")
        monkeypatch.setattr(RecurrentState, "finish", lambda *_: None)
        with pytest.raises(Exception, match="recurrent layers saw"):
            texts(llm, [random_prompt(9)])

    def test_a_slot_that_is_not_reset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, llm = make_llm("qwen3_5")
        texts(llm, [random_prompt(30)])
        kept = {layer: states.clone() for layer, states in llm.runner.states.recurrent.items()}  # type: ignore[union-attr]
        own = StateSlots.allocate

        def take(self: StateSlots, origin: int | None = None) -> int:
            slot = own(self, origin)
            for layer, states in kept.items():
                self.recurrent[layer][: len(states)] = states
            return slot

        monkeypatch.setattr(StateSlots, "allocate", take)
        prompt = random_prompt(3, seed=1)
        with pytest.raises(AssertionError):
            assert_greedy(model, prompt, texts(llm, [prompt])[0])


def test_slots_survive_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each allocation of a growing state runs out of memory in turn. The slots are unchanged and can grow later."""
    shapes = (StateShape(0, -1, (4, 3), (2, 2)), StateShape(1, 0, (4, 3), ()))
    geometry = replace(adapter_for(architecture("lfm3")).geometry, states=shapes)
    for fails_at in range(3):
        slots = StateSlots(geometry, torch.float32, torch.device("cpu"))
        first, calls, real = slots.allocate(), itertools.count(), torch.empty

        def empty(*shape: Any, calls: Any = calls, real: Any = real, at: int = fails_at, **more: Any) -> torch.Tensor:
            if next(calls) == at:
                raise MemoryError
            return real(*shape, **more)  # type: ignore[no-any-return]

        slots.conv[0][first] = 7
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", empty)
            with pytest.raises(MemoryError):
                slots.allocate()
        assert slots.used == 1
        assert slots.allocate(first) != first and slots.used == 2
        assert slots.conv[0].eq(7).all()
        assert all(len(counts) == len(slots.conv[0]) for counts in slots.processed.values())


def test_a_fork_without_device_memory_leaves_the_state_of_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_llm("qwen3_5")[1].runner
    sequence = runner.new_sequence(random_prompt(30), 40)
    runner.prefill(sequence, 29)

    def full(self: Runner) -> None:
        raise DeviceFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_check_device", full)
        with pytest.raises(DeviceFullError):
            runner.fork(sequence, 40)
    runner.check_integrity()
    runner.free(sequence)
    runner.check_integrity()
