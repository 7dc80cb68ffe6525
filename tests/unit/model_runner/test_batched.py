"""Test batched selection: results equal those of each sequence alone, and the number of launches does not depend on the
batch.
"""

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
def test_a_batch_on_the_kernels_equals_each_sequence_alone(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths cross the boundary of a block and of a bucket. No step synchronises with the device."""
    # The CPU kernel quantises attention weights of approximate values; the others do not.
    monkeypatch.setattr(low_bit_sequence, "library", lambda *shape: None)
    lengths = (30, 63, 127)
    runner = make_runner(False, **options)
    alone = [prefilled_sequence(runner, length, seed=length) for length in lengths]
    want = [[runner.decode([one]) for one in alone] for _ in range(3)]
    use_triton(monkeypatch)
    runner = make_runner(True, **options)
    batch = [prefilled_sequence(runner, length, seed=length) for length in lengths]
    for logits in want:
        with NoHostSync():
            got = runner.decode(batch)
        torch.testing.assert_close(got, torch.cat(logits), rtol=1e-4, atol=1e-4)
    for one, other in zip(batch, alone, strict=True):
        one.trace.flush_pending()
        assert one.trace.attended == other.trace.attended and one.trace.bytes_to_device == other.trace.bytes_to_device
    runner.check_integrity()


class Recorded(TorchDispatchMode):
    """Record every operation with its arguments, shapes, strides, and the addresses of tensors that existed before.

    A Triton launch counts as one operation, and so does a new tensor with values from the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Any] = []
        self._made: set[int] = set()
        self._there: set[int] = set()
        self._kept: list[torch.Tensor] = []
        self._inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._inside:
            name = str(func)
            fresh = "lift_fresh" in name and args[0].data_ptr() not in self._made
            values = args[0].tolist() if fresh else None
            self._write(name, [self._describe(x) for x in (*args, *(kwargs or {}).values())], values)
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                self._made_here(tensor)
        return out

    def _made_here(self, tensor: Any) -> None:
        """Register a tensor made during the step, unless it is a view of an earlier tensor."""
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self._there:
            self._made.add(tensor.untyped_storage().data_ptr())
            self._kept.append(tensor)  # keeps the address from being reused

    def _write(self, *entry: Any) -> None:
        self.entries.append(entry)

    def _describe(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage().data_ptr()
            if storage not in self._made:
                self._there.add(storage)
            where = "made" if storage in self._made else x.data_ptr()
            return (where, tuple(x.shape), x.stride(), x.dtype)
        if isinstance(x, (list, tuple)):
            return [self._describe(y) for y in x]
        return x

    def launch(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method `run` of a kernel to record it as one operation."""

        def one(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
            self._write(kernel.fn.__qualname__, grid, [self._describe(x) for x in (*args, *named.values())])
            self._inside += 1
            try:
                return run(kernel, *args, grid=grid, warmup=warmup, **named)
            finally:
                self._inside -= 1

        return one


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    from triton.runtime.interpreter import InterpretedFunction

    with monkeypatch.context() as patch, Recorded() as mode:
        patch.setattr(InterpretedFunction, "run", mode.launch(InterpretedFunction.run))
        yield mode.entries


def step_recorded(runner: Runner, batch: list[Sequence], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the operations of a decode step from the tokens to the logits."""
    for sequence in batch:
        sequence.slots.begin_step(sequence.blocks, sequence.position)
    sharing = runner.prefixes.find([sequence.blocks for sequence in batch])
    members = [batch[i] for i in sharing.order]
    step = DecodeBatch(members, runner.adapter, runner.policy, runner.transfer, sharing)
    with torch.inference_mode():
        assert isinstance(runner.eager.mode(step), BatchedMode)
        inputs = runner.eager.load(step)
        assert inputs is not None
        with recorded(monkeypatch) as entries:
            DecodeStep(step, BatchedMode(step, inputs)).run()
    for sequence in batch:
        sequence.position += 1
        runner.pool.commit(sequence.blocks, sequence.slots.context)
    return entries


def test_launches_do_not_depend_on_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a bucket, launches do not depend on lengths, slots or addresses, so that a CUDA graph can replay them."""
    use_triton(monkeypatch)
    runner = make_runner()
    batch = [prefilled_sequence(runner, 70), prefilled_sequence(runner, 90, seed=1)]
    first = step_recorded(runner, batch, monkeypatch)
    runner.decode(batch)
    again = step_recorded(runner, batch, monkeypatch)
    others = [prefilled_sequence(runner, 126, seed=2), prefilled_sequence(runner, 100, seed=3)]
    different = step_recorded(runner, others, monkeypatch)
    names = [entry[0] for entry in first]
    assert sum("_mark" in name for name in names) == 2 and not any("lift_fresh" in name for name in names)
    for entries in (again, different):
        assert len(entries) == len(first)
        assert [(a, b) for a, b in zip(first, entries, strict=True) if a != b] == []


def test_a_batch_takes_as_many_launches_as_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    use_triton(monkeypatch)
    runner = make_runner()
    one = step_recorded(runner, [prefilled_sequence(runner, 70)], monkeypatch)
    three = step_recorded(runner, [prefilled_sequence(runner, 70 + i, seed=i) for i in range(3)], monkeypatch)

    def launches(entries: list[Any]) -> list[str]:
        return [entry[0] for entry in entries if not entry[0].startswith("aten")]

    assert launches(one) == launches(three) and len(launches(one)) > 20


def test_lists_are_rebuilt_only_for_another_batch_size_or_bucket() -> None:
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
    for lists in runner.eager.inputs.values():  # otherwise KV of a finished sequence stays
        assert not lists.rows._open and not lists.rows._resident and not lists.keys._storages


def test_layers_that_slide_and_layers_that_select_are_both_batched() -> None:
    def runner_of(counted: bool) -> Runner:
        model = tiny_model("qwen2", use_sliding_window=True, max_window_layers=2)
        runner = staged(LLM(model, policy_options=OPTIONS, host_memory="8MiB", missed_mass_every=0)).runner
        policy: Any = runner.policy
        policy.rule = Rule(policy.alpha, policy.options.max_fraction) if counted else None
        return runner

    lengths, alone, together = (30, 63, 127), runner_of(False), runner_of(True)
    each, batch = (
        [prefilled_sequence(runner, length, seed=length) for length in lengths] for runner in (alone, together)
    )
    for _ in range(4):
        want = torch.cat([alone.decode([one]) for one in each])
        torch.testing.assert_close(together.decode(batch), want, rtol=1e-4, atol=1e-4)
    assert together.eager.inputs
    for one, other in zip(batch, each, strict=True):
        one.trace.flush_pending()
        assert one.trace.attended == other.trace.attended and one.trace.bytes_to_device == other.trace.bytes_to_device
        assert one.trace.bytes_to_host == other.trace.bytes_to_host
    together.check_integrity()


@pytest.mark.parametrize("context", [1, 63, 64, 65, 1000, 1024, 1025, 131_071])
def test_buckets_are_near(context: int) -> None:
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
def test_a_window_cut_by_truncation_is_not_adjacent_if_it_wraps_around(floor: int) -> None:
    for length in range(floor + 1, 20):
        visible = VisibleTokens.of(length, sinks=0, recent=6, window=6, floor=floor)
        at = {resident_index(token, 0, 6) for token in visible.all}
        assert resident_range(visible, 0, 6) == (range(min(at), max(at) + 1) if max(at) - min(at) < len(at) else None)


def test_plans_count_batched_slots_on_a_device() -> None:
    """On CUDA, each sequence takes as many slots as the longest one."""
    shape = load_shape(tiny_model("llama"))
    demand = memory_demand("infinigen", {}, shape.geometry, shape.dtype)
    apart = DeviceCosts(shape, demand, 512)
    together = DeviceCosts(replace(shape, device=torch.device("cuda")), demand, 512)
    alike = [bucket(1000)] * 3
    assert together.staging([10, 1000, 500]) == together.staging(alike) >= apart.staging(alike)
    captured = replace(together, graphs=True)
    step = captured.staging(alike) + captured.decode(alike)
    assert step == together.staging(alike[:1] * 4) + together.decode(alike[:1] * 4), "of four, in a graph's memory"
    assert captured.total(alike) >= together.total(alike) + step
    scores = bucket(1000) * shape.geometry.heads * 4
    assert together.decode([10, 1000, 500]) - apart.decode(alike) >= 2 * scores


@pytest.mark.parametrize("together", [True, False])
def test_missed_mass_is_measured_after_the_newest_write_back(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missed mass is measured with all KV in the pool, so it must wait for pending write-backs.

    On a device this is a race, which the numbers of this test would not show.
    """
    runner = make_runner(together)
    batch = [prefilled_sequence(runner, length, seed=length) for length in (30, 90)]
    waiting: set[int] = set()
    append, append_lists, settle = runner.transfer.storage.append, RowLists.append, runner.transfer.storage.settle
    read: list[int] = []

    def appended(blocks: BlockTable, *rest: Any) -> int:
        waiting.add(id(blocks))
        return append(blocks, *rest)

    def appended_lists(lists: RowLists, *rest: Any) -> None:
        waiting.update(id(one.blocks) for one in batch)
        append_lists(lists, *rest)

    def settled(blocks: BlockTable) -> None:
        waiting.discard(id(blocks))
        settle(blocks)

    def looked_at(blocks: BlockTable, layer: int, tokens: range) -> list[KVPart]:
        assert id(blocks) not in waiting
        read.append(layer)
        return runs(blocks, layer, tokens)

    runs = runner.pool.runs
    monkeypatch.setattr(runner.pool, "runs", looked_at)
    monkeypatch.setattr(runner.transfer.storage, "append", appended)
    monkeypatch.setattr(runner.transfer.storage, "settle", settled)
    monkeypatch.setattr(RowLists, "append", appended_lists)
    for sequence in batch:
        sequence.trace.missed_every = 1
    runner.decode(batch)
    assert sorted(read) == [0, 0, 1, 1] and all(len(sequence.trace.missed) == 1 for sequence in batch)
