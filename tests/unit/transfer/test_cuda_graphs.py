"""Test which steps are captured as CUDA graphs, and what happens if a capture fails.

The "graphs" cells in `test_cuda_path.py` compare the tokens of replayed steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.batches import OPTIONS, make_runner, prefilled_sequence
from support.cuda_simulator import Late, simulated
from support.outputs import completed
from support.staged_transfer import staged
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.engine.runner import Runner
from offload_rt.errors import ConfigError
from offload_rt.model_runner import cuda_graphs
from offload_rt.model_runner.cuda_graphs import CudaGraph, GraphSteps
from offload_rt.model_runner.sequence import Sequence
from offload_rt.policies.rule import Rule


class RecordedGraph:
    """Replacement for `Graph` whose `replay` runs the step again."""

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, body: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        self._body, self._results = body, body()
        for result in self._results:
            result.fill_(0)  # a captured graph has no results before its first replay
        return self._results

    def replay(self) -> None:
        self.replays += 1
        for result, again in zip(self._results, self._body(), strict=True):
            result.copy_(again)


def test_steps_that_cannot_be_captured_run_eagerly() -> None:
    class UncapturableGraph:
        def capture(self, body: Any) -> Any:
            raise AssertionError("captured")

    def decode(runner: Runner, steps: int, share: bool = False, recorder: Any = None) -> None:
        first = prefilled_sequence(runner, 70)
        first.trace.recorder = recorder
        batch = [first, runner.fork(first, 110)] if share else [first]
        runner.steps = GraphSteps(runner.eager, UncapturableGraph)  # type: ignore[arg-type]
        for _ in range(steps):
            runner.decode(batch)

    class IgnoringRecorder:
        def selected(self, position: int, layer: int, tokens: torch.Tensor) -> None:
            pass

    # any recorder makes the step eager
    decode(make_runner(), 3, recorder=IgnoringRecorder())
    decode(make_runner(preset="paper"), 3)
    decode(make_runner(False), 3)
    measuring = staged(LLM(tiny_model("llama"), policy_options=OPTIONS, host_memory="4MiB", missed_mass_every=1))
    policy: Any = measuring.runner.policy
    policy.rule = Rule(policy.alpha, policy.options.max_fraction)
    decode(measuring.runner, 3)
    for share in (False, True):
        with pytest.raises(AssertionError, match="captured"):
            decode(make_runner(), 2, share=share)


def test_failed_capture_is_logged_once_and_later_steps_are_eager(caplog: pytest.LogCaptureFixture) -> None:
    attempts = []

    class FailingGraph:
        def capture(self, body: Any) -> Any:
            body()
            attempts.append(self)
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    eager, runner = make_runner(), make_runner()
    runner.steps = GraphSteps(runner.eager, FailingGraph)  # type: ignore[arg-type]
    want, got = (
        [one.decode([sequence]) for _ in range(6)]
        for one in (eager, runner)
        for sequence in [prefilled_sequence(one, 61)]
    )
    torch.testing.assert_close(list(got), list(want), rtol=1e-5, atol=1e-5)
    assert len(attempts) == 1
    assert [record.getMessage().endswith("stream is capturing") for record in caplog.records] == [True]
    runner.check_integrity()


@pytest.mark.parametrize("fits", [False, True], ids=["never", "alone"])
def test_capture_without_memory_drops_other_graphs_or_runs_eagerly(
    fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    eager, runner, made, attempts = make_runner(), make_runner(), [], []

    class LimitedGraph(RecordedGraph):
        def capture(self, body: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
            results = super().capture(body)
            attempts.append(len(results[0]))
            # a graph of two sequences fits only without other graphs, or not at all
            if attempts[-1] == 2 and (not fits or steps._captured):
                raise torch.OutOfMemoryError("CUDA out of memory")
            made.append(self)
            return results

    runner.steps = steps = GraphSteps(runner.eager, LimitedGraph)
    runs = []
    for one in (eager, runner):
        batch = [prefilled_sequence(one, 20), prefilled_sequence(one, 21, seed=1)]
        logits = [one.decode(batch[:1]) for _ in range(3)] + [one.decode(batch) for _ in range(5)]
        runs.append([*logits, *(one.decode(batch[1:]) for _ in range(3))])
        one.check_integrity()
    for want, got in zip(*runs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert attempts == [1, 2, 2, 1] and all(graph.replays for graph in made) and len(made) == 2 + fits
    assert ["no device memory is left" in record.getMessage() for record in caplog.records] == ([] if fits else [True])


def test_at_most_four_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inputs:
        pass

    monkeypatch.setattr(cuda_graphs, "_Captured", lambda graph, batch, inputs: graph)
    steps: Any = GraphSteps(make_runner().eager, RecordedGraph, max_graphs=4)
    inputs = [Inputs() for _ in range(6)]
    for captured, one in enumerate(inputs, start=1):
        steps._capture(None, one)
        assert list(steps._captured) == inputs[max(0, captured - 4) : captured]


def failing_graph_runner(fail: Callable[[torch.Tensor], object]) -> tuple[Runner, Sequence]:
    """Return a runner with a prefilled sequence. `fail` is called with the output of a module during captures."""

    def hook(module: Any, given: Any, out: torch.Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            fail(out)

    model = tiny_model("llama", num_hidden_layers=2).to("cuda")
    model.model.layers[1].mlp.register_forward_hook(hook)
    options = OPTIONS | {"dense_layers": (0,)}  # the fetch of the dense layer is pending when the capture fails
    runner = LLM(model, policy_options=options, device="cuda", host_memory="8MiB", missed_mass_every=0).runner
    return runner, prefilled_sequence(runner, 61)


@pytest.mark.parametrize("allowed", [False, True], ids=["forbidden operation", "other error"])
def test_failed_capture_leaves_streams_and_memory_in_order(allowed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Torch keeps the stream and the memory pool of a capture that it cannot end.

    Later work would run in another stream, and memory that two streams use would never be freed.
    """

    def fail(out: torch.Tensor) -> None:
        if not allowed:
            out.sum().item()
        raise RuntimeError("failed in a module") from StopIteration()

    with simulated(Late((1, 2))) as sim:
        runner, sequence = failing_graph_runner(fail)
        for _ in range(2):  # the second step tries to capture
            assert runner.decode([sequence]).isfinite().all()
        cause = "failed in a module" if allowed else "the host waits for an event of a capture"
        assert [cause in record.getMessage() for record in caplog.records] == [True]
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert not sim.memory.capturing
        sim.memory.collect()
        assert set(sim.graphs.values()) <= {0}
        runner.free(sequence)


def test_capture_that_runs_out_of_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the module is reported, and the graph's memory is freed."""
    errors: list[BaseException] = []

    def fail(out: torch.Tensor) -> None:
        if not errors:
            raise torch.OutOfMemoryError("CUDA out of memory")

    capture = CudaGraph.capture

    def noted(graph: CudaGraph, body: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        try:
            return capture(graph, body)
        except RuntimeError as error:
            errors.append(error)
            raise

    monkeypatch.setattr(CudaGraph, "capture", noted)
    with simulated(Late((1, 2))) as sim:
        runner, sequence = failing_graph_runner(fail)
        for _ in range(4):
            runner.decode([sequence])
        assert [type(error) for error in errors] == [torch.OutOfMemoryError]
        assert not sim.memory.capturing
        runner.free(sequence)


def test_graphs_are_captured_again_after_a_parameter_was_replaced() -> None:
    """A graph contains the addresses of the weights, and the memory of the replaced parameter is free."""
    settings: dict[str, Any] = {"policy": "quest", "policy_options": {"sinks": 2, "recent": 8, "budget": 0.4}}
    settings |= {"device": "cuda", "host_memory": "8MiB", "enable_prefix_caching": False, "missed_mass_every": 0}
    prompts, params = [tiny_prompt(40)], SamplingParams(max_tokens=6, temperature=0)
    with simulated(Late()):
        model = tiny_model("llama", num_hidden_layers=2).to("cuda")
        llm = LLM(model, **settings)
        llm.generate(prompts, params)
        layer = model.get_submodule("model.layers.1.self_attn.o_proj")
        layer.weight = torch.nn.Parameter(layer.weight.detach() * 3, requires_grad=False)
        found, expected = (
            [c.token_ids for c in completed(one.generate(prompts, params))]
            for one in (llm, LLM(model, cuda_graphs=False, **settings))
        )
        steps = llm.runner.steps
        assert isinstance(steps, GraphSteps) and any(steps._captured.values())
    assert found == expected


def test_two_models_on_two_devices_capture_on_their_own_device() -> None:
    """Torch's own capture stream belongs to the device of the first capture in the process."""
    settings: dict[str, Any] = {"policy_options": OPTIONS, "host_memory": "8MiB", "enable_prefix_caching": False}
    prompts, params, tokens = [tiny_prompt(30)], SamplingParams(max_tokens=6, temperature=0), []
    with simulated(Late(), devices=2):
        for device in ("cuda:0", "cuda:1"):
            llm = LLM(tiny_model("llama", num_hidden_layers=2).to(device), device=device, **settings)
            tokens.append([c.token_ids for c in completed(llm.generate(prompts, params))])
            steps = llm.runner.steps
            assert isinstance(steps, GraphSteps) and any(steps._captured.values())
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
@pytest.mark.simulated
def test_module_that_reads_device_data_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    prompts, tokens = [tiny_prompt(30)], []
    for graphs in (False, None):
        model = tiny_model("llama", num_hidden_layers=2).to("cuda")
        model.model.layers[1].mlp.register_forward_hook(lambda module, given, out: (out.sum().item(), None)[1])
        settings: dict[str, Any] = {"enable_prefix_caching": False, "cuda_graphs": graphs}
        llm = LLM(model, policy_options=OPTIONS, device="cuda", host_memory="8MiB", **settings)
        found = completed(llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0)))
        tokens.append([c.token_ids for c in found])
        llm.runner.check_integrity()
    assert tokens[0] == tokens[1]
    assert ["cannot be captured" in record.getMessage() for record in caplog.records] == [True]


def test_graphs_need_a_cuda_device() -> None:
    runner = make_runner()
    with pytest.raises(ConfigError, match="cuda_graphs=True needs a CUDA device"):
        Runner(runner.model, runner.policy, runner.pool, runner.transfer, EngineConfig(cuda_graphs=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "own",
    [
        {"policy_options": OPTIONS | {"dense_layers": (0,)}},
        {"policy_options": OPTIONS | {"scorer": "partial", "dense_layers": ()}},
        {"policy": "full", "device_kv_memory": "4MiB"},
    ],
    ids=["dense layer", "partial keys", "full"],
)
def test_graphs_on_a_device_generate_tokens_of_eager_steps(own: dict[str, Any]) -> None:
    # a ragged batch that passes through two length buckets
    prompts = [tiny_prompt(length, seed=length) for length in (30, 61)]
    tokens = []
    for graphs in (False, True):
        settings: dict[str, Any] = {"missed_mass_every": 0, "enable_prefix_caching": False, "cuda_graphs": graphs}
        model = tiny_model("llama", num_hidden_layers=2).to("cuda")
        llm = LLM(model, device="cuda", host_memory="8MiB", **settings, **own)
        tokens.append(
            [c.token_ids for c in completed(llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0)))]
        )
        steps = llm.runner.steps
        assert isinstance(steps, GraphSteps) is graphs and (
            not isinstance(steps, GraphSteps) or any(steps._captured.values())
        )
    assert tokens[0] == tokens[1]
