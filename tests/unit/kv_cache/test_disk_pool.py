"""Test contexts on disk.

All policies give the same tokens as in memory. Disk errors are reported, and earlier KV stays readable.
"""

from __future__ import annotations

import errno
import os
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.disk_arena import LAYOUT, WIDTH, arena
from support.pools import peak_of
from support.tiny_models import tiny_checkpoint, tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, SamplingParams
from offload_rt.cli import main
from offload_rt.cli.tables import stats_table
from offload_rt.core import BLOCK_SIZE
from offload_rt.engine import build
from offload_rt.errors import DiskError, MemoryLimitError, PoolFullError
from offload_rt.kernels.causal import attend_causal
from offload_rt.kernels.causal_blocks import BlockedAttention
from offload_rt.kv_cache.disk import direct_file
from offload_rt.kv_cache.disk.file_layout import LARGEST_FILE, disk_limit
from offload_rt.kv_cache.disk.requests import Requests, ThreadReader
from offload_rt.kv_cache.pool import HostPool
from offload_rt.model_runner import prefill as prefill_module
from offload_rt.model_runner.prefill import Prefill

MODEL = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2)
MODEL_IN_FLOAT64 = tiny_model("llama", dtype=torch.float64, num_hidden_layers=2, head_dim=16)
LIMITS: dict[str, Any] = {"host_memory": "128KiB", "disk_limit": "1MiB"}
"""Host memory for a quarter of the context's KV. Buffers use most of this memory, so few KV entries are cached."""

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [tiny_prompt(300, seed=1), tiny_prompt(260, seed=2)]


def generate_tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params)]


def make_llm(folder: Path | None, **named: Any) -> LLM:
    limits = {} if folder is None else {"disk": folder, **LIMITS}
    options = {"dtype": "float32", **limits, **named}
    return LLM(MODEL if options["dtype"] == "float32" else MODEL_IN_FLOAT64, **options)


# ----------------------------------------------------------------------------------------------------------- runtime

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "infinigen": {"policy_options": {"preset": "rows", "recent": 8, "budget": 0.2}},
    "infinigen, int4 rows": {"policy_options": {"recent": 8, "budget": 0.2}, "kv_cache_dtype": "int4"},
    "infinigen, tail": {"policy_options": {"recent": 8, "approximate_kv": "int4", "budget": 0.2}},
    "infinigen, missed mass": {"policy_options": {"recent": 8, "max_missed_mass": 0.2}},
    "oracle": {"policy": "oracle", "policy_options": {"budget": 0.2, "recent": 8}},
    "streaming": {"policy": "streaming", "policy_options": {"budget": 0.2}},
    "quest": {"policy": "quest", "policy_options": {"budget": 0.2, "recent": 8}},
    "h2o": {"policy": "h2o", "policy_options": {"budget": 0.2, "recent": 8}},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_context_larger_than_host_memory_gives_the_same_tokens(policy: str, tmp_path: Path) -> None:
    tokens = []
    for folder in (None, tmp_path):
        with make_llm(folder, **POLICIES[policy]) as llm:
            peak = peak_of(llm.runner.pool)
            tokens.append(generate_tokens(llm, PROMPTS))
            if folder is not None:
                file = llm.runner.pool.file
                assert file is not None
                if llm.runner.pool.format.exact:
                    assert 8 * file.budget.slots < peak() // file.file_layout.entry_bytes
                assert file.use.bytes_read > 0 and list(tmp_path.iterdir()) == []
                llm.runner.check_integrity()
    assert tokens[0] == tokens[1]


def test_statistics_count_bytes_read_from_disk(tmp_path: Path) -> None:
    with make_llm(tmp_path, **POLICIES["infinigen"]) as llm:
        for _ in range(2):
            list(llm.stream(PROMPTS[0], GREEDY))
            stats = llm.last_stats
            assert stats is not None and stats.kv_bytes_disk > 3 * stats.kv_bytes_host > 0
            assert stats.disk_bytes_read > 0 and stats.disk_hit_rate is not None and 0 < stats.disk_hit_rate < 1
        file = llm.runner.pool.file
        assert file is not None and stats.disk_bytes_read < file.use.bytes_read, "only the second run is counted"
        table = "".join(str(row) for row in stats_table(stats).columns[0]._cells)
        assert "KV on disk" in table and "selected KV entries in host memory" in table


def test_sliding_layers_and_forks_on_disk_give_the_same_tokens(tmp_path: Path) -> None:
    model = tiny_model("mistral", dtype=torch.float32, num_hidden_layers=2, sliding_window=24)
    several = SamplingParams(max_tokens=6, temperature=0.8, seed=3, n=3)
    tokens = []
    for limits in ({}, {"disk": tmp_path, **LIMITS}):
        with LLM(model, dtype="float32", **limits) as llm:
            tokens.append([[one.token_ids for one in each.outputs] for each in llm.generate([PROMPTS[0]], several)])
            llm.runner.check_integrity()
    assert tokens[0] == tokens[1]


def test_eviction_on_disk_gives_the_same_tokens(tmp_path: Path) -> None:
    tokens = []
    # The pool holds the prompt and 20 more tokens.
    size = 5 * LLM(MODEL, dtype="float32").runner.pool.block_bytes
    long = SamplingParams(max_tokens=34, temperature=0, ignore_eos=True)
    options = POLICIES["infinigen"]
    for limits in ({"host_memory": size}, {"disk": tmp_path, "host_memory": "128KiB", "disk_limit": size}):
        with LLM(MODEL, dtype="float32", eviction="counter", **limits, **options) as llm:
            tokens.append(generate_tokens(llm, PROMPTS[:1], long))
            llm.runner.check_integrity()
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_over_blocks_equals_causal_attention(softcap: float | None, with_sinks: bool) -> None:
    torch.manual_seed(0)
    q, (k, v) = torch.randn(6, 7, 16, dtype=torch.float32), torch.randn(2, 2, 50, 16, dtype=torch.float32)
    sinks = torch.randn(6, dtype=torch.float32) if with_sinks else None
    attention = BlockedAttention(q, 2, 0.3, softcap)
    for first, stop in ((20, 40), (0, 20)):
        attention.add(k[:, first:stop], v[:, first:stop])
    attention.add_causal(k[:, 40:], v[:, 40:])
    torch.testing.assert_close(attention.result(sinks), attend_causal(q, k, v, 0.3, None, softcap, sinks))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("policy", "dtype", "bound"),
    [
        ("full", "float64", 1e-9),
        ("infinigen, tail", "float64", 1e-9),
        ("infinigen, tail", "float32", 1e-5),
        ("quest", "float64", 1e-9),
    ],
)
def test_prefill_in_segments_equals_prefill_in_memory(
    policy: str, dtype: str, bound: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second prompt shares its first blocks with the first one.
    monkeypatch.setitem(prefill_module.SEGMENT_BYTES, "cpu", 1)
    prompts = [PROMPTS[0], PROMPTS[0][:200] + PROMPTS[1][:61]]
    tokens, logprobs, segment_starts = [], [], []
    real = Prefill._begin_segment
    monkeypatch.setattr(
        Prefill, "_begin_segment", lambda self, start: segment_starts.append(start) or real(self, start)
    )
    for folder in (None, tmp_path):
        segment_starts.clear()
        with make_llm(folder, prefill_chunk_size=32, dtype=dtype, **POLICIES[policy]) as llm:
            tokens.append([generate_tokens(llm, [prompt]) for prompt in prompts])
            [output] = llm.generate([PROMPTS[1]], SamplingParams(max_tokens=1, prompt_logprobs=0))
            logprobs.append(
                [each[token].logprob for token, each in zip(PROMPTS[1], output.prompt_logprobs, strict=True) if each]
            )
            llm.runner.check_integrity()
    assert tokens[0] == tokens[1]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=bound) and len(logprobs[0]) == len(PROMPTS[1]) - 1
    assert segment_starts[:10] == list(range(0, 300, 32)) and segment_starts[10] == 192, (
        "ten segments, then a shared prefix"
    )


# ------------------------------------------------------------------------------------------------------------ faults


class FailingReader(ThreadReader):
    """Reader whose reads fail after the first `at` reads."""

    def __init__(self, at: int, code: int = errno.EIO) -> None:
        super().__init__()
        self.at, self.code = at, code

    def read(self, files: Any, requests: Requests, buffer: memoryview, copies: Any = None) -> None:
        self.at -= 1
        if self.at < 0:
            raise OSError(self.code, os.strerror(self.code))
        super().read(files, requests, buffer, copies)


def test_failed_read_ends_the_request_and_not_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = FailingReader(10)
    monkeypatch.setattr(direct_file, "reader", lambda: failing)
    with make_llm(tmp_path, **POLICIES["infinigen"]) as llm:
        with pytest.raises(DiskError, match="cannot read KV"):
            llm.generate(PROMPTS, GREEDY)
        failing.at = 1 << 30
        llm.runner.check_integrity()
        again = generate_tokens(llm, PROMPTS)
        llm.runner.check_integrity()
    assert again == generate_tokens(make_llm(None, **POLICIES["infinigen"]), PROMPTS)


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left"), MemoryError("No space left")])
def test_kv_that_could_not_be_written_is_never_read(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_arena = arena(tmp_path)
    rows = torch.randn(2, LAYOUT.kv_heads, 128, LAYOUT.head_dim)
    file_arena.fill(0, 0, 0, *rows)
    file_arena._writer.drain()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *args: (_ for _ in ()).throw(fault))
        file_arena.fill(0, 0, 64, *rows[:, :, :64])
        file_arena._writer.drain()
    names = file_arena.file_layout.entry_ids(0, np.array([0, 1]), np.array([3, 3]), np.array([0, 1]))
    with pytest.raises(DiskError, match="No space left"):
        file_arena.gather(0, names, torch.empty(2, WIDTH), np.arange(2))
    with pytest.raises(DiskError, match="No space left"):
        file_arena.view(0, 0, 64, 64)
    assert torch.equal(file_arena.view(0, 0, 0, 64).k, rows[0, :, :64]), "earlier KV is still there"
    assert file_arena.lost == {1}
    file_arena.fill(0, 0, 64, *rows[:, :, :64])
    assert torch.equal(file_arena.view(0, 0, 64, 64).v, rows[1, :, :64]) and not file_arena.lost


def test_failed_write_does_not_affect_the_next_owner_of_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous owner's write may fail after the block was freed."""
    file_arena, released = arena(tmp_path, 2_000_000), threading.Event()
    rows = torch.randn(2, LAYOUT.kv_heads, 128, LAYOUT.head_dim)
    for late in (False, True):
        with monkeypatch.context() as patch:
            released.clear() if late else released.set()
            patch.setattr(os, "pwrite", lambda *args: released.wait(60) and os.close(1 << 20))
            file_arena.fill(0, 0, 64, *rows[:, :, :64])
            if not late:
                file_arena._writer.drain()
                assert file_arena.lost == {1}
            file_arena.discard([1])
            released.set()
            file_arena._writer.drain()
        assert not file_arena.lost
        for place in range(LAYOUT.layers):
            file_arena.fill(0, place, 64, *rows[:, :, :1])
        assert torch.equal(file_arena.view(0, 0, 64, 1).k, rows[0, :, :1])
        file_arena.check_integrity()
        file_arena.discard([1])


def test_full_disk_is_an_error_and_later_requests_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate
    monkeypatch.setattr(build, "HostPool", partial(HostPool, slab_tokens=2 * BLOCK_SIZE))

    def allocate(file: int, offset: int, size: int) -> None:
        if offset:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, offset, size)

    with make_llm(tmp_path, policy="full") as llm:
        short = generate_tokens(llm, [PROMPTS[0][:90]])
        monkeypatch.setattr(os, "posix_fallocate", allocate)
        with pytest.raises(PoolFullError, match="cannot allocate"):
            llm.generate([tiny_prompt(900, seed=9)], GREEDY)
        assert generate_tokens(llm, [PROMPTS[0][:90]]) == short
        llm.runner.check_integrity()


def test_info_plans_a_context_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_checkpoint(tmp_path / "model", "llama", max_position_embeddings=1 << 20)
    flags = ["--host-memory", "64MiB", "--disk", str(tmp_path / "rows"), "--disk-limit", "1GiB"]
    assert main(["info", model, "--context", "400000", *flags]) == 0
    output = capsys.readouterr().out
    assert (
        "disk: KV of the context" in output
        and "host: KV cache of the disk" in output
        and "It fits in memory." in output
    )
    assert main(["info", model, "--context", "1000000", *flags]) == 0
    assert "raise --disk-limit" in capsys.readouterr().out and not (tmp_path / "rows").exists()


def test_invalid_combinations_of_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="disk_limit"):
        make_llm(None, disk_limit="1GiB")
    with pytest.raises(ConfigError, match="working_set"):
        make_llm(tmp_path, working_set=8)
    with pytest.raises(MemoryLimitError, match="raise host_memory"):
        make_llm(tmp_path, host_memory="100KiB")
    with pytest.raises(MemoryLimitError, match="has free"):
        make_llm(tmp_path, disk_limit="900TiB")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot store KV"):
        make_llm(tmp_path / "file")


def test_file_is_at_most_as_large_as_its_positions_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = SimpleNamespace(f_bavail=1 << 60, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: space)
    assert disk_limit(tmp_path, None, 1 << 50) == LARGEST_FILE
    with pytest.raises(MemoryLimitError, match="the largest KV file"):
        disk_limit(tmp_path, LARGEST_FILE + 1, 1 << 30)


def test_limited_host_memory_returns_freed_memory_after_each_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[None]()
    monkeypatch.setattr("offload_rt.engine.runner.give_back", lambda: calls.append(None))
    generate_tokens(make_llm(None), PROMPTS)
    assert not calls
    generate_tokens(make_llm(tmp_path), PROMPTS)
    assert len(calls) == len(PROMPTS)
