"""Compare low-bit KV, and attention to it, with reference implementations."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from support.levels import unload
from support.low_bit import approximate_only, cloned_pages, concatenated_pages, ragged_lists, random_pages, table_of

from offload_rt.kernels import low_bit, low_bit_lists, low_bit_sequence, native, selection
from offload_rt.kernels.low_bit import (
    KEY_BITS,
    Layout,
    approximate_attention,
    decode_steps,
    dequantise_rows,
    encode_steps,
    low_bit_scores,
    mixing,
    quantise_rows,
    unpack_rows,
)
from offload_rt.kernels.low_bit_sequence import LowBitQuery, low_bit_query
from offload_rt.kernels.pages import BLOCK, PAGE_TOKENS, Pages
from offload_rt.kernels.reference import merge_lse
from offload_rt.kernels.selection import quantise_query
from offload_rt.utils import native_code
from offload_rt.utils.allocator import RecycledMemory


@pytest.mark.parametrize("d", [12, 16, 20, 64, 80, 128])
def test_mixing_matrix_is_orthogonal_with_small_entries(d: int) -> None:
    mixed = mixing(d)
    torch.testing.assert_close(mixed @ mixed.T, torch.eye(d, dtype=torch.float64), rtol=0, atol=1e-14)
    odd = d // (d & -d)
    assert mixed.abs().max() <= (2 / d) ** 0.5 + 1e-12 if odd > 1 else mixed.abs().max() <= d**-0.5 + 1e-12


def test_steps_round_up_by_at_most_an_eighth() -> None:
    steps = torch.cat((torch.logspace(-5, 3, 999), torch.tensor([1.0, 2.0, 1.875, 2.0**-20])))
    decoded = decode_steps(encode_steps(steps))
    assert (decoded >= steps).all() and (decoded <= steps * 1.125).all()
    assert decode_steps(encode_steps(decoded)).equal(decoded), "a representable step is not changed"
    assert decode_steps(encode_steps(torch.tensor([0.0, 1e-30]))).eq(2.0**-20).all()


@pytest.mark.parametrize("bits", [2, 4])
def test_rows_are_dequantised_within_half_a_step(bits: int) -> None:
    rows = torch.randn(3, 50, 16) * torch.logspace(-3, 2, 50)[:, None]
    packed, steps = quantise_rows(rows, bits)
    assert packed.shape == (3, 50, 16 * bits // 8) and packed.dtype == steps.dtype == torch.uint8
    error = (dequantise_rows(packed, steps, bits, torch.float32) - rows).abs()
    assert (error <= decode_steps(steps).unsqueeze(-1) * (0.5 + 1e-5)).all()
    assert unpack_rows(packed, bits).amax() == 2**bits - 1 and unpack_rows(packed, bits).amin() == 0


def reference_attention(
    q: torch.Tensor, mean: torch.Tensor, pages: Pages, layout: Layout, tokens: range, skip: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention to dequantised KV in float64, with the query quantised as in the kernels."""
    weights, scale = quantise_query(q)
    keys, values = (
        dequantise_rows(*(part.flatten(1, 2) for part in parts), bits, torch.float64)
        for parts, bits in (
            (layout.keys(concatenated_pages(pages)), KEY_BITS),
            (layout.values(concatenated_pages(pages)), layout.value_bits),
        )
    )
    shift = torch.einsum("hgd,hd->hg", q.double(), mean.double()).unsqueeze(-1)
    scores = torch.einsum("hgd,hnd->hgn", weights.double() * scale, keys) + shift
    hidden = torch.ones(keys.shape[:2], dtype=torch.bool)
    hidden[:, tokens.start : tokens.stop] = False
    for head, row in enumerate(skip.tolist()):
        hidden[head, [token for token in row if token >= 0]] = True
    scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
    return (scores.softmax(-1).nan_to_num() @ values), scores.logsumexp(-1)


@pytest.mark.parametrize("value_bits", [2, 4])
@pytest.mark.parametrize("tokens", [range(64), range(5, 177), range(64, 65), range(500, 530), range(512, 1024)])
def test_approximate_attention_excludes_skipped_tokens(value_bits: int, tokens: range) -> None:
    layout = Layout(32, value_bits)
    pages, q, mean = random_pages(layout, 2, 1100), torch.randn(2, 3, 32) / 6, torch.randn(2, 32)
    skip = torch.stack([torch.randperm(len(tokens))[: len(tokens) // 3] + tokens.start for _ in range(2)])
    skip = torch.cat((skip, torch.tensor([[-1], [-1]])), 1)
    out, lse = approximate_attention(q, mean, pages, layout, tokens, skip)
    expected, expected_lse = reference_attention(q, mean, pages, layout, tokens, skip)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-5)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)


def test_approximate_attention_without_tokens_is_zero() -> None:
    layout = Layout(16, 2)
    pages, q = random_pages(layout, 2, 70), torch.randn(2, 2, 16)
    out, lse = approximate_attention(q, torch.zeros(2, 16), pages, layout, range(3, 6), torch.tensor([[3, 4, 5]] * 2))
    assert out.eq(0).all() and lse.isneginf().all()


def test_batched_scores_equal_those_of_each_sequence() -> None:
    layout = Layout(16, 2)
    pages = [random_pages(layout, 2, 100), random_pages(layout, 2, 600)]
    q, mean = torch.randn(4, 3, 16), torch.randn(2, 16)
    starts, stops = torch.tensor([2, 2, 2, 2]), torch.tensor([90, 90, 580, 580])
    batched = low_bit_lists.scores(q, mean, layout, table_of(pages), starts, stops, 600)
    for b, stop in enumerate((90, 580)):
        own = slice(2 * b, 2 * b + 2)
        scores = low_bit_scores(q[own], mean, pages[b], layout, range(2, stop))
        torch.testing.assert_close(batched.scores[own, :, 2:stop], scores, rtol=0, atol=1e-5)
        assert batched.scores[own, :, stop:].isneginf().all() and batched.scores[own, :, :2].isneginf().all()


@pytest.mark.parametrize("value_bits", [2, 4])
def test_batch_merges_approximate_attention_to_tokens_not_selected(value_bits: int) -> None:
    q, mean, mixed, layout, table, starts, stops, chosen, counts, tokens, out, lse = ragged_lists(
        Layout(16, value_bits), 3, torch.device("cpu")
    )
    merged, total = low_bit_lists.merge_approximate(
        q, mean, mixed, layout, table, starts, stops, chosen, counts, tokens, out, lse
    )
    for b, pages in enumerate(table.pages):
        own, span = slice(2 * b, 2 * b + 2), range(int(starts[2 * b]), int(stops[2 * b]))
        skip = chosen[own, : int(counts[2 * b])]
        expected, expected_lse = out[own].double(), lse[own].double()
        if skip.shape[1] < len(span):
            tail, tail_lse = reference_attention(q[own], mean, pages, layout, span, skip)
            expected, expected_lse = merge_lse([expected, tail @ mixed.double().T], [expected_lse, tail_lse])
        torch.testing.assert_close(merged[own].double(), expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(total[own].double(), expected_lse, rtol=0, atol=2e-5)


def test_rows_of_a_batch_are_appended_to_each_sequence() -> None:
    layout = Layout(16, 4)
    pages = [random_pages(layout, 2, PAGE_TOKENS + 64), random_pages(layout, 2, 128)]
    before = [concatenated_pages(own) for own in pages]
    slots = torch.tensor([PAGE_TOKENS + 63] * 2 + [5, 5])
    basis, mean, k, v = torch.randn(2, 16, 16), torch.randn(2, 16), torch.randn(4, 16), torch.randn(4, 16)
    mixed = mixing(16).float()
    low_bit_lists.append_rows(k, v, basis, mean, mixed, layout, table_of(pages), slots)
    for b, (own, old) in enumerate(zip(pages, before, strict=True)):
        for head in range(2):
            p = 2 * b + head
            block, row = divmod(int(slots[p]), BLOCK)
            keys = quantise_rows((k[p] @ basis[head] - mean[head]).unsqueeze(0), KEY_BITS)
            values = quantise_rows((v[p] @ mixed).unsqueeze(0), layout.value_bits)
            parts = zip((*layout.keys(old), *layout.values(old)), (*keys, *values), strict=True)
            for part, data in parts:
                part[head, block, row] = data[0]
        assert concatenated_pages(own).equal(old), "only the new rows have changed"


@pytest.fixture(params=["torch", *native_code.available_levels()])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test with torch, and with C code for each instruction set level that this processor supports."""
    if request.param == "torch":
        monkeypatch.setattr(low_bit_sequence, "library", lambda *shape: None)
    else:
        monkeypatch.setenv(native_code.LEVEL_VARIABLE, request.param)
        unload()
        if low_bit_sequence.library(32, 2) is None:
            pytest.skip("no C compiler")
    yield request.param
    unload()


@pytest.mark.sampled(7)  # coprime to the number of values of each parameter, so that all pairs of values occur
@pytest.mark.parametrize("value_bits", [2, 4])
@pytest.mark.parametrize(("d", "group"), [(32, 1), (64, 7), (64, 3), (96, 9), (128, 4), (32, 33)])
@pytest.mark.parametrize("tokens", [range(5, 177), range(1100), range(64, 65), range(500, 530)])
def test_cpu_attention_equals_the_definition(
    implementation: str, tokens: range, d: int, group: int, value_bits: int
) -> None:
    layout = Layout(d, value_bits)
    pages, q, mean = random_pages(layout, 2, 1100), torch.randn(2, group, d) / 4, torch.randn(2, d)
    skip = torch.stack([torch.randperm(len(tokens))[: len(tokens) // 3] + tokens.start for _ in range(2)])
    skip = torch.cat((skip, torch.tensor([[-1], [-1]])), 1)
    expected = low_bit_scores(q, mean, pages, layout, tokens)
    query = low_bit_query(q, mean, pages, layout, tokens)
    torch.testing.assert_close(query.scores, expected, rtol=1e-6, atol=1e-5)
    softcap = None if group == 1 else 1.5
    out, lse = approximate_only(query, skip, softcap)
    expected, expected_lse = approximate_attention(q, mean, pages, layout, tokens, skip, softcap)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-5)
    packed, steps = (part.flatten(1, 2)[:, :1100] for part in layout.values(concatenated_pages(pages)))
    largest = dequantise_rows(packed, steps, value_bits, torch.float32)
    # The C code rounds the weights of values to 16 bits.
    torch.testing.assert_close(out, expected, rtol=0, atol=2**-15 * float(largest.abs().max()))


@pytest.mark.parametrize(("group", "value_bits"), [(1, 2), (7, 4)])
def test_exact_and_approximate_attention_are_merged_by_lse(implementation: str, group: int, value_bits: int) -> None:
    layout, tokens, skip = Layout(64, value_bits), range(4, 300), torch.tensor([[5, 7], [9, -1]])
    pages, q, mean = random_pages(layout, 2, 300), torch.randn(2, group, 64) / 4, torch.randn(2, 64)
    approximate_out, approximate_lse = approximate_attention(q, mean, pages, layout, tokens, skip)
    mixed, out = mixing(64).float(), torch.randn(2, group, 64)
    unmixing = mixed.T.contiguous()
    for lse_difference in (20.0, 0.0, -20.0):  # exact attention has most, half or none of the attention mass
        exact = out, approximate_lse + lse_difference
        expected, total = merge_lse((out, approximate_out @ unmixing), (exact[1], approximate_lse))
        query = low_bit_query(q, mean, pages, layout, tokens)
        merged, lse = query.merge((out.clone(), exact[1].clone()), skip, (mixed, unmixing))
        torch.testing.assert_close(lse, total, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(merged, expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("implementation", native_code.available_levels(), indirect=True)
def test_selected_tokens_outside_the_scored_tokens_are_ignored(implementation: str) -> None:
    """With queries that are not finite, any token may be selected."""
    layout, tokens = Layout(32, 2), range(192, 300)
    pages, q = random_pages(layout, 2, 600), torch.randn(2, 2, 32)
    query = low_bit_query(q, torch.zeros(2, 32), pages, layout, tokens)
    outside = torch.tensor([[0, 3, 191, 300, 599]] * 2)
    for found, expected in zip(approximate_only(query, outside), approximate_only(query, outside - 600), strict=True):
        assert torch.equal(found, expected)


def test_cpu_attention_without_tokens_is_zero(implementation: str) -> None:
    layout = Layout(32, 2)
    pages, q = random_pages(layout, 2, 130), torch.randn(2, 2, 32)
    skip = torch.arange(3, 120).repeat(2, 1)
    out, lse = approximate_only(low_bit_query(q, torch.zeros(2, 32), pages, layout, range(3, 120)), skip)
    assert out.eq(0).all() and lse.isneginf().all()


def test_misleading_score_sample_does_not_change_the_selection(level: str) -> None:
    scores = torch.randn(1, 1, 1600) - 20
    scores[..., ::16] += 20  # the code estimates the n-th largest score from this sample
    for alpha, limit in ((math.inf, 300), (math.inf, 1600), (18.0, 300)):
        selected = selection.select_in_c(scores, scores.amax(-1), scores.logsumexp(-1), alpha, limit)
        if selected is None:
            pytest.skip("no C compiler")
        assert selected.equal(selection.select_tokens_reference(scores, alpha, limit).sort(1).values)


@pytest.mark.parametrize(("alpha", "max_fraction"), [(1.0, 0.3), (4.0, 0.5), (float("inf"), 1.0)])
@pytest.mark.parametrize(("group", "tokens"), [(1, range(5, 177)), (7, range(5, 600)), (3, range(64, 65))])
def test_cpu_selection_and_storage_equal_the_definition(
    implementation: str, group: int, tokens: range, alpha: float, max_fraction: float
) -> None:
    layout = Layout(64, 2)
    pages, q, mean = random_pages(layout, 2, 600), torch.randn(2, group, 64) / 4, torch.randn(2, 64)
    queries = [create_query(q, mean, pages, layout, tokens) for create_query in (LowBitQuery, low_bit_query)]
    limit = selection.selection_limit(len(tokens), max_fraction)
    chosen = [query.select(alpha, limit).sort(1).values for query in queries]
    assert chosen[0].equal(chosen[1])
    best = [query.select(math.inf, len(tokens) // 3).sort(1).values for query in queries]
    assert best[0].equal(best[1])
    rows = torch.randn(2, 130, 64) * torch.logspace(-2, 2, 130)[:, None]
    rows[:, 3], rows[:, 4] = 0, torch.linspace(-1, 1, 64)
    rows[:, 5, ::2] = -1e5
    expected = cloned_pages(pages)
    for values in (False, True):
        low_bit.store_rows(pages, layout, rows, 461, values=values)
        low_bit_sequence.store_rows(expected, layout, rows, 461, values=values)
    assert concatenated_pages(pages).equal(concatenated_pages(expected))


def test_scores_of_a_layer_reuse_the_memory_of_the_previous_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system allocator might not reuse memory that is freed after a long context."""
    monkeypatch.setattr(native, "SCRATCH", RecycledMemory())
    layout, tokens, skip = Layout(32, 4), range(4, 5500), torch.tensor([[7], [9]])
    pages, q, mean = random_pages(layout, 2, 5500), torch.randn(2, 7, 32), torch.randn(2, 32)
    if low_bit_sequence.library(32, 4) is None:
        pytest.skip("no C compiler")
    for _ in range(3):
        query = low_bit_query(q, mean, pages, layout, tokens)
        assert query.select(math.inf, 5).shape == (2, 5) and approximate_only(query, skip)[1].isfinite().all()
        assert native.SCRATCH.nbytes == 0, "a query keeps its scores"
        del query
        assert 2 * 7 * 5504 * 4 <= native.SCRATCH.nbytes < 2 * 7 * 5504 * 4 * 1.13, "the scores of one layer"


def test_instruction_set_levels_give_equal_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of codes are exact and are added in the same order, so all levels with FMA give the same bits."""
    layout, tokens, results = Layout(64, 4), range(7, 3000), {}
    pages, q, mean = random_pages(layout, 2, 3000), torch.randn(2, 7, 64) / 4, torch.randn(2, 64)
    for level in native_code.available_levels():
        monkeypatch.setenv(native_code.LEVEL_VARIABLE, level)
        unload()
        if low_bit_sequence.library(64, 4) is None:
            pytest.skip("no C compiler")
        query = low_bit_query(q, mean, pages, layout, tokens)
        chosen = query.select(3.0, selection.selection_limit(len(tokens), 0.2))
        results[level] = (query.scores, chosen, *approximate_only(query, chosen + 7))
    unload()
    scalar = results.pop("scalar", None)
    for scores, chosen, out, lse in results.values():
        first = next(iter(results.values()))
        assert all(own.equal(other) for own, other in zip((scores, chosen, out, lse), first, strict=True))
    if results and scalar is not None:
        torch.testing.assert_close(scalar[0], next(iter(results.values()))[0], rtol=1e-6, atol=1e-5)
