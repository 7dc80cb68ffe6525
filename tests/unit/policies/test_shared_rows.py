"""Test that sequences with a common prefix share its low-bit KV, with unchanged contents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.batches import prefilled_sequence
from support.sharing import make_llm
from support.tiny_models import tiny_prompt

from offload_rt.core import BLOCK_SIZE
from offload_rt.engine.runner import Runner
from offload_rt.kernels.pages import PAGE_TOKENS
from offload_rt.model_runner.sequence import Sequence
from offload_rt.policies.infinigen.approximate_kv import ApproximateKV

COMMON = PAGE_TOKENS + 2 * BLOCK_SIZE


def runner_of(**options: Any) -> Runner:
    tail = {"approximate_kv": "int2", "recent": 8, "budget": 0.3}
    return make_llm(policy="infinigen", policy_options=tail, missed_mass_every=0, **options).runner


def prompts() -> list[list[int]]:
    """Return three prompts that share their first `COMMON` tokens."""
    stem = tiny_prompt(COMMON)
    return [stem + tiny_prompt(90, seed=seed) for seed in (1, 2, 3)]


def started(runner: Runner, prompt: list[int]) -> Sequence:
    sequence = runner.new_sequence(prompt, len(prompt) + 8, reuse=len(prompt))
    runner.prefill(sequence, len(prompt) - 3)
    return sequence


def kept(sequence: Sequence) -> ApproximateKV:
    found = sequence.state.scoring_keys
    assert isinstance(found, ApproximateKV)
    return found


def blocks_of(sequence: Sequence) -> torch.Tensor:
    """Return the low-bit KV of a prompt's full blocks, `[layers, Hkv, blocks, block_bytes]`."""
    rows = kept(sequence)
    pages = [rows._pages_of_layers.pages(layer) for layer in range(2)]
    whole = torch.stack([torch.cat([page[own.layer] for page in own.tensors], 1) for own in pages])
    return whole[:, :, : sequence.position // BLOCK_SIZE]


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the first slot of every write of keys."""
    starts: list[int] = []
    write = ApproximateKV.write

    def spied(self: ApproximateKV, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        starts.append(start)
        write(self, layer, k, v, start)

    monkeypatch.setattr(ApproximateKV, "write", spied)
    return starts


def test_low_bit_kv_of_a_shared_prefix_is_stored_once(learned: list[int]) -> None:
    """Later sequences compute low-bit KV only for their own tokens."""
    runner, others = runner_of(), runner_of(enable_prefix_caching=False)
    sequences = [started(runner, prompt) for prompt in prompts()]
    assert learned == [0, 0, *[COMMON] * 4] and all(one.observed == one.unobserved == 0 for one in sequences)
    alone = [started(others, prompt) for prompt in prompts()]
    assert all(blocks_of(one).equal(blocks_of(other)) for one, other in zip(sequences, alone, strict=True))
    pages = [kept(one)._pages_of_layers.pages(0).tensors for one in sequences]
    assert all(own[0] is pages[0][0] and own[1] is not pages[0][1] for own in pages[1:])
    page = pages[0][0].nbytes
    assert sum(one.state.device_bytes for one in sequences) == pytest.approx(4 * page, abs=3)
    assert sum(one.state.device_bytes for one in alone) == 6 * page
    for one, other in zip(sequences, alone, strict=True):
        assert runner.decode([one]).equal(others.decode([other]))
    runner.check_integrity()
    runner.free(sequences.pop(0))
    del pages
    assert sum(one.state.device_bytes for one in sequences) == pytest.approx(3 * page, abs=2)
    runner.check_integrity()


def test_only_low_bit_kv_of_a_prefill_is_shared(learned: list[int]) -> None:
    """Low-bit KV of incomplete sequences or decoded tokens is not shared."""
    runner, prompt = runner_of(), tiny_prompt(4 * BLOCK_SIZE)
    first = prefilled_sequence(runner, 3 * BLOCK_SIZE + 10)
    assert first.tokens[: 3 * BLOCK_SIZE] == prompt[: 3 * BLOCK_SIZE]
    second = runner.new_sequence(prompt, 300, reuse=len(prompt))
    first.unobserved = 1
    del learned[:]
    third = runner.new_sequence(prompt, 300, reuse=len(prompt))
    runner.prefill(second, 200)
    first.unobserved = 0
    first.exact = BLOCK_SIZE + 1
    runner.free(second)
    runner.prefill(third, 200)
    assert learned == [0, 0, BLOCK_SIZE + 1, BLOCK_SIZE + 1]


def test_with_eviction_low_bit_kv_is_not_shared(learned: list[int]) -> None:
    runner = runner_of(eviction="lru")
    for prompt in prompts()[:2]:
        started(runner, prompt)
    assert learned == [0] * 4
