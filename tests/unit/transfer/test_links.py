"""Test the CUDA copy path on a CPU, with synchronous streams: tokens and byte counts equal those of the CPU path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.outputs import completed
from support.pools import geometry as pool_geometry
from support.staged_transfer import staged
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.core import BLOCK_SIZE, Selection, VisibleTokens
from offload_rt.kv_cache.pool import HostPool
from offload_rt.outputs import CompletionOutput
from offload_rt.transfer.base import PendingFetch
from offload_rt.transfer.cpu import CpuTransfer
from offload_rt.transfer.cuda import CudaTransfer
from offload_rt.transfer.residency import Residency
from offload_rt.transfer.streams import InlineStream

POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("infinigen", {}),
    ("infinigen", {"preset": "paper"}),
    ("infinigen", {"sinks": 2, "recent": 8, "max_missed_mass": 0.05}),
    ("h2o", {"budget": 0.3}),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize(("policy", "options"), POLICIES)
def test_staged_kv_equals_kv_read_in_place(name: str, policy: str, options: dict[str, Any]) -> None:
    def run(prepare: bool) -> list[CompletionOutput]:
        llm = LLM(
            tiny_model(name, dtype=torch.float32),
            policy=policy,
            policy_options=options,
            host_memory="64MiB",
            dtype="float32",
        )
        prompts = [tiny_prompt(length, seed=length) for length in (1, 58, 123)]
        runs = staged(llm) if prepare else llm
        return completed(runs.generate(prompts, SamplingParams(max_tokens=10, temperature=0)))

    for staged_run, in_place in zip(run(True), run(False), strict=True):
        assert staged_run.token_ids == in_place.token_ids
        assert staged_run.stats.h2d_bytes == in_place.stats.h2d_bytes
        assert staged_run.stats.d2h_bytes == in_place.stats.d2h_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("policy", "options"), [("full", {}), ("infinigen", {"recent": 8}), ("infinigen", {"preset": "paper"})]
)
def test_staged_kv_equals_kv_read_in_place_with_eviction(policy: str, options: dict[str, Any]) -> None:
    """A dense layer is fetched before the newest token exists.

    A KV entry that leaves the window must therefore already be in its new slot.
    """

    def run(prepare: bool) -> list[int]:
        model = tiny_model("llama", dtype=torch.float32)
        block = 2 * 3 * 2 * 32 * 64 * 4
        llm = LLM(model, policy=policy, policy_options=options, host_memory=2 * block, dtype="float32", eviction="lru")
        ready = staged(llm) if prepare else llm
        [done] = completed(ready.generate([tiny_prompt(110)], SamplingParams(max_tokens=60, temperature=0)))
        return done.token_ids

    assert run(True) == run(False)


def test_fork_loads_sinks_and_window_from_the_pool() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    tokens = tiny_prompt(90)
    options = {"sinks": 3, "recent": 16}

    def scores(prepare: bool) -> list[list[float]]:
        llm = LLM(model, policy_options=options, host_memory="8MiB", dtype="float32")
        ready = staged(llm) if prepare else llm
        # equal prompts are prefilled once, and the second sequence is a fork
        return [s.logprobs for s in ready.score([tokens[:70]] * 2, [tokens[70:], tokens[75:]])]

    assert scores(True) == [pytest.approx(row, abs=1e-9) for row in scores(False)]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int2"])
def test_fetch_reads_blocks_allocated_since_the_previous_fetch(device: torch.device, kv_cache_dtype: Any) -> None:
    geometry, cuda = tiny_llama_geometry(), device.type == "cuda"
    pool = HostPool(
        geometry, torch.float32, 1 << 21, kv_cache_dtype=kv_cache_dtype, pin=cuda, slab_tokens=2 * BLOCK_SIZE
    )
    transfer = CudaTransfer(pool, geometry, device, streams=None if cuda else (InlineStream(), InlineStream()))
    block_tables = [pool.new_block_table(BLOCK_SIZE), pool.new_block_table(BLOCK_SIZE)]
    for blocks in block_tables:
        transfer.storage.open(blocks, 0, 1)
    rows = torch.randn(2, len(block_tables), geometry.kv_heads, 3 * BLOCK_SIZE, geometry.head_dim, device=device)
    for stop in range(BLOCK_SIZE, 3 * BLOCK_SIZE + 1, BLOCK_SIZE):
        for b, blocks in enumerate(block_tables):
            pool.reserve(blocks, stop)
            k, v = rows[:, b, :, stop - BLOCK_SIZE : stop]
            transfer.storage.append(blocks, 1, stop - BLOCK_SIZE, k, v)
            tokens = torch.stack([torch.randperm(stop - 1)[:40] for _ in range(geometry.kv_heads)]).to(device)
            pending = transfer.rows.fetch_more(blocks, 1, Selection(tokens))
            (part,) = pending.wait()
            want = pool.format.decode(pool.format.encode(rows[:, b])).gather(
                2, tokens[None, :, :, None].expand(2, -1, -1, geometry.head_dim)
            )
            assert torch.equal(torch.stack((part.k, part.v)), want)
            assert pending.bytes == 2 * tokens.numel() * pool.layout.row_bytes
    for blocks in block_tables:
        transfer.storage.close(blocks)
        pool.release(blocks)
    transfer.check_integrity()
    assert transfer.device_bytes == 0
    pool.check_integrity()


class RecordingStream(InlineStream):
    """Stream that records each wait as (name of the waiting stream, event)."""

    def __init__(self, name: str, waits: list[tuple[str, Any]]) -> None:
        self.name, self.waits, self.newest = name, waits, None

    def record_event(self) -> Any:
        self.newest = super().record_event()
        return self.newest

    def wait_for(self, event: Any) -> None:
        self.waits.append((self.name, event))

    def hold_compute(self, event: Any, *tensors: torch.Tensor) -> None:
        self.waits.append(("compute", event))


def test_fetch_waits_for_write_back_and_compute_waits_for_fetch() -> None:
    waits: list[tuple[str, Any]] = []
    prefetch, write_back = RecordingStream("prefetch", waits), RecordingStream("write-back", waits)
    geometry = tiny_llama_geometry()
    pool = HostPool(geometry, torch.float32, 1 << 21)
    transfer = CudaTransfer(pool, geometry, torch.device("cpu"), streams=(prefetch, write_back))
    blocks = pool.new_block_table(BLOCK_SIZE)
    transfer.storage.open(blocks, 2, 4)
    rows = torch.randn(2, geometry.kv_heads, 40, geometry.head_dim)
    visible = VisibleTokens.of(40, sinks=2, recent=4, window=None)
    some = Selection(torch.arange(5, 15).expand(geometry.kv_heads, -1))
    fetches: list[Callable[[], PendingFetch]] = [
        lambda: transfer.rows.fetch(blocks, 1, visible, None),
        lambda: transfer.rows.fetch(blocks, 1, visible, some),
        lambda: transfer.rows.fetch_range(blocks, 1, range(20)),
        lambda: transfer.rows.fetch_more(blocks, 1, some),
        lambda: transfer.rows.fetch_together([blocks], 1, [visible], [some])[0],
    ]
    for fetch in fetches:
        transfer.storage.append(blocks, 1, 0, *rows)
        written = write_back.newest
        waits.clear()
        pending = fetch()
        assert ("prefetch", written) in waits
        arrived = prefetch.newest
        waits.clear()
        pending.wait()
        assert waits == [("compute", arrived)]
    transfer.storage.close(blocks)
    pool.release(blocks)


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("recent", [1, 4, 7])
@pytest.mark.parametrize("step", [1, 5, 20])
def test_residency_holds_exactly_the_resident_kv(sinks: int, recent: int, step: int) -> None:
    geometry = tiny_llama_geometry()
    residency = Residency(geometry, torch.float32, torch.device("cpu"), sinks, recent)
    for start in range(0, 40, step):
        rows = torch.arange(start, min(40, start + step), dtype=torch.float32)[None, :, None].expand(2, -1, 32)
        residency.store(1, start, rows, -rows)
        length = start + rows.shape[1]
        visible = VisibleTokens.of(length, sinks=sinks, recent=recent, window=None)
        parts = residency.part(1, visible)
        keys = torch.cat([part.k for part in parts], dim=1)
        assert keys[0, :, 0].tolist() == [*visible.sinks, *visible.recent]
        assert torch.equal(torch.cat([part.v for part in parts], dim=1), -keys)


def tiny_llama_geometry() -> Any:
    return LLM(tiny_model("llama"), policy="full", host_memory="1MiB").geometry


def test_dense_fetches_of_two_fragmented_sequences_are_independent() -> None:
    # slabs of two blocks split the KV of each sequence into several runs
    shape = pool_geometry(head_dim=32)
    pool = HostPool(shape, torch.float32, 1 << 22, slab_tokens=2 * BLOCK_SIZE)
    transfer, tables, written = CpuTransfer(pool, shape), [pool.new_block_table(1) for _ in range(2)], []
    for sequence, blocks in enumerate(tables):
        transfer.storage.open(blocks, 0, 1)
        written.append(torch.randn(2, 2, 4 * BLOCK_SIZE, 32) + 100 * sequence)
    for start in range(0, 4 * BLOCK_SIZE, BLOCK_SIZE):
        for blocks, (k, v) in zip(tables, written, strict=True):
            pool.reserve(blocks, start + BLOCK_SIZE)
            pool.write(blocks, 0, start, k[:, start : start + BLOCK_SIZE], v[:, start : start + BLOCK_SIZE])
            pool.commit(blocks, start + BLOCK_SIZE)
    visible = VisibleTokens.of(4 * BLOCK_SIZE, sinks=0, recent=1, window=None)
    fetches = [
        transfer.rows.fetch(tables[0], 0, visible, None),
        transfer.rows.fetch_range(tables[1], 0, range(4 * BLOCK_SIZE)),
    ]
    parts = [part for fetch in fetches for part in fetch.wait()]
    assert all(len(pool.runs(blocks, 0, range(4 * BLOCK_SIZE))) > 1 for blocks in tables), "the tables are fragmented"
    for read in (parts, [run for part in parts for run in part.runs]):
        sides = zip(*[(part.k, part.v) for part in read], strict=True)
        assert torch.stack([torch.cat(side, 1) for side in sides]).equal(torch.cat(written, 2))
    assert transfer.rows.nbytes == 0, "a whole context is not gathered"
