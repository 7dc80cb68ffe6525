"""Test CUDA graphs of decode steps with recurrent layers, on the simulated GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.architectures import architecture
from support.cuda_cells import SHORT_QWEN, SPARSE, captured_graphs
from support.cuda_simulator import Late, Lazy, Schedule, simulated
from support.hybrids import FAMILIES, random_prompt
from support.outputs import completed

from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.engine.runner import Runner
from offload_rt.model_runner.cuda_graphs import GraphSteps
from offload_rt.model_runner.sequence import Sequence as RunningSequence
from offload_rt.models.recurrent import StateSlots
from offload_rt.models.shape import load_shape
from offload_rt.planning.device_plan import costs_for

# Tiny models have one or two attention layers. Steps are captured only if a layer selects tokens.
OPTIONS: dict[str, Any] = SPARSE | {"source": "attention_input", "dense_layers": ()}
PADDED, EXACT = (4, 64), (3, 64)
SHORT: dict[str, dict[str, Any]] = {"qwen3_5": SHORT_QWEN, "falcon_h1": {"num_hidden_layers": 1}}
"""Options for models with few layers, of which one has recurrent state and one has attention."""

STEPS = 3  # an eager step, one that captures a graph, and one that only replays it


def make_llm(name: str, device: str, *, overrides: dict[str, Any] | None = None, **settings: Any) -> LLM:
    model: Any = architecture(name, **overrides or SHORT.get(name, {})).to(device)
    settings = {"missed_mass_every": 0, "enable_prefix_caching": False} | settings
    return LLM(model, policy_options=OPTIONS, device=device, host_memory="8MiB", verify="off", **settings)


def generate(llm: LLM, most_tokens: Sequence[int]) -> list[list[int]]:
    prompts = [random_prompt(24 + i, seed=i) for i in range(len(most_tokens))]
    params = [SamplingParams(most, temperature=0, ignore_eos=True) for most in most_tokens]
    found = completed(llm.generate(prompts, params))
    llm.runner.check_integrity()
    return [one.token_ids for one in found]


def prefilled_batch(runner: Runner, sequences: int) -> list[RunningSequence]:
    batch = [runner.new_sequence(random_prompt(44, seed=i), 44) for i in range(sequences)]
    for sequence in batch:
        runner.prefill(sequence, 24)
    return batch


# Other tests of this file run the gated delta rule (qwen3_5) and short convolutions (lfm2), so one Mamba-2 is enough.
@pytest.mark.sampled(features=lambda name: {name} & {"falcon_h1"})
@pytest.mark.parametrize("name", FAMILIES)
def test_replayed_steps_give_the_tokens_of_a_cpu(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The second of four requests ends first. Its slot is then used for padding, and the other slots have a gap."""
    most_tokens = (6, 3, 5, 5)  # after two steps of four sequences, two steps of three
    expected = generate(make_llm(name, "cpu"), most_tokens)
    with simulated(Late()) as sim:
        llm = make_llm(name, "cuda")
        assert generate(llm, most_tokens) == expected
        graphs = captured_graphs(llm)
        assert graphs is not None and graphs[PADDED] and sim.launched["graph"] >= 2
    assert not [record for record in caplog.records if "captured" in record.getMessage()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", [Lazy(), Late((0,)), Late((1,))], ids=["lazy", "late compute", "late prefetch"])
def test_replayed_steps_equal_eager_steps(schedule: Schedule) -> None:
    with simulated(schedule):
        alone, eager = (decode_with_gap(graphs=False, together=together) for together in (False, True))
        replayed = decode_with_gap(graphs=True, together=True)
    for expected, found in zip(eager, replayed, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    # The products of one row and of four rows are rounded differently, which one step of the model amplifies to 2e-4.
    for expected, found in zip(alone, replayed, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-4)


def decode_with_gap(*, graphs: bool, together: bool) -> list[torch.Tensor]:
    """Decode sequences in the slots 0, 2 and 3. With graphs, slot 1 is used for padding.

    If not `together`, each sequence is decoded alone, so that its state is used in its slot, and not copied. Return the
    logits of all steps, and the states of all layers.
    """
    runner = make_llm("qwen3_5", "cuda", cuda_graphs=graphs).runner
    batch = prefilled_batch(runner, 4)
    runner.free(batch.pop(1))
    batches = [batch] if together else [[sequence] for sequence in batch]
    steps = [[runner.decode(one) for one in batches] for _ in range(STEPS)]
    logits = torch.stack([torch.cat(step) for step in steps]).cpu()  # a replay must not change earlier logits
    assert isinstance(runner.steps, GraphSteps) is graphs and (not graphs or captured_shapes(runner) == {PADDED: 1})
    runner.check_integrity()
    states = runner.states
    assert states is not None and states.spare == 1
    kept = [tensor[[0, 2, 3]].cpu() for tensor in (*states.conv.values(), *states.recurrent.values())]
    for sequence in batch:
        runner.free(sequence)
    return [logits, *kept]


def test_graphs_are_captured_again_when_states_move() -> None:
    """A batch without a free slot is not padded. A new sequence moves all states, so that old graphs are dropped."""
    with simulated(Late()) as sim:
        runner = make_llm("lfm2", "cuda").runner
        reference = make_llm("lfm2", "cuda", cuda_graphs=False).runner
        logits: list[list[torch.Tensor]] = []
        for one in (runner, reference):
            batch, found = prefilled_batch(one, 3), []
            found += [one.decode(batch).cpu() for _ in range(4)]
            if one is runner:
                assert runner.states is not None and runner.states.spare is None
                assert list(captured_shapes(runner)) == [EXACT]
            batch += prefilled_batch(one, 1)
            found += [one.decode(batch[:3]).cpu() for _ in range(2)]
            one.check_integrity()
            for sequence in batch:
                one.free(sequence)
            logits.append(found)
        assert captured_shapes(runner) == {EXACT: 1} and sim.launched["graph"] >= 5
    for replayed, eager in zip(*logits, strict=True):
        torch.testing.assert_close(replayed, eager, rtol=1e-4, atol=1e-5)


def captured_shapes(runner: Runner) -> Counter[tuple[int, int]]:
    steps: Any = runner.steps
    return Counter((inputs.size, inputs.capacity) for inputs in steps._captured)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "lfm2"])
def test_replay_does_not_synchronise_the_host(name: str) -> None:
    with simulated(Lazy()) as sim:
        runner = make_llm(name, "cuda").runner
        batch = prefilled_batch(runner, 3)
        for _ in range(2):
            runner.decode(batch)
        launched, waits = Counter(sim.launched), len(sim.syncs)
        runner.decode(batch)
        launches = sim.launched - launched
        assert launches["graph"] == 1 and launches.total() <= 8
        assert not sim.syncs[waits:]
        for sequence in batch:
            runner.free(sequence)


def test_planned_memory_covers_steps_with_graphs() -> None:
    overrides = {"mamba_d_state": 256}  # one layer's state is larger than all other tensors of a step
    with simulated(Lazy()) as sim:
        llm = make_llm("granite_hybrid", "cuda", overrides=overrides)
        config = EngineConfig(policy_options=OPTIONS, enable_prefix_caching=False, device="cuda")
        costs = costs_for(config, load_shape(architecture("granite_hybrid", **overrides).to("cuda")))
        batch = prefilled_batch(llm.runner, 3)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = sim.memory.usage.active
        for _ in range(4):
            llm.runner.decode(batch).argmax(-1).tolist()
        assert sim.launched["graph"] >= 2
        used = sim.memory.usage.active_peak - before
        for sequence in batch:
            llm.runner.free(sequence)
    step = costs.staging([64] * 3) + costs.decode([64] * 3)
    assert used <= 2 * step <= 4 / 3 * used, "a step and a graph"


def test_layer_that_is_missing_in_a_graph_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(Late()):
        runner = make_llm("lfm2", "cuda").runner
        batch = prefilled_batch(runner, 2)
        runner.decode(batch)
        gather = StateSlots.gather

        def gather_without_callback(self: StateSlots, index: torch.Tensor, on_finished: Any) -> Any:
            return gather(self, index, lambda layer: None)

        monkeypatch.setattr(StateSlots, "gather", gather_without_callback)
        with pytest.raises(AssertionError, match="recurrent layers saw"):
            runner.decode(batch)
