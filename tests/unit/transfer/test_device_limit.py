"""Test that the allocator's peak stays below `device_memory` during prefill and decode.

The peak includes memory that was freed but is still used by a late stream. Another test compares the memory of decode
steps with its plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import architecture
from support.cuda_cells import GRAPHS
from support.cuda_simulator import Late, Lazy, Schedule, simulated
from support.tiny_models import tiny_checkpoint, tiny_model, tiny_prompt
from transformers import PreTrainedModel

from offload_rt import LLM, EngineConfig
from offload_rt.cli import main
from offload_rt.core import bucket
from offload_rt.model_runner.cuda_graphs import GraphSteps
from offload_rt.models.shape import load_shape
from offload_rt.planning import memory_model
from offload_rt.planning.device_plan import costs_for
from offload_rt.planning.memory_model import DeviceCosts, requirements
from offload_rt.policies.registry import memory_demand
from offload_rt.transfer import row_lists
from offload_rt.transfer.weights.streamed import BUFFERS
from offload_rt.utils.units import format_size

ALL = os.environ.get("OFFLOAD_RT_SCHEDULES") == "all"
LAYERS, CONTEXT, DECODED = 3, 320, 3
WINDOW = {"sinks": 4, "recent": 16}


@dataclass(frozen=True)
class Case:
    name: str
    policy: str
    batch: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    streamed: bool = False  # no layer's weights stay on the device
    daily: bool = False

    def __str__(self) -> str:
        return self.name


ROWS = WINDOW | {"preset": "rows", "alpha": 50.0}
CASES = [
    Case("full", "full"),
    Case("full, batch, streamed", "full", 3, streamed=True, daily=True),
    Case("full, rounded", "full", settings={"kv_cache_dtype": "int8"}),
    Case("tail", "infinigen", options=WINDOW),
    Case("tail, streamed", "infinigen", options=WINDOW, streamed=True),
    Case("rows", "infinigen", options=ROWS),
    Case("rows, batch", "infinigen", 3, ROWS),
    Case("rows, graphs", "infinigen", 3, ROWS, {"cuda_graphs": True, "enable_prefix_caching": False}),
    Case("rows, working set", "infinigen", 2, ROWS, {"working_set": 24}),
    Case("h2o", "h2o", 2, WINDOW),
    Case("quest", "quest", options=WINDOW, daily=True),
    Case("quest, copies", "quest", 2, WINDOW, {"device_kv_memory": 1 << 19}),
    Case("quest, batch, working set", "quest", 3, WINDOW, {"working_set": 24}),
]
SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "lazy": Lazy,
    "late write-back": lambda: Late((2,)),
    "late prefetch": lambda: Late((1,)),
}
RUNS = [(case, name) for case in CASES if ALL or case.daily for name in (SCHEDULES if ALL else ("lazy",))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_checkpoint(path, "llama", num_hidden_layers=LAYERS, head_dim=16)
    return path


@pytest.mark.parametrize(("case", "schedule"), RUNS, ids=str)
def test_peak_memory_is_below_the_smallest_accepted_limit(
    case: Case, schedule: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_peak(case, SCHEDULES[schedule](), folder, tmp_path, monkeypatch)


def test_masks_of_long_windows_are_below_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask has one element per query and key. With long windows, it takes more memory than all activations."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    tiny_checkpoint(
        tmp_path / "model", "mistral", num_hidden_layers=LAYERS, head_dim=16, sliding_window=CONTEXT - 20, **sizes
    )
    case = Case("windows", "full", settings={"verify": "off"})  # transformers' own masks need more
    check_peak(case, Lazy(), tmp_path / "model", tmp_path, monkeypatch)


def check_peak(case: Case, schedule: Schedule, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that prefills and decode steps stay within the smallest limit that the plan accepts."""
    monkeypatch.setattr(memory_model, "CUDA_WORKSPACE", 0)  # the simulator has no cuBLAS workspace
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path))  # empty: the first start calibrates
    with simulated(schedule) as sim:
        limit = smallest_limit(case, folder)
        llm = LLM(
            folder, policy=case.policy, policy_options=case.options, device="cuda", dtype="float32",
            device_memory=limit, max_model_len=CONTEXT, host_memory="8MiB", missed_mass_every=0, prefill_chunk_size=512,
            **case.settings,
        )  # fmt: skip
        runner, usage, sequences = llm.runner, sim.memory.usage, []
        weights, peaks = usage.active, {"load": usage.active_peak}
        sim.memory.usage.reset_peaks()
        for seed in range(case.batch):
            sequences.append(runner.new_sequence(tiny_prompt(CONTEXT, seed=seed), CONTEXT))
            runner.prefill(sequences[-1], CONTEXT - DECODED)
        peaks["prefill"] = usage.active_peak
        sim.memory.usage.reset_peaks()
        for _ in range(DECODED):
            runner.decode(sequences).argmax(-1).tolist()
        peaks["decode"] = usage.active_peak
        sim.memory.usage.reset_peaks()
        runner.free(sequences.pop(0))
        sequences.append(runner.new_sequence(tiny_prompt(CONTEXT, seed=9), CONTEXT))
        runner.prefill(sequences[-1], CONTEXT - 1)
        peaks["next prefill"] = usage.active_peak
        for sequence in sequences:
            runner.free(sequence)
    print(f"\n{case}: limit {limit:,}", *(f"{name} {peak / limit:.0%}" for name, peak in peaks.items()))
    # Policy infinigen frees memory of its calibration with the first sequence.
    counted = ("prefill",) if case.policy == "infinigen" else ("prefill", "decode")
    assert weights < min(peaks[phase] for phase in counted), "nothing was counted"
    assert max(peaks.values()) <= limit, peaks
    assert max(peaks.values()) - weights > 0.15 * (limit - weights), "the limit is far above the peak"


def test_first_start_calibrates_with_streamed_layers_within_the_limit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_model, "CUDA_WORKSPACE", 0)
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path))
    case = Case("tail, streamed", "infinigen", options=WINDOW, streamed=True)
    with simulated(Lazy()) as sim:
        limit = smallest_limit(case, folder)
        llm = LLM(
            folder, policy_options=WINDOW, device="cuda", dtype="float32", device_memory=limit, max_model_len=CONTEXT,
            host_memory="8MiB",
        )  # fmt: skip
        assert llm.runner.plan is not None and len(llm.runner.plan.streamed) == LAYERS
        assert 0.8 * limit < sim.memory.usage.active_peak <= limit


def smallest_limit(case: Case, folder: Path) -> int:
    shape = load_shape(folder, device="cuda", dtype="float32")
    demand = memory_demand(case.policy, case.options, shape.geometry, shape.dtype)
    rounded, working = "kv_cache_dtype" in case.settings, case.settings.get("working_set", 0)
    graphs = "cuda_graphs" in case.settings
    costs = DeviceCosts(
        shape, demand, 512, kv_quantised=rounded, working_set=working, graphs=graphs,
        device_kv=case.settings.get("device_kv_memory", 0),
    )  # fmt: skip
    layers = BUFFERS if case.streamed else LAYERS
    return shape.sizes.fixed + layers * shape.sizes.layers[0] + costs.total([CONTEXT] * case.batch)


def llama() -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=2, head_dim=128)


def llama_in_16_bits() -> PreTrainedModel:
    return tiny_model("llama", dtype=torch.bfloat16, num_hidden_layers=2, head_dim=128)


def granite() -> PreTrainedModel:
    # One layer's state is larger than all other tensors of a step.
    return architecture("granite_hybrid", mamba_d_state=256)


STREAMING: dict[str, Any] = {"policy": "streaming", "policy_options": WINDOW | {"budget": 0.9, "dense_layers": ()}}
STEPS: dict[str, tuple[Callable[[], PreTrainedModel], int, int, dict[str, Any]]] = {
    "fetched KV": (llama, 4, 192, {"policy": "full", "cuda_graphs": False}),
    "fetched KV, graphs": (llama, 4, 192, STREAMING | GRAPHS),
    "quantised KV": (llama_in_16_bits, 1, 640, {"policy": "full", "cuda_graphs": False, "kv_cache_dtype": "int8"}),
    "recurrent states": (granite, 3, 44, STREAMING | {"cuda_graphs": False}),
}
"""A model, a batch size, a context length and options for decode steps whose memory is mainly used for one purpose."""


@pytest.mark.parametrize("case", STEPS)
def test_plan_of_decode_steps_is_at_most_a_third_above_the_need(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prefill", "calibration", "_rope_bytes"):
        monkeypatch.setattr(DeviceCosts, name, lambda *of: 0)  # `total` is then the memory of decode steps
    monkeypatch.setattr(memory_model, "CUDA_WORKSPACE", 0)
    monkeypatch.setattr(row_lists, "HELD_BACK", 0)  # otherwise, write-backs of the prefill would stay in memory
    make, size, context, settings = STEPS[case]
    with simulated(Lazy()) as sim:
        model, usage = make().to("cuda"), sim.memory.usage
        costs = costs_for(EngineConfig(device="cuda", **settings), load_shape(model))
        planned = costs.total([context] * size)
        runner = LLM(model, device="cuda", host_memory="8MiB", missed_mass_every=0, verify="off", **settings).runner
        torch.cuda.synchronize()
        sim.memory.collect()
        before = usage.active
        prompts = [[t % costs.shape.geometry.vocab for t in tiny_prompt(context, seed=seed)] for seed in range(size)]
        batch = [runner.new_sequence(prompt, context) for prompt in prompts]
        for sequence in batch:
            runner.prefill(sequence, context - 3)
        torch.cuda.synchronize()
        sim.memory.collect()
        usage.reset_peaks()
        for _ in range(2):
            runner.decode(batch).argmax(-1).tolist()
        with_graphs, runner.steps = runner.steps, runner.eager
        runner.decode(batch).argmax(-1).tolist()  # If graphs are used, the last one is still in memory.
        need = usage.active_peak - before
        assert costs.graphs == isinstance(with_graphs, GraphSteps) == bool(sim.launched["graph"])
        for sequence in batch:
            runner.free(sequence)
    assert need <= planned <= 4 / 3 * need, f"{planned / need:.3f}"


def test_info_shows_the_memory_of_captured_graphs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default, there is one graph per length bucket, up to eight, and each keeps the buffers of a step.

    With `device_memory`, there is only one graph, and only if CUDA graphs are requested.
    """
    arguments = ("info", str(folder), "--context", str(CONTEXT), "--dtype", "float32", "--device")
    name, lines = "device: CUDA graphs, at most", {}
    with simulated(Lazy()):
        for options in ((), ("--device-memory", "1GiB"), ("--cuda-graphs", "--device-memory", "1GiB")):
            assert main((*arguments, "cuda", *options)) in (0, 1)
            lines[options] = next((line for line in capsys.readouterr().out.splitlines() if name in line), "")
        config = EngineConfig(cuda_graphs=True, device="cuda", dtype="float32")
        costs = costs_for(config, load_shape(folder, device="cuda", dtype="float32"))
    eager, one, eight = (requirements(costs, 1000, CONTEXT, most) for most in (0, 1, 8))
    step = one.staging + one.decode
    assert (eager.graphs, one.graphs, eight.graphs) == (0, step, 8 * step)
    assert (one.device - eager.device, eight.device - eager.device) == (step, 8 * step)
    unlimited, limited, single = lines.values()
    assert (
        format_size(len(set(map(bucket, range(1, CONTEXT + 1)))) * step) in unlimited
        and not limited
        and format_size(step) in single
    )
    assert main((*arguments, "cpu", "--cuda-graphs")) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
