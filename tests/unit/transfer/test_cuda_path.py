"""Test the CUDA path on a simulated device: tokens when streams are late, host waits, launches and memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import VOCAB, architecture
from support.cuda_cells import BY_NAME, CELLS, LOW_BITS, SCHEDULES, Cell, single
from support.cuda_figures import count_layer_launches, decode_peak_bytes, layer_kv_bytes
from support.cuda_simulator import Late, Lazy, simulated
from support.outputs import completed
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, SamplingParams
from offload_rt.engine.runner import Runner
from offload_rt.engine.swap import Swap

ALL = os.environ.get("OFFLOAD_RT_SCHEDULES") == "all"
RUNS = [(cell, name) for cell in CELLS for name in SCHEDULES if ALL or name == cell.daily]
assert {name for _, name in RUNS} == set(SCHEDULES)

_expected: dict[str, list[list[int]]] = {}


def expected_answers(cell: Cell, folder: Path) -> list[list[int]]:
    if cell.name not in _expected:
        answers = cell.run("cpu", folder)
        # hits depend on the order of selected tokens, so byte counts come from a simulated run
        if "working_set" in cell.settings:
            with simulated(Late()):
                device_answers = cell.run("cuda", folder)
            assert [one[:-1] for one in device_answers] == [one[:-1] for one in answers]
            answers = device_answers
        _expected[cell.name] = answers
    return _expected[cell.name]


@pytest.mark.parametrize(("cell", "schedule"), RUNS, ids=lambda x: str(x))
def test_tokens_equal_the_cpu_path(cell: Cell, schedule: str, tmp_path: Path) -> None:
    expected = expected_answers(cell, tmp_path)
    with simulated(SCHEDULES[schedule]()):
        assert cell.run("cuda", tmp_path) == expected


EVICTION = {  # once a step, after its last layer; the host waits for the logits there anyway
    # number of selected tokens: the host ranks the eviction victims
    ("_local_scalar_dense", "offload_rt/model_runner/batched.py"),
    ("copy device to host", "offload_rt/model_runner/slot_table.py"),  # ids of the selected tokens
}
ALLOWED: dict[str, set[tuple[str, str]]] = {
    "full, batch": set(),
    "infinigen, batch": set(),
    "default, batch": set(),
    "default, working set": set(),
    "default, shared": set(),
    "default, forks": set(),
    "default, graphs": set(),
    "quest, batch": set(),
    "streaming, batch": set(),
    "tail, batch": set(),
    "paper, batch": set(),
    "working set": set(),
    "shared": set(),
    "forks": set(),
    "rounded, full": set(),
    "graphs": set(),
    "h2o, batch": set(),
    "oracle, batch": {  # computes true scores from the keys in host memory
        ("event", "offload_rt/transfer/open_sequences.py"),
        ("copy host to device", "offload_rt/policies/oracle.py"),
    },
    "missed mass, paper": {  # missed attention mass is measured on the host, from all keys
        ("event", "offload_rt/transfer/open_sequences.py"),
        ("copy device to host", "offload_rt/kernels/decode_attention.py"),
        ("copy device to host", "offload_rt/model_runner/trace.py"),
    },
    "eviction": EVICTION,
    "default, eviction": EVICTION,
}
"""All host waits that are allowed in a decode step of each cell, as (operation, file)."""

_SLOW = (
    "infinigen, batch",
    "streaming, batch",
    "rounded, full",
    "shared",
    "forks",
    "graphs",
    "eviction",
    "working set",
    "paper, batch",
    "full, batch",
    "tail, batch",
)
SLOW = () if ALL else (*_SLOW, *(name for name in ALLOWED if name.startswith("default")))


@pytest.fixture
def host_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """Yield a set that records the host waits of decode steps as (operation, file)."""
    found: set[tuple[str, str]] = set()
    decode = Runner.decode
    with simulated(Lazy()) as sim:

        def decode_and_record(self: Runner, *args: Any) -> torch.Tensor:
            before = len(sim.syncs)
            logits = decode(self, *args)
            found.update((sync.what, sync.file) for sync in sim.syncs[before:])
            return logits

        monkeypatch.setattr(Runner, "decode", decode_and_record)
        yield found


@pytest.mark.parametrize("name", [name for name in ALLOWED if name not in SLOW] + ["default"])
def test_decode_step_waits_only_where_allowed(name: str, tmp_path: Path, host_waits: set[tuple[str, str]]) -> None:
    BY_NAME[name].run("cuda", tmp_path)
    assert host_waits == ALLOWED.get(name, set())


def test_rows_shared_by_k_and_v_are_copied_as_a_whole() -> None:
    """In Gemma 4, K and V of a sliding head share a row. Copying K and V separately would make the host wait."""
    tokens = [token % VOCAB for token in tiny_prompt(200)]
    with simulated(Lazy()) as sim:
        model = architecture("gemma4").to("cuda")
        runner = LLM(model, policy="full", device="cuda", host_memory="4MiB", verify="off").runner
        assert runner.pool.shares_rows(0)
        for reuse in (0, len(tokens)):
            sequence = runner.new_sequence(tokens, len(tokens), reuse=reuse)
            assert sequence.position == (192 if reuse else 0)
            runner.prefill(sequence, len(tokens) - 1)
            runner.free(sequence)
        assert not [sync for sync in sim.syncs if sync.what.endswith("in pieces")]


def test_batch_takes_as_many_launches_as_one_sequence() -> None:
    counts: list[Counter[str]] = []
    with simulated(Lazy()) as sim:
        model = tiny_model("llama", num_hidden_layers=2).to("cuda")
        runner = LLM(model, policy_options=LOW_BITS, device="cuda", host_memory="4MiB", missed_mass_every=0).runner
        batch = [runner.new_sequence(tiny_prompt(n + 2), n + 2) for n in (30, 41, 52)]
        for sequence in batch:
            runner.prefill(sequence, len(sequence.tokens) - 2)
        for size in (1, 3):
            before = Counter(sim.launched)
            runner.decode(batch[:size])
            counts.append(sim.launched - before)
        for sequence in batch:
            runner.free(sequence)
    one, three = ({name: n for name, n in each.items() if name.startswith("triton")} for each in counts)
    assert one == three and one["triton _append"] == one["triton _score"] == 2
    assert one["triton _merge"] == 4  # parts of exact attention, and approximate KV
    # at most 45 launches in each of the two layers
    assert counts[0].total() <= counts[1].total() <= 2 * 45 + 50


LAUNCHES = {"full": 25, "quest": 45}
"""Maximum launches per layer. The model itself takes 15: seven matrix products, norms, RoPE and the MLP.

A dense layer also copies K and V of each KV head. `test_step_counts.py` counts launches of the default policy.
"""


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_per_layer_are_limited(name: str) -> None:
    launched = count_layer_launches(name)
    assert 15 < launched.total() <= LAUNCHES[name] <= 45, launched


def test_kernels_copies_and_graphs_run_on_the_device_of_the_model(tmp_path: Path) -> None:
    cell = replace(BY_NAME["default, graphs"], scene=single)
    expected = expected_answers(replace(BY_NAME["default, batch"], name="default, single", scene=single), tmp_path)
    with simulated(Late(), devices=2) as sim:
        assert cell.run("cuda:1", tmp_path) == expected
        assert sim.device == 0 and all(queue.device == 1 for queue in sim.engine.queues[2:])
        assert sim.memory.registered_on == {1}


def test_preempted_sequence_is_restored_on_the_device_of_the_model(tmp_path: Path) -> None:
    with simulated(Late(), devices=2):
        model = tiny_model("llama", num_hidden_layers=2).to("cuda:1")
        runner = LLM(model, policy_options=LOW_BITS, device="cuda:1", host_memory="4MiB", missed_mass_every=0).runner
        swap, tokens = Swap(runner, tmp_path), [*tiny_prompt(80), 5, 6]
        swap._write_seconds_per_byte = swap._read_seconds_per_byte = 0.0  # faster than computing the KV again
        sequence = runner.new_sequence(tokens, 82)
        runner.prefill(sequence, 80)
        swapped = swap.swap_out(sequence, 1)
        assert swapped is not None
        expected = runner.decode([sequence])
        runner.free(sequence)
        restored = swap.swap_in(swapped, tokens)
        assert restored is not None and torch.equal(runner.decode([restored]), expected)
        runner.free(restored)
        swap.close()


@pytest.mark.parametrize("name", ["infinigen", "graphs", "working set", "shared", "rounded"] if ALL else ["infinigen"])
def test_host_gathers_kv_if_kernels_cannot_read_host_memory(name: str, tmp_path: Path) -> None:
    cell = BY_NAME[name]
    scene = single if name == "graphs" else cell.scene
    expected = expected_answers(replace(cell, scene=scene, name=f"{name}, copied"), tmp_path)
    with (
        # as on WSL 2
        simulated(Late((1, 2)), in_place=False),
        pytest.warns(UserWarning, match="the host gathers KV before copying it") as caught,
    ):
        assert replace(cell, scene=scene).run("cuda", tmp_path) == expected
    assert len(caught) == 1


@pytest.mark.parametrize(("device", "steps"), [("cpu", [0]), ("cuda", [])])
def test_missed_mass_is_measured_by_default_only_on_a_cpu(device: str, steps: list[int], tmp_path: Path) -> None:
    def once(make: Callable[..., LLM], folder: Path) -> list[list[int]]:
        [done] = completed(make(missed_mass_every=None).generate([tiny_prompt(40)], SamplingParams(3, temperature=0)))
        assert [step for step, _ in done.stats.missed_by_step] == steps
        return []

    with simulated(Late()):
        replace(BY_NAME["quest"], scene=once).run(device, tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("policy", "options", "growth"),
    [("full", {}, 1536), ("quest", BY_NAME["quest"].options | {"budget": 0.9}, 1536 + 4608)],
)
def test_staging_memory_does_not_grow_with_the_number_of_layers(
    policy: str, options: dict[str, Any], growth: int
) -> None:
    extra = [decode_peak_bytes(policy, options, layers) for layers in (2, 4)]
    # Write-backs and positions take 1.5 KB per layer, and lists of selected tokens 4.5 KB. Staged KV takes 120 KB.
    assert extra[1] - extra[0] <= (4 - 2) * growth
    assert extra[0] > 0.8 * 0.9 * layer_kv_bytes(), "nothing was staged"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8"}], ids=["as they are", "rounded"])
def test_prefill_peak_does_not_grow_with_the_number_of_layers(settings: dict[str, Any]) -> None:
    extra = []
    for layers, schedule in ((2, Late()), (2, Lazy()), (4, Lazy()), (4, Late((2,)))):
        with simulated(schedule) as sim:
            model = tiny_model("llama", num_hidden_layers=layers).to("cuda")
            runner = LLM(model, policy="full", device="cuda", host_memory="16MiB", **settings).runner
            sequence = runner.new_sequence(tiny_prompt(300), 300)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = sim.memory.usage.active
            runner.prefill(sequence, 299)
            extra.append(sim.memory.usage.active_peak - before)
            runner.free(sequence)
    assert len(set(extra)) == 1, extra


def test_missed_mass_equals_the_cpu_path(tmp_path: Path) -> None:
    """Missed attention mass is computed from all keys, while the newest key is still being written back."""
    found: list[float] = []

    def once(make: Callable[..., LLM], folder: Path) -> list[list[int]]:
        [done] = completed(make(missed_mass_every=1).generate([tiny_prompt(40)], SamplingParams(4, temperature=0)))
        found.extend(mass for _, layers in done.stats.missed_by_step for mass in layers)
        return []

    cell = replace(BY_NAME["missed mass, paper"], scene=once)
    cell.run("cpu", tmp_path)
    with simulated(Late((2,))):
        cell.run("cuda", tmp_path)
    assert max(found) > 0.01 and found[: len(found) // 2] == pytest.approx(found[len(found) // 2 :], abs=1e-3)


def test_missing_compiler_error_names_packages_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = pytest.importorskip("offload_rt.kernels.triton_norm")
    messages = ["Failed to find C compiler. Please specify via CC environment variable", "CUDA error: out of luck"]

    def fail(*args: object) -> None:
        raise RuntimeError(messages.pop(0))

    monkeypatch.setattr(kernel, "rms_norm", fail)
    with simulated(Lazy()):
        model = tiny_model("llama", num_hidden_layers=1).to("cuda")
        with pytest.raises(ConfigError, match="install gcc or clang"):
            LLM(model, policy="full", host_memory="4MiB")
        # other errors are raised unchanged
        with pytest.raises(RuntimeError, match="out of luck"):
            LLM(model, policy="full", host_memory="4MiB")
