"""Test batched selection: results equal those of single sequences, and the number of launches is constant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.batches import OPTIONS, make_runner, prefilled_sequence, use_triton
from support.host_sync import NoHostSync
from support.staged_transfer import staged
from support.tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from offload_rt import LLM
from offload_rt.core import BlockTable, KVPart, VisibleTokens, bucket
from offload_rt.engine.runner import Runner
from offload_rt.kernels import low_bit_sequence
from offload_rt.model_runner.batch import DecodeBatch
from offload_rt.model_runner.batched import BatchedMode
from offload_rt.model_runner.decode import DecodeStep
from offload_rt.model_runner.sequence import Sequence
from offload_rt.model_runner.step_inputs import StepShape
from offload_rt.models.shape import load_shape
from offload_rt.planning.memory_model import DeviceCosts
from offload_rt.policies.registry import memory_demand
from offload_rt.policies.rule import Rule
from offload_rt.transfer.residency import resident_index, resident_range
from offload_rt.transfer.row_lists import RowLists


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scorer": "int4", "source": "attention_input"},
        {"preset": "paper"},
        {"approximate_kv": "int2", "max_fraction": 0.05},
    ],
)
def test_batched_kernels_equal_single_sequences_without_host_syncs(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The CPU kernel quantises the attention weights of approximate values; other kernels do not.
    monkeypatch.setattr(low_bit_sequence, "library", lambda *shape: None)
    lengths = (30, 63, 127)  # the steps cross the ends of a block and of a bucket
    runner = make_runner(False, **options)
    single = [prefilled_sequence(runner, length, seed=length) for length in lengths]
    expected = [[runner.decode([sequence]) for sequence in single] for _ in range(3)]
    use_triton(monkeypatch)
    runner = make_runner(True, **options)
    batch = [prefilled_sequence(runner, length, seed=length) for length in lengths]
    for logits in expected:
        with NoHostSync():
            actual = runner.decode(batch)
        torch.testing.assert_close(actual, torch.cat(logits), rtol=1e-4, atol=1e-4)
    for sequence, reference in zip(batch, single, strict=True):
        sequence.trace.flush_pending()
        assert (
            sequence.trace.attended == reference.trace.attended
            and sequence.trace.bytes_to_device == reference.trace.bytes_to_device
        )
    runner.check_integrity()


class OperationRecorder(TorchDispatchMode):
    """Records each operation's arguments: shapes, strides, and the addresses of tensors that existed before the step.

    A Triton launch counts as one operation. So does a new tensor whose values come from the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Any] = []
        self._created: set[int] = set()
        self._existing: set[int] = set()
        self._references: list[torch.Tensor] = []
        self._inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._inside:
            name = str(func)
            fresh = "lift_fresh" in name and args[0].data_ptr() not in self._created
            values = args[0].tolist() if fresh else None
            self._write(name, [self._describe(x) for x in (*args, *(kwargs or {}).values())], values)
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                self._register(tensor)
        return out

    def _register(self, tensor: Any) -> None:
        """Register a tensor that was created during the step, unless it is a view of an earlier tensor."""
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self._existing:
            self._created.add(tensor.untyped_storage().data_ptr())
            self._references.append(tensor)  # keeps the address from being reused

    def _write(self, *entry: Any) -> None:
        self.entries.append(entry)

    def _describe(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage().data_ptr()
            if storage not in self._created:
                self._existing.add(storage)
            where = "created" if storage in self._created else x.data_ptr()
            return (where, tuple(x.shape), x.stride(), x.dtype)
        if isinstance(x, (list, tuple)):
            return [self._describe(y) for y in x]
        return x

    def launch(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper for a kernel's method `run` that records each launch as one operation."""

        def record_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
            self._write(kernel.fn.__qualname__, grid, [self._describe(x) for x in (*args, *named.values())])
            self._inside += 1
            try:
                return run(kernel, *args, grid=grid, warmup=warmup, **named)
            finally:
                self._inside -= 1

        return record_launch


@contextmanager
def record_operations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    from triton.runtime.interpreter import InterpretedFunction

    with monkeypatch.context() as patch, OperationRecorder() as mode:
        patch.setattr(InterpretedFunction, "run", mode.launch(InterpretedFunction.run))
        yield mode.entries


def recorded_step(runner: Runner, batch: list[Sequence], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the operations of a decode step, from token ids to logits."""
    for sequence in batch:
        sequence.slots.begin_step(sequence.blocks, sequence.position)
    sharing = runner.prefixes.find([sequence.blocks for sequence in batch])
    members = [batch[i] for i in sharing.order]
    step = DecodeBatch(members, runner.adapter, runner.policy, runner.transfer, sharing)
    with torch.inference_mode():
        assert isinstance(runner.eager.mode(step), BatchedMode)
        inputs = runner.eager.load(step)
        assert inputs is not None
        with record_operations(monkeypatch) as entries:
            DecodeStep(step, BatchedMode(step, inputs)).run()
    for sequence in batch:
        sequence.position += 1
        runner.pool.commit(sequence.blocks, sequence.slots.context)
    return entries


def test_launches_do_not_depend_on_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph can replay a step only if launches do not depend on lengths, slots or addresses."""
    use_triton(monkeypatch)
    runner = make_runner()
    batch = [prefilled_sequence(runner, 70), prefilled_sequence(runner, 90, seed=1)]
    first = recorded_step(runner, batch, monkeypatch)
    runner.decode(batch)
    second = recorded_step(runner, batch, monkeypatch)
    other_sequences = [prefilled_sequence(runner, 126, seed=2), prefilled_sequence(runner, 100, seed=3)]
    other_step = recorded_step(runner, other_sequences, monkeypatch)
    names = [entry[0] for entry in first]
    assert sum("_mark" in name for name in names) == 2 and not any("lift_fresh" in name for name in names)
    for entries in (second, other_step):
        assert len(entries) == len(first)
        assert [(a, b) for a, b in zip(first, entries, strict=True) if a != b] == []


def test_batch_has_as_many_launches_as_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    use_triton(monkeypatch)
    runner = make_runner()
    one = recorded_step(runner, [prefilled_sequence(runner, 70)], monkeypatch)
    three = recorded_step(runner, [prefilled_sequence(runner, 70 + i, seed=i) for i in range(3)], monkeypatch)

    def launches(entries: list[Any]) -> list[str]:
        return [entry[0] for entry in entries if not entry[0].startswith("aten")]

    assert launches(one) == launches(three) and len(launches(one)) > 20


def test_lists_are_rebuilt_only_for_a_new_batch_size_or_bucket() -> None:
    runner = make_runner()
    batch = [prefilled_sequence(runner, 60), prefilled_sequence(runner, 61, seed=1)]
    seen = []
    for _ in range(6):
        runner.decode(batch)
        seen.append(list(runner.eager.inputs.values())[-1])
    assert [lists is seen[0] for lists in seen] == [True] * 3 + [False] * 3 and seen[3] is seen[5]
    runner.decode(batch[:1])
    assert list(runner.eager.inputs) == [StepShape(2, 64), StepShape(2, 128), StepShape(1, 128)]
    runner.free(batch[0])
    for lists in runner.eager.inputs.values():  # otherwise the KV of a finished sequence stays
        assert not lists.rows._open and not lists.rows._resident
        assert lists.selection is not None and not lists.selection.keys._storages


def test_sliding_and_selecting_layers_are_batched() -> None:
    def make_runner(counted: bool) -> Runner:
        model = tiny_model("qwen2", use_sliding_window=True, max_window_layers=2)
        runner = staged(LLM(model, policy_options=OPTIONS, host_memory="8MiB", missed_mass_every=0)).runner
        policy: Any = runner.policy
        policy.rule = Rule(policy.alpha, policy.options.max_fraction) if counted else None
        return runner

    lengths, single_runner, batch_runner = (30, 63, 127), make_runner(False), make_runner(True)
    single, batch = (
        [prefilled_sequence(runner, length, seed=length) for length in lengths]
        for runner in (single_runner, batch_runner)
    )
    for _ in range(4):
        expected = torch.cat([single_runner.decode([sequence]) for sequence in single])
        torch.testing.assert_close(batch_runner.decode(batch), expected, rtol=1e-4, atol=1e-4)
    assert batch_runner.eager.inputs
    for sequence, reference in zip(batch, single, strict=True):
        sequence.trace.flush_pending()
        assert (
            sequence.trace.attended == reference.trace.attended
            and sequence.trace.bytes_to_device == reference.trace.bytes_to_device
        )
        assert sequence.trace.bytes_to_host == reference.trace.bytes_to_host
    batch_runner.check_integrity()


@pytest.mark.parametrize("context", [1, 63, 64, 65, 1000, 1024, 1025, 131_071])
def test_bucket_is_at_most_an_eighth_and_64_larger_than_the_context(context: int) -> None:
    size = bucket(context)
    assert context <= size <= max(64, context + context // 8 + 64) and size % 64 == 0 and bucket(size) == size


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("recent", [1, 5])
@pytest.mark.parametrize("window", [None, 5, 6, 9])
def test_indices_of_resident_tokens_are_adjacent(sinks: int, recent: int, window: int | None) -> None:
    for length in range(1, 30):
        visible = VisibleTokens.of(length, sinks=sinks, recent=recent, window=window)
        resident = {*visible.sinks, *visible.recent}
        assert {resident_index(token, sinks, recent) for token in resident} == set(
            resident_range(visible, sinks, recent) or ()
        )


@pytest.mark.parametrize("floor", [4, 7])
def test_truncated_window_that_wraps_around_is_not_adjacent(floor: int) -> None:
    for length in range(floor + 1, 20):
        visible = VisibleTokens.of(length, sinks=0, recent=6, window=6, floor=floor)
        indices = {resident_index(token, 0, 6) for token in visible.all}
        assert resident_range(visible, 0, 6) == (
            range(min(indices), max(indices) + 1) if max(indices) - min(indices) < len(indices) else None
        )


def test_plan_counts_slots_of_a_batch_on_a_gpu() -> None:
    """On CUDA, each sequence has as many slots as the longest sequence."""
    shape = load_shape(tiny_model("llama"))
    demand = memory_demand("infinigen", {}, shape.geometry, shape.dtype)
    single = DeviceCosts(shape, demand, 512)
    batched = DeviceCosts(replace(shape, device=torch.device("cuda")), demand, 512)
    contexts = [bucket(1000)] * 3
    assert batched.staging([10, 1000, 500]) == batched.staging(contexts) >= single.staging(contexts)
    captured = replace(batched, graphs=True)
    step = captured.staging(contexts) + captured.decode(contexts)
    assert step == batched.staging(contexts[:1] * 4) + batched.decode(contexts[:1] * 4), (
        "the memory of a graph for four sequences"
    )
    assert captured.total(contexts) >= batched.total(contexts) + step
    scores = bucket(1000) * shape.geometry.heads * 4
    assert batched.decode([10, 1000, 500]) - single.decode(contexts) >= 2 * scores


@pytest.mark.parametrize("batched", [True, False])
def test_missed_mass_is_measured_after_the_newest_write_back(batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missed attention mass is computed from KV in the pool, so it must wait for pending write-backs.

    On a GPU, a missing wait would be a race that this test could not detect from the numbers.
    """
    runner = make_runner(batched)
    batch = [prefilled_sequence(runner, length, seed=length) for length in (30, 90)]
    pending: set[int] = set()
    append, append_lists, settle = runner.transfer.storage.append, RowLists.append, runner.transfer.storage.settle
    read_layers: list[int] = []

    def record_append(blocks: BlockTable, *arguments: Any) -> int:
        pending.add(id(blocks))
        return append(blocks, *arguments)

    def record_append_lists(lists: RowLists, *arguments: Any) -> None:
        pending.update(id(sequence.blocks) for sequence in batch)
        append_lists(lists, *arguments)

    def record_settle(blocks: BlockTable) -> None:
        pending.discard(id(blocks))
        settle(blocks)

    def checked_runs(blocks: BlockTable, layer: int, tokens: range) -> list[KVPart]:
        assert id(blocks) not in pending
        read_layers.append(layer)
        return runs(blocks, layer, tokens)

    runs = runner.pool.runs
    monkeypatch.setattr(runner.pool, "runs", checked_runs)
    monkeypatch.setattr(runner.transfer.storage, "append", record_append)
    monkeypatch.setattr(runner.transfer.storage, "settle", record_settle)
    monkeypatch.setattr(RowLists, "append", record_append_lists)
    for sequence in batch:
        sequence.trace.missed_every = 1
    runner.decode(batch)
    assert sorted(read_layers) == [0, 0, 1, 1] and all(len(sequence.trace.missed) == 1 for sequence in batch)
