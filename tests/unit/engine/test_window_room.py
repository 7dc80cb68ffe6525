"""Test that a sequence with sliding windows fits into a pool of its own size, even if its prefix is cached.

A prefill needs the KV in the windows of both its first and its last token. Prefilling all new tokens at once would need
three blocks for sliding layers, but the pool has only two. The engine must therefore split the prefill.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import VOCAB, architecture
from support.outputs import completed
from support.sharing import greedy
from support.tiny_models import tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.engine.speculative.draft_model import DraftModel
from offload_rt.engine.swap import Swap
from offload_rt.kv_cache.layer_groups import LayerGroups
from offload_rt.kv_cache.prefix_tree import EXACT

PROMPT = [token % (VOCAB - 1) + 1 for token in tiny_prompt(200)]
PREFIX = 2 * BLOCK_SIZE + 2


def make_llm(tokens: int | None = None, spare: int = 0) -> LLM:
    """Create a runtime whose pool has room for `tokens` tokens and `spare` additional blocks."""
    options: dict[str, Any] = {"policy": "full", "dtype": "float32", "verify": "off"}
    model = architecture("gemma3", dtype=torch.float32)
    llm = LLM(model, host_memory="4MiB", **options)
    if tokens is None:
        return llm
    groups, block_bytes = llm.runner.pool.groups, llm.runner.pool.block_bytes
    return LLM(model, host_memory=(groups.blocks(tokens) + spare * groups.blocks_at_once) * block_bytes, **options)


def cache_prefix(llm: LLM) -> None:
    llm.generate([PROMPT[:PREFIX]], greedy(1))
    cached = llm.runner.pool.match(PROMPT, EXACT)
    assert cached.length == 2 * BLOCK_SIZE
    llm.runner.pool.release(cached)


def check_empty(llm: LLM) -> None:
    llm.runner.check_integrity()
    assert llm.runner.pool.sequence_bytes == 0


@pytest.mark.parametrize(
    ("params", "spare"),
    [(greedy(10), 0), (SamplingParams(max_tokens=1, temperature=0, num_beams=3), 2)],
    ids=["greedy", "beams"],
)
def test_a_request_fits_after_a_cached_prefix(params: SamplingParams, spare: int) -> None:
    [expected] = completed(make_llm().generate([PROMPT], params))
    llm = make_llm(len(PROMPT) + params.max_tokens, spare)
    cache_prefix(llm)
    [output] = llm.generate([PROMPT], params)
    assert output.outputs[0].token_ids == expected.token_ids
    assert output.num_cached_tokens == 2 * BLOCK_SIZE
    check_empty(llm)


def test_a_score_fits_after_a_cached_prefix() -> None:
    [expected] = make_llm().score([PROMPT], [[3, 5, 7]])
    llm = make_llm(len(PROMPT) + 3)
    cache_prefix(llm)
    [score] = llm.score([PROMPT], [[3, 5, 7]])
    assert score.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert score.stats.reused_tokens == 2 * BLOCK_SIZE
    check_empty(llm)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_second_turn_fits_into_the_pool(restarts: bool, tmp_path: Path) -> None:
    def answer(llm: LLM, prompt: list[int]) -> list[int]:
        session = llm.session("talk", tmp_path / str(llm.runner.pool.block_count))
        try:
            return [event.token_id for event in session.send(prompt, greedy(4))]
        finally:
            session.close()

    def talk(tokens: int | None) -> list[int]:
        llm = make_llm(tokens)
        found = answer(llm, PROMPT[:PREFIX])
        found += answer(make_llm(tokens) if restarts else llm, PROMPT[PREFIX:])
        check_empty(llm)
        return found

    assert talk(len(PROMPT) + 8) == talk(None)


def test_a_swapped_sequence_fits_after_a_cached_prefix(tmp_path: Path) -> None:
    """A restored sequence needs the KV in the windows at its own end, but not at the end of the prefix."""
    llm = make_llm(len(PROMPT) + 1)
    swap = Swap(llm.runner, tmp_path)
    swap._write_seconds_per_byte = swap._read_seconds_per_byte = 0.0
    sequence = llm.runner.new_sequence(PROMPT, len(PROMPT))
    llm.runner.prefill(sequence, len(PROMPT))
    swapped = swap.swap_out(sequence, 1)
    llm.runner.free(sequence)
    assert swapped is not None and llm.runner.pool.drop_prefixes()
    cache_prefix(llm)
    restored = swap.swap_in(swapped, [*PROMPT, 5])
    assert restored is not None and restored.position == len(PROMPT)
    llm.runner.free(restored)
    swap.discard(swapped)
    check_empty(llm)


def test_a_draft_sequence_fits_after_a_cached_prefix() -> None:
    target, draft = make_llm(), make_llm(len(PROMPT) + 4)
    cache_prefix(draft)
    sequence = target.runner.new_sequence(PROMPT, len(PROMPT))
    assert DraftModel(draft.runner, VOCAB).prepare(sequence, 4)
    drafter = sequence.drafter
    assert drafter is not None and drafter.position == len(PROMPT) - 1
    draft.runner.free(drafter)
    check_empty(draft)


def test_a_failed_score_frees_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    monkeypatch.setattr(llm.runner, "advance_prefill", lambda prefill: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.score([PROMPT], [[3]])
    check_empty(llm)


@pytest.mark.parametrize("window", [1, 2, 12, 63, 64, 65, 66, 128, 129, 200])
def test_prefill_parts_need_no_more_blocks_than_a_window(window: int) -> None:
    groups = LayerGroups(1, (0, 1), (0, 0), 1, window)
    for start in range(0, 330, 3):
        position, stop = start, 700
        while position < stop:
            *longer, end = groups.prefill_ends(position, stop)
            assert all(len(groups.window_indices(position, one)) > groups.window_blocks for one in longer)
            assert len(groups.window_indices(position, end)) <= groups.window_blocks
            assert position < end <= stop
            position = end


@pytest.mark.parametrize("start", [0, 64, 70])
def test_a_prefill_without_sliding_windows_has_one_part(start: int) -> None:
    groups = LayerGroups(1, (0,), (0,), 0, 0)
    assert all(list(groups.prefill_ends(start, stop, slice_tokens=7)) == [stop] for stop in range(start + 1, 300))


@pytest.mark.parametrize("start", [64_000, 64_001, 64_100])
def test_later_prefill_ends_need_fewer_window_blocks(start: int) -> None:
    groups, chunk = LayerGroups(1, (0, 1), (0, 0), 1, 1024), 512
    stop = start + 128_000
    for ends in (list(groups.prefill_ends(start, stop)), list(groups.prefill_ends(start, stop, slice_tokens=chunk))):
        needed = [len(groups.window_indices(start, end)) for end in ends]
        assert needed == sorted(set(needed), reverse=True) and needed[-1] <= groups.window_blocks < needed[-2]
        assert ends[0] == stop and start < ends[-1] <= start + 1024 + BLOCK_SIZE
    # Whole prefill chunks come first.
    chunks = [(end - start) % chunk == 0 for end in ends]
    assert chunks[1] and chunks == sorted(chunks, reverse=True)
