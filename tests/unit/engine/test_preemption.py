"""Test that preempted requests generate the same tokens as if they had not been preempted.

KV and recurrent state are restored from disk, or recomputed if that is faster or the disk fails.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import architecture
from support.outputs import completed
from support.sharing import greedy, make_llm
from support.tiny_models import tiny_prompt

from offload_rt import LLM, EngineError, SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.engine.engine import Engine
from offload_rt.engine.request import Request
from offload_rt.engine.scheduler import Scheduler
from offload_rt.engine.snapshot_keeper import SnapshotKeeper
from offload_rt.engine.swap import FOLDER, Swap
from offload_rt.model_runner.sequence import Sequence
from offload_rt.storage import saver
from offload_rt.storage.options import StoreOptions

PROMPTS = [tiny_prompt(BLOCK_SIZE + 30) + tiny_prompt(28, seed=i) for i in range(3)]
PARAMS = [greedy(20), SamplingParams(max_tokens=16, seed=3), greedy(14)]


def small_pool(folder: Path, *, fast_disk: bool = True, limit: int | None = None, **options: Any) -> tuple[LLM, Swap]:
    """Return a runtime and a swap folder. The pool has room for all prompts, but not for all answers."""
    llm = make_llm(**({"blocks": 6} | options))
    swap = Swap(llm.runner, folder, StoreOptions(limit=limit))
    swap._write_seconds_per_byte = swap._read_seconds_per_byte = 0.0 if fast_disk else 1e9
    return llm, swap


def generate_with_preemption(
    llm: LLM, swap: Swap, params: list[SamplingParams] = PARAMS
) -> tuple[list[list[int]], Scheduler]:
    engine = Engine(llm.runner, max_num_seqs=4, swap=swap)
    requests = [engine.add(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    rates = swap._write_seconds_per_byte, swap._read_seconds_per_byte
    seen = 0
    while not engine.idle:
        engine.step()
        if seen != (seen := engine.scheduler.preemptions + engine.scheduler.restored):
            engine.check_integrity()
            swap._disk.check_integrity()
        swap._write_seconds_per_byte, swap._read_seconds_per_byte = rates
    assert engine.scheduler.preemptions > 0
    assert llm.runner.pool.sequence_bytes == 0 and swap.bytes_used == 0, "all memory is freed"
    return [c.token_ids for one in requests for c in one.completions()], engine.scheduler


def expected_tokens(**options: Any) -> list[list[int]]:
    if (key := str(options)) not in EXPECTED_TOKENS:
        llm = make_llm(enable_prefix_caching=False, **options)
        each = zip(PROMPTS, PARAMS, strict=True)
        EXPECTED_TOKENS[key] = [
            done.token_ids for prompt, params in each for done in completed(llm.generate([prompt], params))
        ]
    return EXPECTED_TOKENS[key]


EXPECTED_TOKENS: dict[str, list[list[int]]] = {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("policy", "options", "staged"),
    [
        ("full", {}, False),
        ("infinigen", {"recent": 8, "sinks": 2}, True),
        ("infinigen", {"preset": "rows", "scorer": "int4", "recent": 16, "max_missed_mass": 0.05}, False),
        ("infinigen", {"approximate_kv": "int2", "recent": 16, "budget": 0.3}, True),
        ("quest", {"budget": 0.4, "recent": 16}, False),
    ],
    ids=["full in place", "infinigen staged", "int4 in place", "tail staged", "quest in place"],
)
def test_restored_requests_continue_unchanged(
    tmp_path: Path, policy: str, options: dict[str, Any], staged: bool
) -> None:
    llm, swap = small_pool(tmp_path, policy=policy, policy_options=options, staged=staged)
    tokens, scheduler = generate_with_preemption(llm, swap)
    assert tokens == expected_tokens(policy=policy, policy_options=options)
    assert scheduler.restored == scheduler.preemptions


def test_blocks_larger_than_the_write_buffer_are_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "WRITE_BUFFER", 1)
    llm, swap = small_pool(tmp_path, policy="full")
    tokens, scheduler = generate_with_preemption(llm, swap)
    assert tokens == expected_tokens(policy="full") and scheduler.restored == scheduler.preemptions


@pytest.mark.parametrize("policy", ["full", "infinigen"])
def test_kv_that_is_cheaper_to_recompute_is_not_written(tmp_path: Path, policy: str) -> None:
    llm, swap = small_pool(tmp_path, fast_disk=False, policy=policy)
    tokens, scheduler = generate_with_preemption(llm, swap)
    assert tokens == expected_tokens(policy=policy) and scheduler.restored == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("policy", "kv_cache_dtype"), [("full", "int8"), ("infinigen", "int4")])
def test_quantised_kv_is_recomputed(tmp_path: Path, policy: str, kv_cache_dtype: str) -> None:
    memory = 5 * make_llm(policy=policy, kv_cache_dtype=kv_cache_dtype).runner.pool.block_bytes
    llm, swap = small_pool(tmp_path, policy=policy, kv_cache_dtype=kv_cache_dtype, host_memory=memory)
    tokens, scheduler = generate_with_preemption(llm, swap)
    assert tokens == expected_tokens(policy=policy, kv_cache_dtype=kv_cache_dtype) and scheduler.restored == 0


def test_a_state_that_depends_on_queries_is_recomputed(tmp_path: Path) -> None:
    llm, swap = small_pool(tmp_path, policy="h2o")
    runner = llm.runner
    sequence = runner.new_sequence([*PROMPTS[0], 5], len(PROMPTS[0]) + 1)
    runner.prefill(sequence, len(PROMPTS[0]))
    runner.decode([sequence])
    assert swap.swap_out(sequence, 1) is None and swap.bytes_used == 0
    runner.free(sequence)


def test_a_damaged_file_leads_to_recomputation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, swap = small_pool(tmp_path)
    swap_in = swap.swap_in

    def damage_and_swap_in(*args: Any, **options: Any) -> Any:
        for block in swap._disk._blocks.values():
            byte = os.pread(swap._disk.handle, 1, block.offset + 9)[0] ^ 1
            os.pwrite(swap._disk.handle, bytes([byte]), block.offset + 9)
        return swap_in(*args, **options)

    monkeypatch.setattr(swap, "swap_in", damage_and_swap_in)
    tokens, scheduler = generate_with_preemption(llm, swap)
    assert tokens == expected_tokens() and scheduler.restored == 0


def test_a_full_disk_leads_to_recomputation(tmp_path: Path) -> None:
    llm, swap = small_pool(tmp_path, limit=2 * make_llm().runner.pool.block_bytes - 1)
    tokens, scheduler = generate_with_preemption(llm, swap)
    assert tokens == expected_tokens() and scheduler.restored < scheduler.preemptions


def test_a_failed_snapshot_leaves_nothing_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap, sequence = swap_and_hybrid_sequence(tmp_path)

    def copy(*_: Any) -> None:
        raise RuntimeError("copy failed")

    monkeypatch.setattr(SnapshotKeeper, "copy", copy)
    with pytest.raises(RuntimeError, match="copy failed"):
        swap.swap_out(sequence, 1)
    assert not swap._users and swap.bytes_used == 0


def swap_and_hybrid_sequence(folder: Path) -> tuple[Swap, Sequence]:
    runner = LLM(architecture("qwen3_5"), policy="full", host_memory="8MiB", verify="off").runner
    swap = Swap(runner, folder)
    swap._write_seconds_per_byte = swap._read_seconds_per_byte = 0.0
    sequence = runner.new_sequence([*range(1, 81), 5], 81)
    runner.prefill(sequence, 80)
    return swap, sequence


def test_nothing_is_written_without_a_free_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap, sequence = swap_and_hybrid_sequence(tmp_path)

    def save(*_: Any) -> int:
        raise AssertionError("KV is written")

    monkeypatch.setattr(SnapshotKeeper, "copy", lambda *_: None)
    monkeypatch.setattr(swap._saver, "save", save)
    assert swap.swap_out(sequence, 1) is None
    assert not swap._users and swap.bytes_used == 0


def test_a_failed_write_frees_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap, sequence = swap_and_hybrid_sequence(tmp_path)
    own = swap._saver.flush

    def flush() -> None:
        own()
        raise RuntimeError("write failed")

    monkeypatch.setattr(swap._saver, "flush", flush)
    with pytest.raises(RuntimeError, match="write failed"):
        swap.swap_out(sequence, 1)
    assert not swap._users and swap.bytes_used == 0
    table = swap._runner.pool.cached.snapshots
    assert table is not None and not table._pending - {*sequence.snapshots.values()}


def test_a_preempted_request_that_fails_leaves_nothing_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, swap = small_pool(tmp_path)
    engine = Engine(llm.runner, max_num_seqs=4, swap=swap)
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.add(prompt, params)
    swapped: list[Any] = []
    own = swap.swap_out

    def swap_out(*args: Any) -> Any:
        swapped.append(own(*args))
        return swapped[-1]

    def restart(self: Scheduler, request: Request) -> bool:
        self.fail(request, RuntimeError("not freed"))
        return False

    monkeypatch.setattr(swap, "swap_out", swap_out)
    monkeypatch.setattr(Scheduler, "restart", restart)
    while not engine.idle:
        with contextlib.suppress(EngineError):  # raised for failed requests
            engine.step()
    assert any(swapped) and not swap._users and swap.bytes_used == 0


def test_a_shared_prompt_is_stored_once(tmp_path: Path) -> None:
    llm, swap = small_pool(tmp_path)
    runner = llm.runner
    sequences = []
    for prompt in PROMPTS[:2]:
        sequences.append(runner.new_sequence(prompt, len(prompt) + 1, reuse=len(prompt)))
        runner.prefill(sequences[-1], len(prompt))
        sequences[-1].tokens.append(5)
        runner.decode(sequences[-1:])
    swapped = []
    for sequence in sequences:
        # The first write is measured; a busy disk must not change the second decision.
        swap._write_seconds_per_byte = 0.0
        swapped.append(swap.swap_out(sequence, 1))
    assert None not in swapped and len(swap._disk._blocks) == 1 + 2
    for one, files in zip(swapped, (2, 0), strict=True):
        assert one is not None
        swap.discard(one)
        assert len(swap._disk._blocks) == files
    for sequence in sequences:
        runner.free(sequence)


def test_swap_files_are_unnamed_and_files_of_the_user_are_kept(tmp_path: Path) -> None:
    """The operating system deletes an unnamed file when the process ends."""
    (tmp_path / "notes.kv").write_text("the user's own")
    llm, swap = small_pool(tmp_path)
    engine = Engine(llm.runner, max_num_seqs=4, swap=swap)
    requests = [engine.add(prompt, p) for prompt, p in zip(PROMPTS, PARAMS, strict=True)]
    while not swap.bytes_used:
        engine.step()
    assert os.fstat(swap._disk.handle).st_size > 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "notes.kv"]
    for one in requests:
        engine.cancel(one)
    assert swap.bytes_used == 0 and llm.runner.pool.sequence_bytes == 0 and os.fstat(swap._disk.handle).st_size == 0
    swap.close()


def test_generate_uses_the_given_swap_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Swap, "_recompute_seconds", lambda self, sequence, batch: math.inf)
    swapped = []
    monkeypatch.setattr(Swap, "swap_in", lambda self, one, *args, **named: swapped.append(one))
    llm = make_llm(blocks=6, swap=tmp_path)
    assert [c.token_ids for c in completed(llm.generate(PROMPTS, PARAMS))] == expected_tokens()
    assert swapped


def test_policies_of_one_model_have_separate_swap_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Swap, "_recompute_seconds", lambda self, sequence, batch: math.inf)
    first = make_llm(blocks=6, swap=tmp_path)
    for _ in range(2):
        second = first.under("infinigen", {"recent": 200})
        for llm in (second, first):
            assert [c.token_ids for c in completed(llm.generate(PROMPTS, PARAMS))] == expected_tokens()
        second.close()
        del second, llm
    assert sorted(path.name for path in tmp_path.iterdir()) == [FOLDER, "under-1"]


def test_the_youngest_request_is_preempted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preempt, choices = Scheduler.preempt, []

    def record(self: Scheduler, request: Request) -> None:
        if self.prefilling is None:
            choices.append([one is request for one in self.running])
        preempt(self, request)

    monkeypatch.setattr(Scheduler, "preempt", record)
    generate_with_preemption(*small_pool(tmp_path))
    assert any(len(choice) > 1 for choice in choices), "at least one choice was between several requests"
    assert all(choice[-1] for choice in choices)


def test_decoded_kv_is_not_shared_between_sequences(tmp_path: Path) -> None:
    """Decoded KV depends on which tokens the policy selected for the sequence."""
    llm, swap = small_pool(tmp_path, blocks=12, policy="infinigen", policy_options={"recent": 8, "sinks": 2})
    sequence = llm.runner.new_sequence(PROMPTS[0], len(PROMPTS[0]) + BLOCK_SIZE)
    llm.runner.prefill(sequence, len(PROMPTS[0]))
    for token in tiny_prompt(BLOCK_SIZE, seed=9):
        sequence.tokens.append(token)
        llm.runner.decode([sequence])
    first, second = swap._describe(sequence).names, swap._describe(sequence).names
    alike = [one.key == other.key for one, other in zip(first, second, strict=True)]
    assert alike == [True, False, False], "only the first block has no decoded tokens"
    llm.runner.free(sequence)


@pytest.mark.parametrize("position", [BLOCK_SIZE + 10, BLOCK_SIZE + 11, BLOCK_SIZE + 12])
def test_restoring_skips_blocks_outside_the_window(tmp_path: Path, position: int) -> None:
    """The block table keeps a block for one more step after the block has left the window."""
    model = architecture("gemma3", dtype=torch.float32)
    with LLM(
        model, policy="full", dtype="float32", host_memory="4MiB", verify="off", enable_prefix_caching=False
    ) as llm:
        assert llm.runner.pool.groups.window == 12
        swap = Swap(llm.runner, tmp_path)
        swap._write_seconds_per_byte = swap._read_seconds_per_byte = 0.0
        tokens = [token % 90 + 1 for token in tiny_prompt(position)]
        sequence = llm.runner.new_sequence(tokens, BLOCK_SIZE * 3)
        llm.runner.prefill(sequence, BLOCK_SIZE + 8)
        sequence.tokens = tokens
        while sequence.position < position:
            llm.runner.reserve(sequence)
            llm.runner.decode([sequence])
        swapped = swap.swap_out(sequence, 1)
        llm.runner.free(sequence)
        assert swapped is not None
        restored = swap.swap_in(swapped, [*tokens, 5])
        assert restored is not None and restored.position == position
        llm.runner.free(restored)
        swap.discard(swapped)
        assert llm.runner.pool.sequence_bytes == 0 and swap.bytes_used == 0
