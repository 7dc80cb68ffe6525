"""Compare token selection and integer scores in C with their torch definitions, including ties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import examples
from support.select_models import as_sets

from offload_rt.kernels.selection import (
    _code_sums_cpu,
    code_sums,
    extend_selection,
    floor_fraction,
    pack,
    select_tokens,
    select_tokens_reference,
    selection_limit,
    token_count,
    top_tokens,
)


@st.composite
def score_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw scores `[Hkv, G, N]` that are continuous, have few distinct values, are all equal, or are partly -inf."""
    shape = (draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 600)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    scores = torch.randn(shape, generator=generator, dtype=draw(st.sampled_from([torch.float32, torch.float64]))) * 4
    kind = draw(st.sampled_from(["continuous", "ties", "equal", "minus infinity"]))
    if kind == "ties":
        scores = (scores / 3).round()
    elif kind == "equal":
        scores = torch.zeros_like(scores)
    elif kind == "minus infinity":
        scores = scores.masked_fill(torch.rand(shape, generator=generator) < 0.5, -math.inf)
    return scores


alphas = st.one_of(st.just(0.0), st.just(math.inf), st.floats(0, 12))


@given(score_tensors(), alphas, st.floats(0.01, 1))
@settings(max_examples=examples(120), deadline=None)
def test_fast_selection_equals_the_reference(scores: torch.Tensor, alpha: float, max_fraction: float) -> None:
    limit = selection_limit(scores.shape[2], max_fraction)
    fast = select_tokens(scores, alpha, limit)
    assert fast.dtype == torch.int64
    assert as_sets(fast) == as_sets(select_tokens_reference(scores, alpha, limit))


@given(score_tensors(), st.floats(0, 1))
@settings(max_examples=examples(100), deadline=None)
def test_fast_top_tokens_equal_the_reference(scores: torch.Tensor, share: float) -> None:
    values = scores[:, 0]
    n = floor_fraction(share, values.shape[1])
    assert as_sets(top_tokens(values, n)) == as_sets(select_tokens_reference(values.unsqueeze(1), math.inf, n))


@pytest.mark.parametrize("group", [1, 2])
def test_nan_scores_are_not_selected(group: int) -> None:
    scores = torch.randn(2, group, 100)
    assert select_tokens(scores * math.nan, 4.0, 10).shape == (2, 0)
    scores[0] = math.nan  # any distinct tokens are valid for this head
    for selected in (select_tokens(scores, 4.0, 10), top_tokens(scores[:, 0], 7)):
        assert ((selected >= 0) & (selected < 100)).all() and all(
            len(set(row)) == len(row) > 0 for row in selected.tolist()
        )


@pytest.mark.parametrize("sampled", [-10.0, 10.0])
def test_misleading_sample_does_not_change_top_tokens(sampled: float) -> None:
    values = torch.rand(2, 1000, generator=torch.Generator().manual_seed(0))
    values[:, ::16] = sampled  # the fast path samples these first
    for n in (1, 50, 100, 400, 999):
        assert as_sets(top_tokens(values, n)) == as_sets(select_tokens_reference(values.unsqueeze(1), math.inf, n))


def test_equal_scores_are_ordered_by_index() -> None:
    scores = torch.tensor([[[1.0, 5.0, 5.0, 5.0, 0.0]], [[7.0, 7.0, 0.0, 0.0, 0.0]]])
    # 3 and 2 tokens pass, so n = 3. Head 1 takes its third token from those that pass in any head.
    assert as_sets(select_tokens(scores, 0.0, 5)) == [{1, 2, 3}, {0, 1, 2}]
    assert as_sets(select_tokens(scores, 0.0, 2)) == [{1, 2}, {0, 1}]


def test_query_head_with_large_scores_does_not_dominate_its_group() -> None:
    scores = torch.full((1, 2, 50), 0.0)
    scores[0, 0, :10] = torch.arange(100.0, 110.0)  # large scores, undecided between tokens 9 and 8
    scores[0, 1, 40] = 20.0  # small scores, a clear maximum at token 40
    assert as_sets(select_tokens(scores, 0.5, 50)) == [{40}], "a count of 1 goes to the certain head"
    assert as_sets(select_tokens(scores, 1.5, 50)) == [{9, 40}], "count ceil((2 + 1) / 2)"


@pytest.mark.parametrize(
    ("passing", "heads", "candidates", "fraction", "expected"),
    [(10, 4, 100, 1.0, 3), (12, 4, 100, 1.0, 3), (4, 4, 3, 0.2, 1), (400, 4, 100, 0.2, 20), (40, 4, 10, 0.3, 3),
     (0, 4, 0, 0.2, 0)],
)  # fmt: skip
def test_token_count(passing: int, heads: int, candidates: int, fraction: float, expected: int) -> None:
    assert token_count(passing, heads, selection_limit(candidates, fraction)) == expected


@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 70),
    st.sampled_from([8, 19, 64, 256]),
    st.sampled_from([2, 4, 8]),
)
@settings(max_examples=examples(60), deadline=None)
def test_integer_code_sums_are_exact(heads: int, group: int, rows: int, d: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 1 << bits, (heads, rows * (8 // bits), d), generator=generator, dtype=torch.uint8)
    weights = torch.randint(-127, 128, (heads, group, d), generator=generator, dtype=torch.int8)
    expected = weights.double() @ codes.double().transpose(1, 2)
    packed = pack(codes, bits)
    for sums in (code_sums, _code_sums_cpu):
        assert torch.equal(sums(weights, packed, bits, torch.float32).double(), expected)


def test_extension_adds_no_token_without_missed_mass() -> None:
    scores = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0))
    assert extend_selection(scores, torch.ones(2, 20, dtype=torch.bool), 0.01, 0).shape == (2, 0)
    half = torch.arange(20).expand(2, 20) < 10
    assert extend_selection(scores, half, 0.999, 10).shape == (2, 0)
    assert as_sets(extend_selection(scores, half, 0.0, 10)) == [set(range(10, 20))] * 2
