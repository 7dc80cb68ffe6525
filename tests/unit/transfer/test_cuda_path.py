"""The CUDA path, run on a simulated device: whatever streams are late with, the tokens are the CPU's, and the host
waits for the device where it must and nowhere else."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_cells import BY_NAME, CELLS, LOW_BITS, SCHEDULES, Cell, single
from support.cuda_figures import launches_of_a_layer, layer_bytes, staged_bytes
from support.cuda_simulator import Late, Lazy, simulated
from support.outputs import completed
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, SamplingParams
from offload_rt.engine.runner import Runner

ALL = os.environ.get("OFFLOAD_RT_SCHEDULES") == "all"
RUNS = [(cell, name) for cell in CELLS for name in (SCHEDULES if ALL else cell.daily)]
assert {name for _, name in RUNS} == set(SCHEDULES)

_expected: dict[str, list[list[int]]] = {}


def on_cpu(cell: Cell, folder: Path) -> list[list[int]]:
    """The CPU's answers, computed once. What a working set has depends on the order of what was selected, which is not
    the same there: its bytes are those of streams that work at once."""
    if cell.name not in _expected:
        answers = cell.run("cpu", folder)
        if "working_set" in cell.settings:
            with simulated(Late()):
                there = cell.run("cuda", folder)
            assert [one[:-1] for one in there] == [one[:-1] for one in answers]
            answers = there
        _expected[cell.name] = answers
    return _expected[cell.name]


@pytest.mark.parametrize(("cell", "schedule"), RUNS, ids=lambda x: str(x))
def test_answers_are_those_of_a_cpu(cell: Cell, schedule: str, tmp_path: Path) -> None:
    expected = on_cpu(cell, tmp_path)
    with simulated(SCHEDULES[schedule]()):
        assert cell.run("cuda", tmp_path) == expected


EVICTION = {  # once a step, behind its last layer; its logits are waited for anyway
    ("_local_scalar_dense", "offload_rt/model_runner/batched.py"),  # the host ranks victims: it has to know
    ("copy device to host", "offload_rt/model_runner/slot_table.py"),  # how many tokens were selected, and which
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
    "h2o, batch": {("_local_scalar_dense", "offload_rt/policies/h2o.py")},  # how many have not been dropped
    "oracle, batch": {  # its true scores are of the keys in host memory
        ("event", "offload_rt/transfer/open_sequences.py"),
        ("copy host to device", "offload_rt/policies/oracle.py"),
    },
    "missed mass, paper": {  # measured on the host, against all keys
        ("event", "offload_rt/transfer/open_sequences.py"),
        ("copy device to host", "offload_rt/model_runner/attention.py"),
        ("copy device to host", "offload_rt/model_runner/trace.py"),
    },
    "eviction": EVICTION,
    "default, eviction": EVICTION,
}
"""For each cell the waits of a decode step that it has, all of them."""

_SLOW = ("infinigen, batch", "shared", "forks", "graphs", "eviction", "working set", "paper, batch")
SLOW = () if ALL else (*_SLOW, *(name for name in ALLOWED if name.startswith("default")))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """What the host waits for in decode steps, and in which file."""
    found: set[tuple[str, str]] = set()
    decode = Runner.decode
    with simulated(Lazy()) as sim:

        def watched(self: Runner, *args: Any) -> torch.Tensor:
            before = len(sim.syncs)
            logits = decode(self, *args)
            found.update((sync.what, sync.file) for sync in sim.syncs[before:])
            return logits

        monkeypatch.setattr(Runner, "decode", watched)
        yield found


@pytest.mark.parametrize("name", [name for name in ALLOWED if name not in SLOW] + ["default"])
def test_a_decode_step_waits_for_nothing_else(name: str, tmp_path: Path, waits: set[tuple[str, str]]) -> None:
    BY_NAME[name].run("cuda", tmp_path)
    assert waits == ALLOWED.get(name, set())


def test_a_batch_with_a_tail_is_as_many_launches_as_one_sequence() -> None:
    """A step of the default, at most 45 launches a layer; nothing runs before the end."""
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
    assert one == three and one["triton _join"] == one["triton _append"] == one["triton _score"] == 2
    assert counts[0].total() <= counts[1].total() <= 2 * 45 + 50


LAUNCHES = {"infinigen": 35, "full": 25, "quest": 37, "default": 40}
"""Kernels and copies that a decode step may launch for each further layer, the model's own among them (seven products,
norms, positions and the MLP are 15): at most 45. Dense layers have a copy for K and V of each KV head, two here."""


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_layer_launches_no_more_than_it_may(name: str) -> None:
    launched = launches_of_a_layer(name)
    assert 15 < launched.total() <= LAUNCHES[name] <= 45, launched


def test_another_device_than_the_current_one_computes(tmp_path: Path) -> None:
    """Kernels, copies and graphs are all on the model's."""
    cell = replace(BY_NAME["default, graphs"], scene=single)
    expected = on_cpu(replace(BY_NAME["default, batch"], name="default, single", scene=single), tmp_path)
    with simulated(Late(), devices=2) as sim:
        assert cell.run("cuda:1", tmp_path) == expected
        assert sim.device == 0 and all(queue.device == 1 for queue in sim.engine.queues[2:])


@pytest.mark.parametrize("name", ["infinigen", "graphs", "working set", "shared", "rounded"] if ALL else ["infinigen"])
def test_where_kernels_do_not_find_host_memory_the_host_copies_rows(name: str, tmp_path: Path) -> None:
    """As under WSL: it is said once, when a model is loaded, and nothing is captured."""
    cell = BY_NAME[name]
    scene = single if name == "graphs" else cell.scene
    expected = on_cpu(replace(cell, scene=scene, name=f"{name}, copied"), tmp_path)
    with (
        simulated(Late((1, 2)), in_place=False),
        pytest.warns(UserWarning, match="the host gathers KV before copying it") as said,
    ):
        assert replace(cell, scene=scene).run("cuda", tmp_path) == expected
    assert len(said) == 1


@pytest.mark.parametrize(("device", "steps"), [("cpu", [0]), ("cuda", [])])
def test_the_missed_mass_is_measured_where_the_keys_are(device: str, steps: list[int], tmp_path: Path) -> None:
    """On a device only where it is asked for."""

    def once(make: Callable[..., LLM], folder: Path) -> list[list[int]]:
        [done] = completed(make(missed_mass_every=None).generate([tiny_prompt(40)], SamplingParams(3, temperature=0)))
        assert [step for step, _ in done.stats.missed_by_step] == steps
        return []

    with simulated(Late()):
        replace(BY_NAME["quest"], scene=once).run(device, tmp_path)


@pytest.mark.parametrize(("policy", "options"), [("full", {}), ("quest", BY_NAME["quest"].options | {"budget": 0.9})])
def test_what_is_staged_does_not_grow_with_how_far_the_host_is_ahead(policy: str, options: dict[str, Any]) -> None:
    """Nothing runs before the host waits at a step's end: it is ahead by all layers. Of two layers and of five the
    step has the same on the device beside what was there before, but for two kilobytes of a layer (rows that are being
    written back, positions of resident rows); a layer stages 120."""
    extra = [staged_bytes(policy, options, layers) for layers in (2, 5)]
    assert extra[1] - extra[0] < (5 - 2) * 20 * 1024
    assert extra[0] > 0.8 * 0.9 * layer_bytes(), "nothing was staged"


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8"}], ids=["as they are", "rounded"])
def test_a_prefill_s_peak_does_not_grow_with_how_far_the_host_is_ahead(settings: dict[str, Any]) -> None:
    """Slices that are written back are held for a layer: of two layers and of five the peak is the same, but for the
    resident rows and positions of a layer (a kilobyte), whether the write-back runs at once or when it must."""
    extra = []
    for layers, schedule in ((2, Late()), (2, Lazy()), (5, Lazy()), (5, Late((2,)))):
        with simulated(schedule) as sim:
            model = tiny_model("llama", num_hidden_layers=layers).to("cuda")
            runner = LLM(model, policy="full", device="cuda", host_memory="16MiB", **settings).runner
            sequence = runner.new_sequence(tiny_prompt(1500), 1500)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = sim.memory.usage.active
            runner.prefill(sequence, 1499)
            extra.append(sim.memory.usage.active_peak - before)
            runner.free(sequence)
    assert max(extra) - min(extra) < 20 * 1024, extra


@pytest.mark.parametrize("fetches", [False, True])
def test_a_sequence_that_has_ended_reads_and_writes_nothing_more(fetches: bool) -> None:
    """Its chunks are somebody else's from then on: its last row is in the pool, and a fetch that nobody waited for has
    run."""
    with simulated(Late((1, 2))) as sim:
        model = tiny_model("llama", num_hidden_layers=2).to("cuda")
        runner = LLM(model, policy="full", device="cuda", host_memory="4MiB").runner
        sequence = runner.new_sequence(tiny_prompt(22), 22)
        runner.prefill(sequence, 20)
        runner.decode([sequence])
        [last] = runner.pool.runs(sequence.blocks, 1, range(20, 21))
        assert last.k.isnan().all(), "the stream is late"
        reading = sim.engine.queues[1].entries
        if fetches:
            runner.link.rows.fetch_range(sequence.blocks, 1, range(20))
            assert reading
        runner.free(sequence)
        assert not last.k.isnan().any() and not reading


@pytest.mark.parametrize(
    ("within", "read"),
    [(False, True), (False, False), (True, True)],
    ids=["between steps", "between steps, nothing read", "within a step"],
)
def test_rows_move_behind_what_reads_them(within: bool, read: bool) -> None:
    """An eviction overwrites a slot with a row that is being written back: both that and a fetch of the slot have run
    by then. Within a step the host does not wait for it. (A fetch is behind the write-back: where there is one, waiting
    for it is enough.)"""
    with simulated(Late((1, 2))) as sim:
        model = tiny_model("llama", num_hidden_layers=2).to("cuda")
        runner = LLM(model, policy="full", device="cuda", host_memory="4MiB").runner
        sequence = runner.new_sequence(tiny_prompt(22), 22)
        runner.prefill(sequence, 20)
        runner.decode([sequence])
        reading = sim.engine.queues[1].entries
        if read:
            runner.link.rows.fetch_range(sequence.blocks, 1, range(20))
            assert reading
        if within:
            before = len(sim.syncs)
            runner.link.storage.displace(sequence.blocks, 1, 20, 4)
            assert reading and len(sim.syncs) == before
            runner.link.storage.settle(sequence.blocks)
        else:
            runner.link.storage.move(sequence.blocks, 1, 20, 4)
        assert not reading
        [moved], [row] = (runner.pool.runs(sequence.blocks, 1, range(at, at + 1)) for at in (4, 20))
        assert not row.k.isnan().any() and torch.equal(moved.k, row.k) and torch.equal(moved.v, row.v)
        runner.free(sequence)


def overwritten(device: str) -> list[torch.Tensor]:
    """Small tensors, in all the memory that has just been let go."""
    return [torch.full((n,), 3, dtype=torch.int64, device=device) for n in (1, 64, 65) for _ in range(20)]


@pytest.mark.parametrize("late", [1, 2], ids=["prefetch", "write-back"])
def test_lists_of_a_batch_that_is_gone_are_still_read(late: int) -> None:
    """What says where rows lie is memory of the compute stream, and both others read it."""
    with simulated(Late((late,))):
        model = tiny_model("llama", num_hidden_layers=2).to("cuda")
        runner = LLM(model, policy="full", device="cuda", host_memory="4MiB").runner
        sequence = runner.new_sequence(tiny_prompt(22), 22)
        runner.prefill(sequence, 20)
        batched = runner.link.batched
        assert batched is not None
        lists = batched.row_lists(1, 64)
        lists.hold([sequence.blocks])
        one, tokens = torch.tensor([20], device="cuda"), torch.arange(20, device="cuda").expand(2, -1).contiguous()
        k, v = torch.randn(2, 2, 16, device="cuda")
        want = k.cpu()
        if late == 1:
            arriving = lists.fetch(1, tokens, None, overlapping=False)
        else:
            lists.append(1, k, v, one, lists.rows_of(one))
        del lists, k, v, tokens, one
        junk = overwritten("cuda")
        if late == 1:
            [run] = runner.pool.runs(sequence.blocks, 1, range(20))
            assert torch.equal(arriving.wait()[0].cpu(), run.k), junk
        runner.link.storage.settle(sequence.blocks)
        [last] = runner.pool.runs(sequence.blocks, 1, range(20, 21))
        assert late == 1 or torch.equal(last.k[:, 0], want), junk
        runner.free(sequence)


def test_what_a_graph_writes_back_counts_as_written() -> None:
    """A replay marks the sequences' rows as it queues them: whoever needs them waits for that."""
    with simulated(Late((2,))):
        model = tiny_model("llama", num_hidden_layers=2).to("cuda")
        options = BY_NAME["infinigen"].options
        runner = LLM(model, policy_options=options, device="cuda", host_memory="4MiB", missed_mass_every=0).runner
        sequence = runner.new_sequence(tiny_prompt(42), 42)
        runner.prefill(sequence, 40)
        runner.decode([sequence])
        [inputs] = runner.strategies.inputs.values()
        [last] = runner.pool.runs(sequence.blocks, 1, range(40, 41))
        inputs.rows.written(behind=False)
        runner.link.storage.settle(sequence.blocks)
        assert last.k.isnan().all(), "nothing is marked, and the stream is late"
        inputs.rows.written(behind=True)
        runner.link.storage.settle(sequence.blocks)
        assert not last.k.isnan().any()
        runner.free(sequence)


def test_what_others_may_share_is_in_the_pool() -> None:
    """Rows of a prompt that has been computed, and those that a fork copies."""
    with simulated(Late((2,))):
        model = tiny_model("llama", num_hidden_layers=2).to("cuda")
        runner = LLM(model, policy="full", device="cuda", host_memory="4MiB").runner
        sequence = runner.new_sequence(tiny_prompt(72), 72)
        runner.prefill(sequence, 70)
        assert not any(part.v.isnan().any() for part in runner.pool.runs(sequence.blocks, 1, range(70)))
        runner.decode([sequence])
        twin = runner.fork(sequence, 72)
        assert not any(part.v.isnan().any() for part in runner.pool.runs(twin.blocks, 1, range(71)))
        for one in (sequence, twin):
            runner.free(one)


def test_the_missed_mass_is_that_of_a_cpu(tmp_path: Path) -> None:
    """It is measured against all keys where they are, the newest one among them, which is still being written back."""
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


def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else is taken for that."""
    kernel = pytest.importorskip("offload_rt.kernels.triton_norm")
    said = ["Failed to find C compiler. Please specify via CC environment variable", "CUDA error: out of luck"]

    def fails(*args: object) -> None:
        raise RuntimeError(said.pop(0))

    monkeypatch.setattr(kernel, "rms_norm", fails)
    with simulated(Lazy()):
        model = tiny_model("llama", num_hidden_layers=1).to("cuda")
        with pytest.raises(ConfigError, match="install gcc or clang"):
            LLM(model, policy="full", host_memory="4MiB")
        with pytest.raises(RuntimeError, match="out of luck"):
            LLM(model, policy="full", host_memory="4MiB")
