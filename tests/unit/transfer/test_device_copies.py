"""Test KV blocks with copies on the simulated device: tokens do not change, and these blocks are not transferred."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_cells import BLOCK_BYTES, BY_NAME, LAYERS, LOW_BITS, POLICIES, SCHEDULES, Cell
from support.cuda_simulator import Late, Lazy, simulated
from support.outputs import completed
from support.pools import append, geometry, kv, make_pool, read
from support.tiny_models import tiny_checkpoint, tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, MemoryLimitError, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.core import BLOCK_SIZE
from offload_rt.engine.engine import Engine
from offload_rt.engine.swap import Swap
from offload_rt.models.shape import load_shape
from offload_rt.outputs import CompletionOutput
from offload_rt.planning.device_plan import costs_for
from offload_rt.planning.memory_model import requirements
from offload_rt.storage.options import StoreOptions
from offload_rt.transfer.cuda import CudaTransfer
from offload_rt.transfer.streams import InlineStream

MANY, FEW = 60 * BLOCK_BYTES, 2 * BLOCK_BYTES
DAILY = [  # cell, copies, schedule
    ("quest, graphs", FEW, "seed 1"),
    ("h2o, batch", MANY, "late write-back"),
    ("forks, full", FEW, "seed 0"),
    ("sessions, full", FEW, "seed 1"),
    ("short window", MANY, "late write-back"),
]
OTHERS = [
    ("default, shared", FEW, "late prefetch and write-back"),
    ("full, batch", MANY, "late prefetch and write-back"),
    ("full, batch", FEW, "seed 0"),
    ("default, batch", FEW, "late write-back"),
    ("graphs", MANY, "late prefetch"),
    ("default, graphs", FEW, "late write-back"),
    ("quest, batch", MANY, "lazy"),
    ("h2o, graphs", FEW, "late compute"),
    ("shared, graphs", FEW, "seed 0"),
    ("continued, full", MANY, "late write-back"),
    ("default, forks", MANY, "late prefetch"),
    ("default, sessions", MANY, "late write-back"),
    ("prompts", MANY, "late prefetch"),
    ("default, eviction", MANY, "late write-back"),
    ("exact, batch", FEW, "late write-back"),
    ("exact, graphs", MANY, "seed 0"),
    ("default, rounded", FEW, "late prefetch"),
    ("rounded, full", MANY, "late write-back"),
    ("a window", FEW, "seed 1"),
    ("hybrid, sessions", MANY, "late prefetch"),
    ("latent, shared", FEW, "late prefetch"),
    ("latent, default, graphs", MANY, "seed 0"),
]
"""Additional cases that `make stress PART=cuda` runs."""

ALL = os.environ.get("OFFLOAD_RT_SCHEDULES") == "all"
RUNS = DAILY + (OTHERS if ALL else [])


def without_byte_counts(answers: list[list[int]], cell: Cell) -> list[list[int]]:
    counted = cell.scene.__name__ not in ("forked", "session", "stored")
    return [one[:-1] if counted else one for one in answers]


@pytest.mark.parametrize(("name", "memory", "schedule"), RUNS, ids=lambda x: str(x))
def test_copies_change_no_token(name: str, memory: int, schedule: str, tmp_path: Path) -> None:
    cell = BY_NAME[name]
    expected = without_byte_counts(cell.run("cpu", tmp_path), cell)
    with simulated(SCHEDULES[schedule]()):
        copied = replace(cell, settings=cell.settings | {"device_kv_memory": memory})
        assert without_byte_counts(copied.run("cuda", tmp_path), cell) == expected


LENGTHS = (100, 70)
DECODED = 3


def generate(memory: int | None, policy: str, options: dict[str, Any], **settings: Any) -> list[CompletionOutput]:
    model = tiny_model("llama", num_hidden_layers=LAYERS).to("cuda")
    llm = LLM(
        model, policy=policy, policy_options=options, host_memory="4MiB", missed_mass_every=0, device_kv_memory=memory,
        **settings,
    )  # fmt: skip
    params = SamplingParams(max_tokens=DECODED, temperature=0)
    done = completed(llm.generate([tiny_prompt(n, seed=n) for n in LENGTHS], params))
    llm.runner.check_integrity()
    assert llm.runner.transfer.device_bytes == (memory or 0)
    return done


@pytest.mark.parametrize(
    ("policy", "options"), [("full", {}), ("quest", POLICIES["quest"]), *([("infinigen", LOW_BITS)] if ALL else [])]
)
def test_kv_with_device_copies_is_not_transferred(policy: str, options: dict[str, Any]) -> None:
    with simulated(Lazy()):
        without, few, many = (generate(memory, policy, options) for memory in (None, FEW, MANY))
    for plain, mixed, copied in zip(without, few, many, strict=True):
        assert plain.token_ids == mixed.token_ids == copied.token_ids
        assert plain.stats.h2d_bytes_steps > 0 and plain.stats.device_kv_hit_rate is None
        assert copied.stats.h2d_bytes == 0 and copied.stats.device_kv_hit_rate == 1
        assert copied.stats.fetched_fraction == pytest.approx(0, abs=1e-15)  # a difference of fractions
        assert copied.stats.exact_fraction == plain.stats.exact_fraction
        assert copied.stats.d2h_bytes == plain.stats.d2h_bytes  # the pool stays complete
        rate = mixed.stats.device_kv_hit_rate
        assert rate is not None and mixed.stats.h2d_bytes == round(plain.stats.h2d_bytes * (1 - rate))
        assert mixed.stats.fetched_fraction <= plain.stats.fetched_fraction
    assert 0 < sum(one.stats.h2d_bytes for one in few) < sum(one.stats.h2d_bytes for one in without)


def test_cached_prefix_is_transferred_at_most_once_in_prefill() -> None:
    params, stem = SamplingParams(max_tokens=DECODED, temperature=0), tiny_prompt(128)
    # With memory for one request, the second request overwrites the copies of the first one.
    prompts = [stem + tiny_prompt(9, seed=1), tiny_prompt(137, seed=2), stem + tiny_prompt(9, seed=3)]
    runs = []
    with simulated(Lazy()):
        for memory in (None, 3 * BLOCK_BYTES, 6 * BLOCK_BYTES):
            model = tiny_model("llama", num_hidden_layers=LAYERS).to("cuda")
            llm = LLM(model, policy="full", host_memory="4MiB", device_kv_memory=memory)
            runs.append([completed(llm.generate([prompt], params))[0] for prompt in prompts])
            llm.runner.check_integrity()
    for run, transferred in zip(runs[1:], (2 * BLOCK_BYTES, 0), strict=True):
        assert [one.token_ids for one in runs[0]] == [one.token_ids for one in run]
        *others, last = run
        assert [one.stats.h2d_bytes for one in others] == [0, 0] and last.stats.reused_tokens == 128
        assert (last.stats.h2d_bytes, last.stats.h2d_bytes_steps) == (transferred, 0)


@pytest.mark.parametrize(("memory", "swaps"), [(FEW, True), (MANY, False), *([(MANY, True)] if ALL else [])])
def test_preempted_requests_continue_with_device_copies(memory: int, swaps: bool, tmp_path: Path) -> None:
    prompts = [tiny_prompt(94) + tiny_prompt(32, seed=seed) for seed in range(3)]

    def llm(device: str, blocks: int, **settings: Any) -> LLM:
        model = tiny_model("llama", num_hidden_layers=LAYERS).to(device)
        return LLM(model, policy="full", host_memory=blocks * BLOCK_BYTES, **settings)

    params = SamplingParams(max_tokens=8, temperature=0)
    expected = [done.token_ids for done in completed(llm("cpu", 40).generate(prompts, params))]
    with simulated(Late((1, 2))):
        # six blocks are too few for three answers
        runner = llm("cuda", 6, device_kv_memory=memory).runner
        swap = Swap(runner, tmp_path, StoreOptions()) if swaps else None
        engine = Engine(runner, max_num_seqs=4, swap=swap)
        requests = [engine.add(prompt, params) for prompt in prompts]
        while not engine.idle:
            if swap is not None:
                swap._write_seconds_per_byte = swap._read_seconds_per_byte = 0.0  # so fast that swapping is always used
            engine.step()
            runner.check_integrity()
        preemptions, restored = engine.scheduler.preemptions, engine.scheduler.restored
        assert preemptions > 0 and restored == (preemptions if swaps else 0)
        assert [one.token_ids for request in requests for one in request.completions()] == expected


def test_moved_entry_also_moves_in_the_device_copy() -> None:
    pool, streams = make_pool(4), (InlineStream(), InlineStream())
    transfer = CudaTransfer(pool, geometry(), torch.device("cpu"), streams=streams, device_blocks=2)
    blocks = pool.new_block_table(3 * BLOCK_SIZE)
    transfer.storage.open(blocks, 0, 1)
    for layer in range(2):
        transfer.storage.append(blocks, layer, 0, *kv(range(3 * BLOCK_SIZE - 1), layer))
        transfer.storage.move(blocks, layer, 150, 70)  # from the block without a copy
    pool.commit(blocks, 3 * BLOCK_SIZE - 1)
    transfer.check_integrity()
    pending = transfer.rows.fetch_range(blocks, 1, range(60, 140))
    assert pending.copied_tokens == 68 and pending.bytes == 12 * pool.token_bytes(1)
    k, v = read(pending.wait())
    want, _ = kv(range(60, 140), 1)
    want[:, 10] = kv(range(150, 151), 1)[0][:, 0]
    assert torch.equal(k, want) and torch.equal(v, -want - 0.5)
    transfer.storage.close(blocks)
    pool.release(blocks)


class NamedStream(InlineStream):
    """Stream that records each wait as (name of the waiting stream, name of the stream it waits for)."""

    def __init__(self, name: str, waits: list[tuple[str, str]]) -> None:
        self.name, self.waits = name, waits

    def record_event(self) -> Any:
        return self

    def synchronize(self) -> None:
        return

    def wait_for(self, event: Any) -> None:
        self.waits.append((self.name, event.name))


def test_loading_a_copy_waits_for_earlier_writes_and_blocks_later_ones() -> None:
    """The simulator cannot interleave loads and writes, so this test checks the recorded waits."""
    pool, waits = make_pool(4), list[tuple[str, str]]()
    streams = NamedStream("prefetch", waits), NamedStream("write-back", waits)
    transfer = CudaTransfer(pool, geometry(), torch.device("cpu"), streams=streams, device_blocks=2)
    blocks = pool.new_block_table(BLOCK_SIZE)
    append(pool, blocks, 20)
    transfer.storage.open(blocks, 0, 1)
    assert waits == [("prefetch", "write-back"), ("write-back", "prefetch")], "the slot is new to the block"
    transfer.storage.append(blocks, 0, 20, *(rows.expand(-1, 2, -1) for rows in kv(range(1), 0)))
    waits.clear()
    transfer.rows.fetch_range(blocks, 0, range(20)).wait()
    assert waits == [("prefetch", "write-back"), ("prefetch", "write-back"), ("write-back", "prefetch")]
    transfer.storage.close(blocks)
    pool.release(blocks)


def test_integrity_check_detects_damaged_copies() -> None:
    with simulated(Lazy()):
        model = tiny_model("llama", num_hidden_layers=LAYERS).to("cuda")
        runner = LLM(model, policy="full", host_memory="4MiB", device_kv_memory=MANY).runner
        sequence = runner.new_sequence(tiny_prompt(70), 71)
        runner.prefill(sequence, 70)
        runner.check_integrity()
        runner.transfer.storage._state.copies._planes[1, 1, 0, 69, 3] += 1
        with pytest.raises(AssertionError, match=r"layer 1: copies of the tokens range\(0, 70\) differ"):
            runner.check_integrity()
        runner.free(sequence)


def test_impossible_device_kv_memory_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    with pytest.raises(ConfigError, match="this device is a CPU"):
        LLM(model, device_kv_memory="1MiB")
    for other in ({"disk": tmp_path}, {"working_set": 9}):
        with pytest.raises(ConfigError, match=f"device_kv_memory cannot be combined with {next(iter(other))}"):
            EngineConfig(device_kv_memory="1MiB", **other)
    with simulated(Lazy()):
        with pytest.raises(ConfigError, match="holds no KV: the copy of one block takes 64 KiB"):
            LLM(model.to("cuda"), policy="full", host_memory="4MiB", device_kv_memory=BLOCK_BYTES - 1)
        with pytest.raises(ConfigError, match="all layers have sliding windows"):
            LLM(tiny_model("mistral").to("cuda"), policy="full", host_memory="4MiB", device_kv_memory="1MiB")
        with pytest.raises(MemoryLimitError, match=r"does not fit: .* of device memory are free"):
            LLM(model.to("cuda"), policy="full", host_memory="4GiB", device_kv_memory="4GiB")


def test_plan_includes_device_copies(tmp_path: Path) -> None:
    with simulated(Lazy()):
        shape = load_shape(tiny_checkpoint(tmp_path, "llama"), device="cuda", dtype="float32")
    plain, copied = (costs_for(EngineConfig(device_kv_memory=memory), shape) for memory in (None, "1MiB"))
    assert copied.total([100]) - plain.total([100]) == 1 << 20
    needed, more = (requirements(costs, 0, 100) for costs in (plain, copied))
    assert (needed.device_kv, more.device_kv, more.device - needed.device) == (0, 1 << 20, 1 << 20)
