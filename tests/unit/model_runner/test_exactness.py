"""Test two invariants: policy `full` equals transformers, and any policy with a full budget equals `full`."""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import pytest
import torch
from support.outputs import completed
from support.tiny_models import NAMES, assert_greedy, tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams

SELECT_ALL = {"alpha": math.inf, "max_fraction": 1.0}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    ("llama", {"num_key_value_heads": 4}),
]
IDS = [f"{name}{'-' if options else ''}{'-'.join(options)}" for name, options in VARIANTS]


def decoded_logits(llm: LLM, tokens: list[int], prefilled: int) -> torch.Tensor:
    """Return logits from token `prefilled - 1` on. The first ones are from prefill, all others from decode steps."""
    runner = llm.runner
    sequence = runner.new_sequence(tokens, len(tokens))
    first = runner.prefill(sequence, prefilled, want_logits=True)
    assert first is not None
    rows = [first] + [runner.decode([sequence])[0] for _ in range(prefilled, len(tokens))]
    runner.check_integrity()
    runner.free(sequence)
    return torch.stack(rows)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_policy_full_equals_transformers_logits(name: str, options: dict[str, Any]) -> None:
    model = tiny_model(name, **options)
    tokens = tiny_prompt(84)  # longer than a block and than Mistral's window of 48
    expected = model(torch.tensor([tokens])).logits[0, 59:].float()
    llm = LLM(model, policy="full", host_memory="8MiB")
    logits = decoded_logits(llm, tokens, prefilled=60)
    # float32 rounding of sums in another order
    assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("slice_tokens", [1, 7, 64, 1000])
def test_prefill_chunks_do_not_change_logits(slice_tokens: int) -> None:
    model = tiny_model("mistral", dtype=torch.float64)  # float32 sums depend on the order
    tokens = tiny_prompt(130)
    expected = model(torch.tensor([tokens])).logits[0, -1]
    llm = LLM(model, policy="full", host_memory="8MiB", dtype="float64", prefill_chunk_size=slice_tokens)
    torch.testing.assert_close(decoded_logits(llm, tokens, prefilled=130)[-1], expected, rtol=0, atol=1e-5)


POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("infinigen", {}),
    ("infinigen", {"preset": "rows"}),
    ("infinigen", {"preset": "paper"}),
    ("infinigen", {"preset": "rows", "scorer": "int4", "source": "normed_input", "recent": 8}),
    ("infinigen", {"approximate_kv": "int2", "budget": 0.2, "recent": 8, "dense_layers": ()}),
]
SCORERS = list(itertools.product(["attention_input", "normed_input", "residual"], ["partial", "int4"]))
STRESS = "OFFLOAD_RT_STRESS" in os.environ
"""Whether to test every policy and scorer with each model. Otherwise, each model is tested with the default policy, a
few other policies, and two scorers."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "policy", "options"),
    [
        (name, *policy)
        for (i, name), (j, policy) in itertools.product(enumerate(NAMES), enumerate(POLICIES))
        if STRESS or j == 1 or (i - j) % len(POLICIES) in (0, 3)
    ],
)
def test_ragged_batch_equals_single_prompts(name: str, policy: str, options: dict[str, Any]) -> None:
    # Products of a batch round differently, which might change a token in float32.
    model = tiny_model(name, dtype=torch.float64)
    llm = LLM(model, policy=policy, policy_options=options, host_memory="64MiB", dtype="float64")
    prompts = [tiny_prompt(length, seed=length) for length in (150, 1, 70)]
    params = SamplingParams(max_tokens=5, temperature=0)
    batched = [completion.token_ids for completion in completed(llm.generate(prompts, params))]
    single = [completed(llm.generate([prompt], params))[0].token_ids for prompt in prompts]
    assert batched == single


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "source", "scorer"),
    [
        (name, *chosen)
        for (i, name), (j, chosen) in itertools.product(enumerate(NAMES), enumerate(SCORERS))
        if STRESS or (i - j) % len(SCORERS) in (0, 3)
    ],
)
def test_infinigen_with_full_budget_equals_full(name: str, source: str, scorer: str) -> None:
    model = tiny_model(name)
    prompt, params = tiny_prompt(80), SamplingParams(max_tokens=16, temperature=0)
    options = SELECT_ALL | {"preset": "rows", "source": source, "scorer": scorer, "dense_layers": ()}
    [sparse] = completed(
        LLM(model, policy="infinigen", policy_options=options, host_memory="8MiB").generate([prompt], params)
    )
    assert_greedy(model, prompt, sparse.token_ids)  # equals transformers, like full
    assert sparse.stats.exact_fraction == 1.0
    if name == "mistral":  # all layers are sliding layers, so no layer selects tokens
        assert sparse.stats.missed_mass is None
    else:
        assert sparse.stats.missed_mass == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_close_to_float32(dtype: str) -> None:
    """Rounding to 8 bits changes logits by a few hundredths, but wrong KV would change them by whole units."""
    tokens = tiny_prompt(60)
    exact = LLM(tiny_model("llama"), policy="full", host_memory="8MiB")
    half = LLM(tiny_model("llama", dtype=getattr(torch, dtype)), policy="full", host_memory="8MiB", dtype=dtype)
    [a], [b] = (llm.score([tokens[:40]], [tokens[40:]]) for llm in (exact, half))
    assert half.geometry == exact.geometry
    assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)) < (
        0.25 if dtype == "bfloat16" else 0.05
    )


def test_score_equals_transformers_log_softmax_for_any_prefill() -> None:
    model = tiny_model("qwen3")
    tokens = tiny_prompt(50)
    rows = torch.log_softmax(model(torch.tensor([tokens])).logits[0].float(), dim=-1)
    expected = [rows[i - 1, tokens[i]].item() for i in range(30, 50)]
    llm = LLM(model, policy="full", host_memory="8MiB")
    for decode_from in (None, 0, 1, 17):
        scores = llm.score([tokens[:30], tokens[:30]], [tokens[30:], tokens[30:40]], decode_from=decode_from)
        assert scores[0].logprobs == pytest.approx(expected, abs=2e-5)
        assert scores[1].logprobs == pytest.approx(expected[:10], abs=2e-5)
        assert scores[0].is_greedy == [rows[i - 1].argmax().item() == tokens[i] for i in range(30, 50)]
    assert llm.runner.pool.sequence_bytes == 0
    llm.runner.check_integrity()
