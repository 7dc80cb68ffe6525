"""Test speculative decoding with `exact=...`: output equals full attention.

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

from offload_rt import LLM, ConfigError, SamplingParams
from offload_rt.config import DraftOptions
from offload_rt.engine.speculative import decoder
from offload_rt.engine.speculative.draft_source import Acceptance, Costs, Lookup
from offload_rt.model_runner import verification_pass
from offload_rt.model_runner.sequence import Sequence

SMALL: dict[str, Any] = {"budget": 0.1, "sinks": 2, "recent": 8, "approximate_kv": "off"}
"""A budget so small that drafts are often wrong."""

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


def runtime(model: Any, policy: str = "infinigen", **fields: Any) -> LLM:
    options = fields.pop("policy_options", SMALL if policy == "infinigen" else {})
    return LLM(model, policy=policy, policy_options=options, host_memory="16MiB", **fields)


def texts(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[int]]:
    found = [completion.token_ids for completion in completed(llm.generate(prompts, params))]
    llm.runner.check_integrity()
    return found


PROMPTS = [tiny_prompt(150), tiny_prompt(70, seed=1), tiny_prompt(90, seed=2)]


@pytest.mark.parametrize("policy", ["quest", "h2o", "streaming"])
def test_lookup_works_with_policies_that_cannot_discard_tokens(policy: str) -> None:
    """Rejected draft tokens leave entries in the policy's state, which the next pass overwrites."""
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=1, ignore_eos=True, allowed_token_ids=[3, 50])
    prompts = [[3, 50, 3, 3, 50, 50, 3, 50] * 8]
    llm = runtime(tiny_model("llama"), policy, exact={"method": "lookup", "adaptive": False})
    assert texts(llm, prompts, params) == texts(runtime(tiny_model("llama"), "full"), prompts, params)


SAMPLED = [SamplingParams(max_tokens=n, temperature=0.8, seed=n, ignore_eos=True) for n in (16, 11, 1)]


@functools.cache
def of_full_attention(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Return the greedy and the sampled texts of full attention."""
    plain = runtime(tiny_model(name), "full")
    return texts(plain, PROMPTS, GREEDY), texts(plain, PROMPTS, SAMPLED)


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
def test_the_text_equals_full_attention(name: str, policy: str, exact: Any) -> None:
    """Three sequences have drafts of different lengths, greedy and sampled."""
    # Mistral slides with a window of 48. The tiny float32 models have no near ties in 16 tokens.
    model = tiny_model(name)
    options = {"budget": 0.1, "sinks": 2, "recent": 8} if policy == "oracle" else None
    llm = runtime(model, policy, exact=exact, **({} if options is None else {"policy_options": options}))
    assert (texts(llm, PROMPTS, GREEDY), texts(llm, PROMPTS, SAMPLED)) == of_full_attention(name)


@pytest.mark.parametrize("dear", ["found", "decoded"])
def test_the_faster_kind_of_drafts_is_chosen(dear: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text has two words, so lookup finds drafts at every step."""
    monkeypatch.setattr(
        Costs, "round_seconds", lambda _, drafts, *, decoded: 1.0 + 9 * drafts * (decoded == (dear == "decoded"))
    )
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, allowed_token_ids=[3, 50])
    [done] = completed(runtime(_LLAMA, exact=True).generate([[3, 50, 3, 3, 50, 50, 3, 50] * 8], params))
    steps = len(done.stats.attended_by_step) - done.stats.verifications
    assert done.stats.drafted_tokens and (steps == 0) == (dear == "decoded")


@pytest.mark.parametrize("policy", ["infinigen", "h2o"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_verification_reads_scattered_kv_in_place(
    policy: str, on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`h2o` needs queries together with all keys, and gets the KV in one piece."""
    # The second prompt's KV is two runs in memory; on disk it is read in blocks.
    blocked, real = [], verification_pass.BlockedAttention.add
    monkeypatch.setattr(
        verification_pass.BlockedAttention, "add", lambda self, k, v: (blocked.append(1), real(self, k, v))[1]
    )
    alike = [tiny_prompt(128) + tiny_prompt(40, seed=seed) for seed in range(2)]
    options, exact = (SMALL, {"method": "both", "tokens": 3}) if policy == "infinigen" else ({"budget": 0.1}, "lookup")
    fields = {"disk": tmp_path, "host_memory": "1MiB"} if on_disk else {"host_memory": "16MiB"}
    llm = LLM(_LLAMA, policy=policy, policy_options=options, exact=exact, **fields)
    assert texts(llm, alike, GREEDY) == texts(runtime(_LLAMA, "full"), alike, GREEDY)
    assert bool(blocked) == (policy == "infinigen")


def test_a_batch_is_verified_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two of three sequences are completions of one prompt. The first MLP after each call must get all tokens.
    llm = runtime(_LLAMA, exact={"method": "both", "tokens": 3})
    passes: list[list[int]] = []
    sequences, real, mlp = [], decoder.verify, llm.runner.adapter.mlp

    def verify_all(runner: Any, batch: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
        passes.append([sum(count for _, count in batch)])
        sequences.append(len(batch))
        return real(runner, batch)

    def count(layer: int, residual: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for one in passes[-1:]:
            one.append(len(residual))
        return mlp(layer, residual, tokens)

    monkeypatch.setattr(decoder, "verify", verify_all)
    monkeypatch.setattr(llm.runner.adapter, "mlp", count)
    several = SamplingParams(max_tokens=12, temperature=0.9, seed=3, n=2, ignore_eos=True)
    done = completed(llm.generate(PROMPTS[:2], [several, GREEDY]))
    assert max(sequences) == 3 and sum(sequences) == sum(one.stats.verifications for one in done)
    assert all(one[0] == one[1] for one in passes)


def test_samples_have_the_distribution_of_the_model() -> None:
    """A chi-square test compares tokens of 96 completions with the model's probabilities."""
    vocabulary, llm = [3, 50, 101, 150], runtime(_LLAMA, exact={"method": "sparse", "tokens": 3, "adaptive": False})
    asked = SamplingParams(n=96, seed=5, temperature=1.0, max_tokens=3, allowed_token_ids=vocabulary, ignore_eos=True)
    done = completed(llm.generate([PROMPTS[1]], asked))
    assert sum(one.stats.drafted_tokens for one in done) >= 96
    pairs = list(itertools.product(vocabulary, repeat=2))
    with torch.no_grad():
        logits = _LLAMA(torch.tensor([[*PROMPTS[1], *pair] for pair in pairs])).logits[:, -3:, vocabulary]
    expected: Counter[tuple[int, int]] = Counter()
    for (first, second), (one, two, three) in zip(pairs, logits.double().softmax(-1).tolist(), strict=True):
        for third, chance in zip(vocabulary, three, strict=True):
            expected[second, third] += one[vocabulary.index(first)] * two[vocabulary.index(second)] * chance
    found = Counter(tuple(one.token_ids[1:]) for one in done)
    chi_square = sum((found[cell] - 96 * chance) ** 2 / (96 * chance) for cell, chance in expected.items())
    # 37.7 is the 0.999 quantile at 15 degrees of freedom.
    assert len(expected) == 16 and chi_square < 37.7


def test_wrong_drafts_are_rejected_and_counted() -> None:
    """Some drafts are wrong with a tiny budget, none with a budget of 1.0."""
    model = tiny_model("llama")
    prompt = tiny_prompt(200)
    poor, rich = (
        runtime(
            model, policy_options=SMALL | {"budget": budget}, exact={"method": "sparse", "tokens": 4, "adaptive": False}
        )
        for budget in (0.02, 1.0)
    )
    few, all_right = (completed(llm.generate([prompt], GREEDY))[0].stats for llm in (poor, rich))
    assert few.accepted_tokens < few.drafted_tokens
    assert all_right.accepted_tokens == all_right.drafted_tokens and all_right.acceptance_rate == 1
    for stats in (few, all_right):
        assert stats.accepted_tokens + stats.verifications == 15, "the first token is the prefill's"
        steps = len(stats.attended_by_step) - stats.verifications
        total = sum(map(sum, stats.attended_by_step)) / stats.layers
        assert stats.exact_fraction == pytest.approx(total / 15)
        assert steps == stats.drafted_tokens
    assert few.draft_speedup is None, "no pass was without drafts"
    assert few.mean_accepted_length is not None and all_right.mean_accepted_length is not None
    assert few.mean_accepted_length < all_right.mean_accepted_length


def test_the_speedup_over_passes_without_drafts_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the patched clock, each pass takes one second, and drafting no time."""
    clock = itertools.count()
    monkeypatch.setattr(decoder, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, allowed_token_ids=[3, 50])
    [done] = completed(runtime(_LLAMA, "full", exact=True).generate([[3, 50, 3, 3, 50, 50, 3, 50] * 8], params))
    assert done.stats.accepted_tokens
    assert done.stats.draft_speedup == pytest.approx(23 / done.stats.verifications)


def test_lookup_drafts_of_repeated_text_need_no_decode_steps() -> None:
    """A trained model repeats a page, so lookup drafts are accepted without decode steps."""
    llm = LLM("reference", policy="full", host_memory="64MiB", exact={"adaptive": False})
    page = llm.encode(files("offload_rt").joinpath("data/black_arrow.txt").read_text(encoding="utf-8")[:1200])
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    [done] = completed(llm.generate([page + page[:60]], params))
    assert done.token_ids == completed(runtime("reference", "full").generate([page + page[:60]], params))[0].token_ids
    assert len(done.stats.attended_by_step) == done.stats.verifications, "no step drafted"
    assert done.stats.accepted_tokens >= 10


# RMSNorm computes in float32 and sums in another order over several tokens, which leaves 1e-6 in float64.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-6), (torch.float32, 5e-5)], ids=str)
def test_kv_equals_that_of_a_run_without_drafts(dtype: torch.dtype, bound: float) -> None:
    model = tiny_model("qwen2", dtype=dtype)
    prompt = tiny_prompt(118)
    rows = []
    for llm in (runtime(model, exact={"method": "sparse", "adaptive": False}), runtime(model, "full")):
        runner = llm.runner
        [done] = completed(llm.generate([prompt], GREEDY))
        blocks = runner.pool.match([*prompt, *done.token_ids], "exact")
        assert blocks.length == 128, "full blocks of verified tokens are shared as exact ones"
        rows.append(runner.pool.runs(blocks, 2, range(128))[0])
        runner.pool.release(blocks)
    torch.testing.assert_close(rows[0].k, rows[1].k, rtol=0, atol=bound)
    torch.testing.assert_close(rows[0].v, rows[1].v, rtol=0, atol=bound)


def test_completions_beams_and_scores_equal_full_attention() -> None:
    model = tiny_model("llama")
    llm, plain = runtime(model, exact={"method": "sparse", "adaptive": False}), runtime(model, "full")
    several = SamplingParams(max_tokens=10, temperature=0.9, seed=3, n=3)
    beams = SamplingParams(max_tokens=8, temperature=0, num_beams=3, n=2)
    for params in (several, beams):
        assert texts(llm, PROMPTS[:2], params) == texts(plain, PROMPTS[:2], params)
    mine, theirs = (one.score(PROMPTS[:2], [tiny_prompt(70, seed=5), tiny_prompt(3, seed=6)]) for one in (llm, plain))
    for a, b in zip(mine, theirs, strict=True):
        assert a.is_greedy == b.is_greedy
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_no_room_for_the_windows_of_drafts_is_no_error() -> None:
    """Two sliding sequences share three blocks, enough for the next token but not for drafts in another block."""
    model, prompts = tiny_model("mistral", num_hidden_layers=2), [tiny_prompt(n, seed=1) for n in (50, 51)]
    exact = {"method": "sparse", "adaptive": False}
    full = LLM(model, policy_options=SMALL, exact=exact, host_memory="192KiB", enable_prefix_caching=False)
    assert texts(full, prompts, GREEDY) == texts(runtime(model, "full"), prompts, GREEDY)


_LLAMA = tiny_model("llama")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(2, 5), st.integers(1, 4))
def test_lookup_finds_what_a_search_finds(tokens: list[int], longest: int, most: int) -> None:
    """Drafts continue the last occurrence of the longest n-gram, regardless of earlier calls."""
    lookup, found = Lookup(longest), []
    for stop in range(1, len(tokens) + 1):
        found = lookup.propose(tokens[:stop], most)
    expected: list[int] = []
    for n in range(min(longest, len(tokens)), 1, -1):
        ends = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[len(tokens) - n :]]
        if ends:
            expected = tokens[ends[-1] : ends[-1] + most]
            break
    assert found == expected


def test_the_length_of_drafts_follows_acceptance_and_costs() -> None:
    """Cheap, correct drafts have the maximum length. Wrong or expensive drafts are not made."""
    costs, right, wrong = Costs(), Acceptance(), Acceptance()
    for tokens in (1, 5, 9, 3):
        costs.observe_drafts(4, 4 * 0.9)
        costs.observe_verification(3 * tokens, 3, 3 * (1 + 0.01 * tokens))
    for _ in range(40):
        right.observe(8, 8)
        wrong.observe(8, 0)
    assert right.best_round(8, costs, decoded=False).drafts == 8
    assert right.best_round(8, costs, decoded=True).drafts >= 1
    assert right.best_round(4, costs, decoded=True).rate < right.best_round(4, costs, decoded=False).rate
    assert wrong.best_round(8, costs, decoded=True).drafts == 0
    for _ in range(400):
        wrong.record_unused()
    assert wrong.best_round(8, costs, decoded=False).drafts > 0, "it is tried again"


@pytest.mark.parametrize(
    ("fields", "said"),
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
def test_unsupported_exact_options_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(_LLAMA, host_memory="8MiB", **fields)


def test_defaults_draft_by_the_policy_and_by_lookup_for_full() -> None:
    llm = runtime(_LLAMA, exact=True)
    assert llm.config.exact == DraftOptions("both", 8)
    assert runtime(_LLAMA, "full", exact=True).config.exact == DraftOptions("lookup")
    assert LLM(_LLAMA, host_memory="8MiB", exact=False).config.exact is None
