"""Test quantised KV: its size, its error bounds, and the tokens of models that use it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.outputs import completed
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.kv_cache import kv_format
from offload_rt.kv_cache.kv_format import Quantised, make_kv_format

DIMS = [5, 16, 18, 24, 64, 67, 80, 96, 128, 160, 256]


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_sizes_of_encoded_vectors(head_dim: int, bits: int) -> None:
    """With d = 128, an int4 vector takes 64 bytes for codes, plus 4 bytes for each of its two groups."""
    fmt = make_kv_format(f"int{bits}", torch.float32, head_dim)  # type: ignore[arg-type]
    rows = torch.randn(3, 5, head_dim)
    assert fmt.encode(rows).shape == (3, 5, fmt.width) and fmt.storage == torch.uint8
    assert fmt.width == -(-head_dim * bits // 8) + 4 * -(-head_dim // 64)
    assert fmt.decode(fmt.encode(rows)).shape == rows.shape


@settings(deadline=None)
@given(
    head_dim=st.sampled_from(DIMS),
    bits=st.sampled_from([8, 4, 2]),
    scale=st.floats(1e-3, 1e2),
    offset=st.floats(-50, 50),
    seed=st.integers(0, 99),
)
def test_quantisation_error_is_at_most_half_a_step(
    head_dim: int, bits: int, scale: float, offset: float, seed: int
) -> None:
    fmt = Quantised(bits, torch.float32, head_dim)
    rows = torch.randn(7, head_dim, generator=torch.Generator().manual_seed(seed)) * scale + offset
    errors = (fmt.decode(fmt.encode(rows)) - rows).abs()
    size = -(-head_dim // fmt.groups)
    for group, error in zip(rows.split(size, -1), errors.split(size, -1), strict=True):
        span = group.amax(-1) - group.amin(-1)
        # Half a step, plus the float16 rounding of minimum and step: 2^-11 of the magnitude and of the range.
        bound = span / (2 * (2**bits - 1)) + 2.0**-10 * (group.abs().amax(-1) + span) + 1e-4
        assert (error.amax(-1) <= bound).all()


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_constant_vectors_stay_constant(bits: int) -> None:
    fmt = Quantised(bits, torch.float32, 64)
    for value in (0.0, 1.5, -3.0):
        assert torch.equal(fmt.decode(fmt.encode(torch.full((2, 64), value))), torch.full((2, 64), value))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_vectors_decoded_in_parts_are_equal(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    format = Quantised(bits, torch.bfloat16, 24)
    stored = format.encode(torch.randn(2, 3, 50, 24).bfloat16())[:, :, 5:]
    expected = format.decode(stored)
    monkeypatch.setattr(kv_format, "DECODED_AT_ONCE", 24 * 7)
    assert torch.equal(format.decode(stored), expected)


def test_native_format_does_not_change_vectors() -> None:
    rows = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    fmt = make_kv_format("auto", torch.bfloat16, 8)
    assert fmt.encode(rows) is rows and fmt.decode(rows) is rows and fmt.exact
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        make_kv_format("int9", torch.float32, 64)  # type: ignore[arg-type]


def make_llm(kv_cache_dtype: str, policy: str = "full", **options: Any) -> LLM:
    model = tiny_model("llama")
    return LLM(model, policy=policy, policy_options=options, host_memory="8MiB", kv_cache_dtype=kv_cache_dtype)  # type: ignore[arg-type]


def test_fewer_bits_give_fewer_bytes_and_a_larger_error() -> None:
    tokens = tiny_prompt(104)
    [exact] = make_llm("auto").score([tokens[:80]], [tokens[80:]])
    losses = []
    for name, width in (("int8", 32 + 4), ("int4", 16 + 4), ("int2", 8 + 4)):
        llm = make_llm(name)
        [rounded] = llm.score([tokens[:80]], [tokens[80:]])
        assert rounded.stats.h2d_bytes * 128 == exact.stats.h2d_bytes * width
        assert rounded.stats.kv_bytes_host * 128 == exact.stats.kv_bytes_host * width
        assert llm.runner.pool.block_bytes == 2 * 3 * 2 * BLOCK_SIZE * width
        # The first scored token attends to 79 quantised KV entries and an exact one. Prefill attends to exact KV.
        losses.append(max(abs(a - b) for a, b in zip(rounded.logprobs, exact.logprobs, strict=True)))
    assert losses[0] < 0.1 < losses[2] and losses[0] < losses[1] < losses[2]


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int2"])
def test_formats_work_with_selection_forks_batches_and_eviction(kv_cache_dtype: str) -> None:
    """Resident KV is not quantised, so selection equals `full` only if the budget is 1.0 and the windows are equal."""
    params = SamplingParams(max_tokens=8, temperature=0)
    prompts = [tiny_prompt(length, seed=length) for length in (1, 70, 124)]
    full = [c.token_ids for c in completed(make_llm(kv_cache_dtype).generate(prompts, params))]
    options = {"alpha": math.inf, "max_fraction": 1.0, "dense_layers": (), "sinks": 0, "recent": 1}
    select_all = make_llm(kv_cache_dtype, "infinigen", **options)
    assert [c.token_ids for c in completed(select_all.generate(prompts, params))] == full
    assert [completed(make_llm(kv_cache_dtype).generate([prompt], params))[0].token_ids for prompt in prompts] == full
    scores = make_llm(kv_cache_dtype).score([prompts[1]] * 2, [full[1]] * 2)
    assert scores[0].logprobs == scores[1].logprobs
    bounded = LLM(
        tiny_model("llama"),
        policy_options={"recent": 8},
        host_memory=2 * select_all.runner.pool.block_bytes,
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
        eviction="lru",
    )
    [long] = completed(bounded.generate([prompts[2]], SamplingParams(max_tokens=20, temperature=0)))
    assert len(long.token_ids) == 20 and bounded.runner.pool.bytes_used == 0


def test_quantised_prefix_is_not_reused() -> None:
    """Prefill attends to KV that is not yet quantised, so reusing quantised KV would change the result."""
    llm, params = make_llm("int4"), SamplingParams(max_tokens=20, temperature=0)
    first, second = (completed(llm.generate([tiny_prompt(150)], params))[0] for _ in range(2))
    assert first.token_ids == second.token_ids and second.stats.reused_tokens == 0
