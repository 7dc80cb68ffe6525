"""Test selection and snapshots with a small trained hybrid model (`tests/data/hybrid`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.outputs import completed
from support.tiny_models import assert_greedy
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload_rt import LLM, SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.kv_cache.state_pool import StatePool
from offload_rt.models.source import find_source

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests" / "data" / "hybrid"
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@cache
def novel_tokens() -> list[int]:
    """Return tokens of a novel that the model did not see in training."""
    tokenizer: Any = AutoTokenizer.from_pretrained(find_source("reference").name_or_path)
    tokens: list[int] = tokenizer.encode((ROOT / "offload_rt" / "data" / "black_arrow.txt").read_text(encoding="utf-8"))
    return tokens


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager")


def make(policy: str = "full", **options: Any) -> LLM:
    options = {"host_memory": "32MiB", "verify": "off", "dtype": "float32", "device": "cpu"} | options
    return LLM(FOLDER, policy=policy, tokenizer="reference", **options)


def test_full_attention_equals_transformers() -> None:
    prompt = novel_tokens()[:600]
    [completion] = completed(make(verify="always", prefill_chunk_size=100).generate([prompt], GREEDY))
    assert_greedy(model(), prompt, completion.token_ids)


@pytest.mark.parametrize("policy", ["full", "infinigen"])
def test_edited_prompt_continues_at_a_snapshot(policy: str) -> None:
    first_prompt, edited_prompt = novel_tokens()[:650], [*novel_tokens()[:642], *novel_tokens()[5000:5008]]
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=0)
    llm, without_caching = make(policy), make(policy, enable_prefix_caching=False)
    llm.generate([first_prompt], GREEDY)
    [actual], [expected] = (runtime.generate([edited_prompt], params) for runtime in (llm, without_caching))
    assert actual.num_cached_tokens == 10 * BLOCK_SIZE
    assert actual.outputs[0].token_ids == expected.outputs[0].token_ids
    logprob = expected.outputs[0].cumulative_logprob
    assert logprob is not None
    assert actual.outputs[0].cumulative_logprob == pytest.approx(logprob, abs=1e-3)


def test_wrong_snapshot_changes_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a zero state ten tokens before the end, the error must exceed the tolerance of the test above."""
    prompt = novel_tokens()[:650]
    llm, params = make(), SamplingParams(max_tokens=1, temperature=0, logprobs=0)
    [expected] = llm.generate([prompt], params)

    def restore_zeros(self: StatePool, slot: int, layer: int, recurrent: torch.Tensor, conv: torch.Tensor) -> None:
        recurrent.zero_()
        conv.zero_()

    monkeypatch.setattr(StatePool, "restore", restore_zeros)
    [actual] = llm.generate([prompt], params)
    assert actual.num_cached_tokens == 10 * BLOCK_SIZE
    logprobs = [output.outputs[0].cumulative_logprob or 0.0 for output in (actual, expected)]
    assert abs(logprobs[0] - logprobs[1]) > 0.01


def score(llm: LLM) -> torch.Tensor:
    """Return the log-probabilities of the 40 tokens after a prompt of 1,000 tokens."""
    return torch.tensor(llm.score([novel_tokens()[:1000]], [novel_tokens()[1000:1040]], decode_from=1000)[0].logprobs)


@pytest.fixture(scope="module")
def full_scores() -> torch.Tensor:
    return score(make())


@pytest.mark.parametrize("ahead", [None, 3])
def test_logprobs_of_sparse_attention_are_close_to_full_attention(ahead: int | None, full_scores: torch.Tensor) -> None:
    """2 % of the tokens are selected, and approximate KV is used for all others."""
    options = {"source": "attention_input"} if ahead is None else {"ahead": ahead}
    difference = (full_scores - score(make("infinigen", policy_options=options))).abs()
    assert 0 < difference.mean() < 0.1
