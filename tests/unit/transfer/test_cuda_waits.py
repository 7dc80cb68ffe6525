"""Test waits, events and freed memory of the CUDA path on a simulated device with late streams."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.cuda_cells import BLOCK_BYTES, BY_NAME, GRAPHS, SHORT
from support.cuda_simulator import Late, simulated
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM
from offload_rt.core import KVPart
from offload_rt.engine.runner import Runner
from offload_rt.model_runner.sequence import Sequence
from offload_rt.transfer.row_lists import RowLists


def decoded_sequence() -> tuple[Runner, Sequence]:
    """Return a runner and a sequence after a prefill of 20 tokens and one decode step."""
    model = tiny_model("llama", num_hidden_layers=2).to("cuda")
    runner = LLM(model, policy="full", device="cuda", host_memory="4MiB").runner
    sequence = runner.new_sequence(tiny_prompt(22), 22)
    runner.prefill(sequence, 20)
    runner.decode([sequence])
    return runner, sequence


@pytest.mark.parametrize("fetches", [False, True])
def test_free_waits_for_pending_fetches_and_write_backs(fetches: bool) -> None:
    with simulated(Late((1, 2))) as sim:
        runner, sequence = decoded_sequence()
        [last] = runner.pool.runs(sequence.blocks, 1, range(20, 21))
        assert last.k.isnan().all(), "the stream is late"
        reading = sim.engine.queues[1].entries
        if fetches:
            runner.transfer.rows.fetch_range(sequence.blocks, 1, range(20))
            assert reading
        runner.free(sequence)  # another sequence may now use its blocks
        assert not last.k.isnan().any() and not reading


@pytest.mark.parametrize(
    ("within", "read"),
    [(False, True), (False, False), (True, True)],
    ids=["between steps", "between steps, nothing read", "within a step"],
)
def test_eviction_moves_kv_after_pending_write_backs_and_fetches(within: bool, read: bool) -> None:
    """Fetches run after earlier write-backs, so waiting for a fetch is enough. Within a step, the host never waits."""
    with simulated(Late((1, 2))) as sim:
        runner, sequence = decoded_sequence()
        reading = sim.engine.queues[1].entries
        if read:
            runner.transfer.rows.fetch_range(sequence.blocks, 1, range(20))
            assert reading
        if within:
            before = len(sim.syncs)
            runner.transfer.storage.displace(sequence.blocks, 1, 20, 4)
            assert reading and len(sim.syncs) == before
            runner.transfer.storage.settle(sequence.blocks)
        else:
            runner.transfer.storage.move(sequence.blocks, 1, 20, 4)
        assert not reading
        [moved], [row] = (runner.pool.runs(sequence.blocks, 1, range(at, at + 1)) for at in (4, 20))
        assert not row.k.isnan().any() and torch.equal(moved.k, row.k) and torch.equal(moved.v, row.v)
        runner.free(sequence)


def overwrite_freed_memory(device: str) -> list[torch.Tensor]:
    return [torch.full((n,), 3, dtype=torch.int64, device=device) for n in (1, 64, 65) for _ in range(20)]


@pytest.mark.parametrize("late", [1, 2], ids=["prefetch", "write-back"])
def test_freed_row_lists_are_not_reused_while_read(late: int) -> None:
    """Row lists are allocated on the compute stream but read on the prefetch and write-back streams."""
    with simulated(Late((late,))):
        model = tiny_model("llama", num_hidden_layers=2).to("cuda")
        runner = LLM(model, policy="full", device="cuda", host_memory="4MiB").runner
        sequence = runner.new_sequence(tiny_prompt(22), 22)
        runner.prefill(sequence, 20)
        batched = runner.transfer.batched
        assert batched is not None
        lists = batched.row_lists(1, 64)
        lists.hold([sequence.blocks])
        one, tokens = torch.tensor([20], device="cuda"), torch.arange(20, device="cuda").expand(2, -1).contiguous()
        k, v = torch.randn(2, 2, runner.adapter.geometry.head_dim, device="cuda")
        want = k.cpu()
        if late == 1:
            pending = lists.fetch(1, tokens, None, overlapping=False)
        else:
            lists.append(1, KVPart(k, v), one, lists.row(20))
        del lists, k, v, tokens, one
        junk = overwrite_freed_memory("cuda")
        if late == 1:
            [run] = runner.pool.runs(sequence.blocks, 1, range(20))
            assert torch.equal(pending.wait().k.cpu(), run.k), junk
        runner.transfer.storage.settle(sequence.blocks)
        [last] = runner.pool.runs(sequence.blocks, 1, range(20, 21))
        assert late == 1 or torch.equal(last.k[:, 0], want), junk
        runner.free(sequence)


def test_graph_replay_records_an_event_after_write_backs() -> None:
    with simulated(Late((2,))):
        model = tiny_model("llama", num_hidden_layers=2).to("cuda")
        options = BY_NAME["infinigen"].options
        runner = LLM(model, policy_options=options, device="cuda", host_memory="4MiB", missed_mass_every=0).runner
        sequence = runner.new_sequence(tiny_prompt(42), 42)
        runner.prefill(sequence, 40)
        runner.decode([sequence])
        [inputs] = runner.eager.inputs.values()
        [last] = runner.pool.runs(sequence.blocks, 1, range(40, 41))
        for one in inputs.rows._open:
            one.written = None
        runner.transfer.storage.settle(sequence.blocks)
        assert last.k.isnan().all(), "the write-back has finished although no event was awaited"
        inputs.rows.replayed()
        runner.transfer.storage.settle(sequence.blocks)
        assert not last.k.isnan().any()
        runner.free(sequence)


STREAMING: dict[str, Any] = {"policy": "streaming", "policy_options": SHORT | {"budget": 0.9}}
REPLAYS: dict[str, dict[str, Any]] = {
    "reads copies": {"policy": "full", "device_kv_memory": 60 * BLOCK_BYTES},
    "reads the pool": STREAMING,
    "reads working sets": STREAMING | {"working_set": 9},
}


@pytest.mark.parametrize("settings", REPLAYS.values(), ids=REPLAYS)
def test_replay_waits_for_earlier_transfers(settings: dict[str, Any]) -> None:
    """The compute stream waits for write-backs of eager steps and for changed tables, because a graph cannot."""
    found = []
    for device in ("cpu", "cuda"):
        with simulated(Late((1, 2))) if device == "cuda" else nullcontext():
            model = tiny_model("llama", num_hidden_layers=2).to(device)
            only_cuda = ("device_kv_memory", *GRAPHS) if device == "cpu" else ()
            own = {name: value for name, value in (GRAPHS | settings).items() if name not in only_cuda}
            runner = LLM(model, device=device, host_memory="4MiB", missed_mass_every=0, verify="off", **own).runner
            batch = [runner.new_sequence(tiny_prompt(40, seed=seed), 40) for seed in (1, 2)]
            for sequence in batch:
                runner.prefill(sequence, 20)
            # The graph for one sequence runs again after the eager step of two sequences, and for the other sequence.
            steps = (batch[:1], batch[:1], batch, batch[1:])
            found.append([runner.decode(step).cpu() for step in steps])
            assert device == "cpu" or [one.size for one in runner.steps._captured] == [1]
            runner.check_integrity()
    for logits, expected in zip(*reversed(found), strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_saver_thread_may_wait_for_write_backs_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saver thread waits for KV from earlier steps, not for events in the capture."""
    seen: list[bool] = []
    with simulated(Late((2,))):
        model = tiny_model("llama", num_hidden_layers=2).to("cuda")
        options = BY_NAME["infinigen"].options
        runner = LLM(model, policy_options=options, device="cuda", host_memory="4MiB", missed_mass_every=0).runner
        sequence = runner.new_sequence(tiny_prompt(44), 44)
        runner.prefill(sequence, 40)
        append = RowLists.append

        def save() -> None:
            runner.transfer.storage.settle(sequence.blocks)
            [last] = runner.pool.runs(sequence.blocks, 1, range(40, 41))
            seen.append(bool(last.k.isnan().any()))

        def append_and_save(lists: RowLists, layer: int, *rest: Any) -> None:
            append(lists, layer, *rest)
            if torch.cuda.is_current_stream_capturing() and layer:
                saver = threading.Thread(target=save)
                saver.start()
                saver.join()

        monkeypatch.setattr(RowLists, "append", append_and_save)
        runner.decode([sequence])
        runner.decode([sequence])
        assert seen == [False], "the thread failed, or KV was not written yet"
        runner.free(sequence)


def test_pool_contains_kv_after_prefill_and_before_a_fork() -> None:
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
