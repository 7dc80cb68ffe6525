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
def text() -> list[int]:
    """Return tokens of a novel that the model did not see in training."""
    tokenizer: Any = AutoTokenizer.from_pretrained(find_source("reference").name_or_path)
    found: list[int] = tokenizer.encode((ROOT / "offload_rt" / "data" / "black_arrow.txt").read_text(encoding="utf-8"))
    return found


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager")


def make(policy: str = "full", **options: Any) -> LLM:
    options = {"host_memory": "32MiB", "verify": "off", "dtype": "float32", "device": "cpu"} | options
    return LLM(FOLDER, policy=policy, tokenizer="reference", **options)


def test_full_attention_gives_the_tokens_of_transformers() -> None:
    prompt = text()[:600]
    [completion] = completed(make(verify="always", prefill_chunk_size=100).generate([prompt], GREEDY))
    assert_greedy(model(), prompt, completion.token_ids)


@pytest.mark.parametrize("policy", ["full", "infinigen"])
def test_prompts_continue_at_snapshots(policy: str) -> None:
    """An edited prompt gives the log-probabilities of the same prompt computed at once."""
    stem, prompt = text()[:650], [*text()[:642], *text()[5000:5008]]
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=0)
    llm, alone = make(policy), make(policy, enable_prefix_caching=False)
    llm.generate([stem], GREEDY)
    [found], [expected] = (each.generate([prompt], params) for each in (llm, alone))
    assert found.num_cached_tokens == 10 * BLOCK_SIZE
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    logprob = expected.outputs[0].cumulative_logprob
    assert logprob is not None
    assert found.outputs[0].cumulative_logprob == pytest.approx(logprob, abs=1e-3)


def test_learned_states_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A zero state, ten tokens before the end, changes log-probabilities by more than the tolerance
    of the test above.
    """
    stem = text()[:650]
    llm, params = make(), SamplingParams(max_tokens=1, temperature=0, logprobs=0)
    [expected] = llm.generate([stem], params)

    def zeros(self: StatePool, slot: int, layer: int, recurrent: torch.Tensor, conv: torch.Tensor) -> None:
        recurrent.zero_()
        conv.zero_()

    monkeypatch.setattr(StatePool, "restore", zeros)
    [found] = llm.generate([stem], params)
    assert found.num_cached_tokens == 10 * BLOCK_SIZE
    logprobs = [output.outputs[0].cumulative_logprob or 0.0 for output in (found, expected)]
    assert abs(logprobs[0] - logprobs[1]) > 0.01


def score(llm: LLM) -> torch.Tensor:
    """Return log-probabilities of 40 tokens after a prompt of 1,000."""
    return torch.tensor(llm.score([text()[:1000]], [text()[1000:1040]], decode_from=1000)[0].logprobs)


@pytest.fixture(scope="module")
def full_scores() -> torch.Tensor:
    return score(make())


@pytest.mark.parametrize("ahead", [None, 3])
def test_predicted_queries_find_tokens(ahead: int | None, full_scores: torch.Tensor) -> None:
    """With 2 % of the tokens and approximate KV, log-probabilities stay near those of full attention."""
    options = {"source": "attention_input"} if ahead is None else {"ahead": ahead}
    difference = (full_scores - score(make("infinigen", policy_options=options))).abs()
    assert 0 < difference.mean() < 0.1
