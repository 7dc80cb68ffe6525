"""Test speculative decoding with `exact=...`, whose output equals full attention.

`test_exact_hybrids.py` covers recurrent layers, sessions, preemption and rejected drafts.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.outputs import completed
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, InputError, SamplingParams
from offload_rt.config import DraftOptions
from offload_rt.engine.speculative import decoder
from offload_rt.engine.speculative.draft_source import Acceptance, Costs, Lookup
from offload_rt.model_runner import verification_pass
from offload_rt.model_runner.sequence import Sequence

SMALL_BUDGET: dict[str, Any] = {"budget": 0.1, "sinks": 2, "recent": 8, "approximate_kv": "off"}
"""Options with a budget so small that drafts are often wrong."""

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


def make_llm(model: Any, policy: str = "infinigen", **fields: Any) -> LLM:
    options = fields.pop("policy_options", SMALL_BUDGET if policy == "infinigen" else {})
    return LLM(model, policy=policy, policy_options=options, host_memory="16MiB", **fields)


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    tokens = [completion.token_ids for completion in completed(llm.generate(prompts, params))]
    llm.runner.check_integrity()
    return tokens


PROMPTS = [tiny_prompt(150), tiny_prompt(70, seed=1), tiny_prompt(90, seed=2)]


@pytest.mark.parametrize("policy", ["quest", "h2o", "streaming"])
def test_lookup_works_with_policies_that_cannot_discard_tokens(policy: str) -> None:
    """Rejected draft tokens leave entries in the policy's state. The next pass overwrites them."""
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=1, ignore_eos=True, allowed_token_ids=[3, 50])
    prompts = [[3, 50, 3, 3, 50, 50, 3, 50] * 8]
    llm = make_llm(tiny_model("llama"), policy, exact={"method": "lookup", "adaptive": False})
    assert generate(llm, prompts, params) == generate(make_llm(tiny_model("llama"), "full"), prompts, params)


SAMPLED = [SamplingParams(max_tokens=n, temperature=0.8, seed=n, ignore_eos=True) for n in (16, 11, 1)]


@functools.cache
def full_attention_tokens(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Return the greedy and the sampled tokens of full attention."""
    full = make_llm(tiny_model(name), "full")
    return generate(full, PROMPTS, GREEDY), generate(full, PROMPTS, SAMPLED)


@pytest.mark.sampled(features=lambda name, policy, exact: {name, policy, str(exact)})
@pytest.mark.parametrize(
    ("name", "policy", "exact"),
    [
        ("llama", "infinigen", {"method": "sparse", "adaptive": False}),
        ("llama", "infinigen", {"method": "both", "tokens": 3}),
        ("llama", "oracle", True),
        ("mistral", "infinigen", {"method": "sparse", "adaptive": False}),
        ("mistral", "full", {"adaptive": False}),
        ("opt", "infinigen", {"method": "sparse", "adaptive": False}),
    ],
)
def test_tokens_equal_full_attention(name: str, policy: str, exact: Any) -> None:
    # Mistral slides with a window of 48. The tiny float32 models have no near ties in 16 tokens.
    model = tiny_model(name)
    options = {"budget": 0.1, "sinks": 2, "recent": 8} if policy == "oracle" else None
    llm = make_llm(model, policy, exact=exact, **({} if options is None else {"policy_options": options}))
    assert (generate(llm, PROMPTS, GREEDY), generate(llm, PROMPTS, SAMPLED)) == full_attention_tokens(name)


@pytest.mark.parametrize("expensive", ["lookup", "decoded"])
def test_faster_kind_of_drafts_is_chosen(expensive: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Costs, "round_seconds", lambda _, drafts, *, decoded: 1.0 + 9 * drafts * (decoded == (expensive == "decoded"))
    )
    # With two words, lookup finds drafts at every step.
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, allowed_token_ids=[3, 50])
    [output] = completed(make_llm(_LLAMA, exact=True).generate([[3, 50, 3, 3, 50, 50, 3, 50] * 8], params))
    steps = len(output.stats.attended_by_step) - output.stats.verifications
    assert output.stats.drafted_tokens and (steps == 0) == (expensive == "decoded")


@pytest.mark.sampled
@pytest.mark.parametrize("policy", ["infinigen", "h2o"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_verification_reads_scattered_kv_in_place(
    policy: str, on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second prompt's KV is two runs in memory; on disk it is read in blocks.
    blocked, add = [], verification_pass.BlockedAttention.add
    monkeypatch.setattr(
        verification_pass.BlockedAttention, "add", lambda self, k, v: (blocked.append(1), add(self, k, v))[1]
    )
    prompts = [tiny_prompt(128) + tiny_prompt(40, seed=seed) for seed in range(2)]
    options, exact = (
        (SMALL_BUDGET, {"method": "both", "tokens": 3}) if policy == "infinigen" else ({"budget": 0.1}, "lookup")
    )
    fields = {"disk": tmp_path, "host_memory": "1MiB"} if on_disk else {"host_memory": "16MiB"}
    llm = LLM(_LLAMA, policy=policy, policy_options=options, exact=exact, **fields)
    assert generate(llm, prompts, GREEDY) == generate(make_llm(_LLAMA, "full"), prompts, GREEDY)
    assert bool(blocked) == (policy == "infinigen")  # h2o needs queries with all keys, so its KV is contiguous


def test_batch_is_verified_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two of three sequences are completions of one prompt. The first MLP after each call must get all tokens.
    llm = make_llm(_LLAMA, exact={"method": "both", "tokens": 3})
    passes: list[list[int]] = []
    sequences, verify, mlp = [], decoder.verify, llm.runner.adapter.mlp

    def verify_all(runner: Any, batch: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
        passes.append([sum(count for _, count in batch)])
        sequences.append(len(batch))
        return verify(runner, batch)

    def record_tokens(layer: int, residual: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for counts in passes[-1:]:
            counts.append(len(residual))
        return mlp(layer, residual, tokens)

    monkeypatch.setattr(decoder, "verify", verify_all)
    monkeypatch.setattr(llm.runner.adapter, "mlp", record_tokens)
    sampled = SamplingParams(max_tokens=12, temperature=0.9, seed=3, n=2, ignore_eos=True)
    outputs = completed(llm.generate(PROMPTS[:2], [sampled, GREEDY]))
    assert max(sequences) == 3 and sum(sequences) == sum(output.stats.verifications for output in outputs)
    assert all(counts[0] == counts[1] for counts in passes)


def test_sampled_tokens_have_the_distribution_of_the_model() -> None:
    vocabulary, llm = [3, 50, 101, 150], make_llm(_LLAMA, exact={"method": "sparse", "tokens": 3, "adaptive": False})
    params = SamplingParams(n=96, seed=5, temperature=1.0, max_tokens=3, allowed_token_ids=vocabulary, ignore_eos=True)
    outputs = completed(llm.generate([PROMPTS[1]], params))
    assert sum(output.stats.drafted_tokens for output in outputs) >= 96
    pairs = list(itertools.product(vocabulary, repeat=2))
    with torch.no_grad():
        logits = _LLAMA(torch.tensor([[*PROMPTS[1], *pair] for pair in pairs])).logits[:, -3:, vocabulary]
    expected: Counter[tuple[int, int]] = Counter()
    for (first, second), (one, two, three) in zip(pairs, logits.double().softmax(-1).tolist(), strict=True):
        for third, probability in zip(vocabulary, three, strict=True):
            expected[second, third] += one[vocabulary.index(first)] * two[vocabulary.index(second)] * probability
    observed = Counter(tuple(output.token_ids[1:]) for output in outputs)
    chi_square = sum(
        (observed[cell] - 96 * probability) ** 2 / (96 * probability) for cell, probability in expected.items()
    )
    # 37.7 is the 0.999 quantile at 15 degrees of freedom.
    assert len(expected) == 16 and chi_square < 37.7


def test_wrong_drafts_are_rejected_and_counted() -> None:
    model = tiny_model("llama")
    prompt = tiny_prompt(200)
    small_budget, full_budget = (
        make_llm(
            model,
            policy_options=SMALL_BUDGET | {"budget": budget},
            exact={"method": "sparse", "tokens": 4, "adaptive": False},
        )
        for budget in (0.02, 1.0)  # some drafts are wrong, all drafts are correct
    )
    rejected, accepted = (completed(llm.generate([prompt], GREEDY))[0].stats for llm in (small_budget, full_budget))
    assert rejected.accepted_tokens < rejected.drafted_tokens
    assert accepted.accepted_tokens == accepted.drafted_tokens and accepted.acceptance_rate == 1
    for stats in (rejected, accepted):
        assert stats.accepted_tokens + stats.verifications == 15, "the first token is from prefill"
        steps = len(stats.attended_by_step) - stats.verifications
        total = sum(map(sum, stats.attended_by_step)) / stats.layers
        assert stats.exact_fraction == pytest.approx(total / 15)
        assert steps == stats.drafted_tokens
    assert rejected.draft_speedup is None, "all passes had drafts"
    assert rejected.mean_accepted_length is not None and accepted.mean_accepted_length is not None
    assert rejected.mean_accepted_length < accepted.mean_accepted_length


def test_speedup_over_passes_without_drafts_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()  # each pass takes one second, and drafting no time
    monkeypatch.setattr(decoder, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, allowed_token_ids=[3, 50])
    [output] = completed(make_llm(_LLAMA, "full", exact=True).generate([[3, 50, 3, 3, 50, 50, 3, 50] * 8], params))
    assert output.stats.accepted_tokens
    assert output.stats.draft_speedup == pytest.approx(23 / output.stats.verifications)


def test_lookup_drafts_of_repeated_text_need_no_decode_steps() -> None:
    llm = LLM("reference", policy="full", host_memory="64MiB", exact={"adaptive": False})
    page = llm.encode(files("offload_rt").joinpath("data/black_arrow.txt").read_text(encoding="utf-8")[:1200])
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    # The trained model repeats the page.
    [output] = completed(llm.generate([page + page[:60]], params))
    assert (
        output.token_ids == completed(make_llm("reference", "full").generate([page + page[:60]], params))[0].token_ids
    )
    assert len(output.stats.attended_by_step) == output.stats.verifications, "no step drafted"
    assert output.stats.accepted_tokens >= 10


# RMSNorm computes in float32 and sums in another order over several tokens, which leaves 1e-6 in float64.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 5e-5)], ids=str)
def test_kv_equals_that_of_decoding_without_drafts(dtype: torch.dtype, tolerance: float) -> None:
    model = tiny_model("qwen2", dtype=dtype)
    prompt = tiny_prompt(118)
    kv = []
    for llm in (make_llm(model, exact={"method": "sparse", "adaptive": False}), make_llm(model, "full")):
        runner = llm.runner
        [output] = completed(llm.generate([prompt], GREEDY))
        blocks = runner.pool.match([*prompt, *output.token_ids], "exact")
        assert blocks.length == 128, "full blocks of verified tokens have exact KV"
        kv.append(runner.pool.runs(blocks, 2, range(128))[0])
        runner.pool.release(blocks)
    torch.testing.assert_close(kv[0].k, kv[1].k, rtol=0, atol=tolerance)
    torch.testing.assert_close(kv[0].v, kv[1].v, rtol=0, atol=tolerance)


def test_completions_beams_and_scores_equal_full_attention() -> None:
    model = tiny_model("llama")
    llm, full = make_llm(model, exact={"method": "sparse", "adaptive": False}), make_llm(model, "full")
    samples = SamplingParams(max_tokens=10, temperature=0.9, seed=3, n=3)
    beams = SamplingParams(max_tokens=8, temperature=0, num_beams=3, n=2)
    for params in (samples, beams):
        assert generate(llm, PROMPTS[:2], params) == generate(full, PROMPTS[:2], params)
    scores, expected = (
        runtime.score(PROMPTS[:2], [tiny_prompt(70, seed=5), tiny_prompt(3, seed=6)]) for runtime in (llm, full)
    )
    for a, b in zip(scores, expected, strict=True):
        assert a.is_greedy == b.is_greedy
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_lack_of_memory_for_draft_tokens_is_no_error() -> None:
    """Two sequences with sliding windows have three blocks. That is enough for the next token, but not for drafts."""
    model, prompts = tiny_model("mistral", num_hidden_layers=2), [tiny_prompt(n, seed=1) for n in (50, 51)]
    exact = {"method": "sparse", "adaptive": False}
    small_pool = LLM(model, policy_options=SMALL_BUDGET, exact=exact, host_memory="192KiB", enable_prefix_caching=False)
    assert generate(small_pool, prompts, GREEDY) == generate(make_llm(model, "full"), prompts, GREEDY)


_LLAMA = tiny_model("llama")


def test_constraints_that_allow_no_draft_token_are_reported() -> None:
    exact = DraftOptions("sparse", adaptive=False)
    llm = LLM("reference", policy="infinigen", host_memory="16MiB", verify="off", exact=exact)
    assert llm.tokenizer is not None
    word = "night"
    [token, again] = llm.tokenizer(f" {word} {word}", add_special_tokens=False)["input_ids"]
    assert token == again
    params = SamplingParams(max_tokens=4, temperature=0, allowed_token_ids=[token], bad_words=[f"{word} {word}"])
    with pytest.raises(InputError, match="no token is allowed"):
        llm.generate(["It was a dark"], params)
    llm.runner.check_integrity()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(2, 5), st.integers(1, 4))
def test_lookup_equals_an_exhaustive_search(tokens: list[int], longest: int, max_drafts: int) -> None:
    """The draft is what follows the last occurrence of the longest n-gram."""
    lookup, drafts = Lookup(longest), []
    for stop in range(1, len(tokens) + 1):
        drafts = lookup.propose(tokens[:stop], max_drafts)
    expected: list[int] = []
    for n in range(min(longest, len(tokens)), 1, -1):
        ends = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[len(tokens) - n :]]
        if ends:
            expected = tokens[ends[-1] : ends[-1] + max_drafts]
            break
    assert drafts == expected


def test_draft_length_depends_on_acceptance_and_costs() -> None:
    costs, accepted, rejected = Costs(), Acceptance(), Acceptance()
    for tokens in (1, 5, 9, 3):
        costs.observe_drafts(4, 4 * 0.9)
        costs.observe_verification(3 * tokens, 3, 3 * (1 + 0.01 * tokens))
    for _ in range(40):
        accepted.observe(8, 8)
        rejected.observe(8, 0)
    assert accepted.best_round(8, costs, decoded=False).drafts == 8
    assert accepted.best_round(8, costs, decoded=True).drafts >= 1
    assert accepted.best_round(4, costs, decoded=True).rate < accepted.best_round(4, costs, decoded=False).rate
    assert rejected.best_round(8, costs, decoded=True).drafts == 0
    for _ in range(400):
        rejected.record_unused()
    assert rejected.best_round(8, costs, decoded=False).drafts > 0, "after 400 passes, drafts are tried again"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exact": "quick"}, "did you mean|one of"),
        ({"exact": {"tokens": 0}}, "at least 1"),
        ({"exact": {"count": 2}}, "count"),
        ({"exact": 3}, "exact=3"),
        ({"exact": "sparse", "policy": "full"}, "'lookup'"),
        ({"exact": True, "policy": "quest"}, "exact='lookup'"),
        ({"exact": True, "eviction": "counter"}, "eviction"),
        ({"exact": True, "kv_cache_dtype": "int8"}, "kv_cache_dtype"),
    ],
)
def test_unsupported_exact_options_are_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(_LLAMA, host_memory="8MiB", **fields)


def test_default_draft_method_depends_on_the_policy() -> None:
    llm = make_llm(_LLAMA, exact=True)
    assert llm.config.exact == DraftOptions("both", 8)
    assert make_llm(_LLAMA, "full", exact=True).config.exact == DraftOptions("lookup")
    assert LLM(_LLAMA, host_memory="8MiB", exact=False).config.exact is None
