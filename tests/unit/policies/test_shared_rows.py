"""Test that sequences with a common prefix share its low-bit KV, and that the contents do not change."""

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

COMMON_TOKENS = PAGE_TOKENS + 2 * BLOCK_SIZE


def make_runner(**options: Any) -> Runner:
    tail = {"approximate_kv": "int2", "recent": 8, "budget": 0.3}
    return make_llm(policy="infinigen", policy_options=tail, missed_mass_every=0, **options).runner


def prompts() -> list[list[int]]:
    prefix = tiny_prompt(COMMON_TOKENS)
    return [prefix + tiny_prompt(90, seed=seed) for seed in (1, 2, 3)]


def prefill_sequence(runner: Runner, prompt: list[int]) -> Sequence:
    sequence = runner.new_sequence(prompt, len(prompt) + 8, reuse=len(prompt))
    runner.prefill(sequence, len(prompt) - 3)
    return sequence


def low_bit_kv(sequence: Sequence) -> ApproximateKV:
    scoring_keys = sequence.state.scoring_keys
    assert isinstance(scoring_keys, ApproximateKV)
    return scoring_keys


def low_bit_blocks(sequence: Sequence) -> torch.Tensor:
    """Return the low-bit KV of a prompt's full blocks, `[layers, Hkv, blocks, block_bytes]`."""
    kv = low_bit_kv(sequence)
    pages = [kv._pages_of_layers.pages(layer) for layer in range(2)]
    blocks = torch.stack(
        [torch.cat([page[layer_pages.layer] for page in layer_pages.tensors], 1) for layer_pages in pages]
    )
    return blocks[:, :, : sequence.position // BLOCK_SIZE]


@pytest.fixture
def write_starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the first slot of every write of keys."""
    starts: list[int] = []
    write = ApproximateKV.write

    def record_start(self: ApproximateKV, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        starts.append(start)
        write(self, layer, k, v, start)

    monkeypatch.setattr(ApproximateKV, "write", record_start)
    return starts


def test_low_bit_kv_of_a_shared_prefix_is_stored_once(write_starts: list[int]) -> None:
    runner, separate_runner = make_runner(), make_runner(enable_prefix_caching=False)
    sequences = [prefill_sequence(runner, prompt) for prompt in prompts()]
    # Later sequences write only their own tokens.
    assert write_starts == [0, 0, *[COMMON_TOKENS] * 4] and all(
        sequence.observed == sequence.unobserved == 0 for sequence in sequences
    )
    separate_sequences = [prefill_sequence(separate_runner, prompt) for prompt in prompts()]
    assert all(
        low_bit_blocks(sequence).equal(low_bit_blocks(separate))
        for sequence, separate in zip(sequences, separate_sequences, strict=True)
    )
    pages = [low_bit_kv(sequence)._pages_of_layers.pages(0).tensors for sequence in sequences]
    assert all(tensors[0] is pages[0][0] and tensors[1] is not pages[0][1] for tensors in pages[1:])
    page = pages[0][0].nbytes
    assert sum(sequence.state.device_bytes for sequence in sequences) == pytest.approx(4 * page, abs=3)
    assert sum(sequence.state.device_bytes for sequence in separate_sequences) == 6 * page
    for sequence, separate in zip(sequences, separate_sequences, strict=True):
        assert runner.decode([sequence]).equal(separate_runner.decode([separate]))
    runner.check_integrity()
    runner.free(sequences.pop(0))
    del pages
    assert sum(sequence.state.device_bytes for sequence in sequences) == pytest.approx(3 * page, abs=2)
    runner.check_integrity()


def test_only_low_bit_kv_of_a_prefill_is_shared(write_starts: list[int]) -> None:
    """The low-bit KV of incomplete sequences and of decoded tokens must not be shared."""
    runner, prompt = make_runner(), tiny_prompt(4 * BLOCK_SIZE)
    first = prefilled_sequence(runner, 3 * BLOCK_SIZE + 10)
    assert first.tokens[: 3 * BLOCK_SIZE] == prompt[: 3 * BLOCK_SIZE]
    second = runner.new_sequence(prompt, 300, reuse=len(prompt))
    first.unobserved = 1
    del write_starts[:]
    third = runner.new_sequence(prompt, 300, reuse=len(prompt))
    runner.prefill(second, 200)
    first.unobserved = 0
    first.exact = BLOCK_SIZE + 1
    runner.free(second)
    runner.prefill(third, 200)
    assert write_starts == [0, 0, BLOCK_SIZE + 1, BLOCK_SIZE + 1]


def test_low_bit_kv_is_not_shared_with_eviction(write_starts: list[int]) -> None:
    runner = make_runner(eviction="lru")
    for prompt in prompts()[:2]:
        prefill_sequence(runner, prompt)
    assert write_starts == [0] * 4
