"""Compare the Triton kernels that store, score and attend to low-bit KV with their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.low_bit import cloned_pages, concatenated_pages, ragged_lists, random_pages, table_of

from offload_rt.kernels import low_bit, low_bit_lists
from offload_rt.kernels.low_bit import KEY_BITS, Layout, approximate_attention, dequantise_rows, mixing, unpack_rows
from offload_rt.kernels.pages import BLOCK, PAGE_TOKENS, Pages

SHAPES = [(64, 3, 4), (80, 1, 2), (10, 2, 4), (192, 20, 2), (576, 20, 4)]
"""Head dimension, group size, bits per value. Tiles of 192 and 576 are split. Groups of 20 heads need two programs."""


def largest_value(layout: Layout, pages: Pages, tokens: int) -> float:
    """Return the largest absolute element of the first `tokens` values. Later tokens are uninitialised."""
    packed, steps = (part.flatten(1, 2)[:, :tokens] for part in layout.values(concatenated_pages(pages)))
    return float(dequantise_rows(packed, steps, layout.value_bits, torch.float32).abs().max())


def rounding(device: torch.device) -> float:
    """Return the relative rounding error of attention weights: that of bfloat16 on CUDA, of float32 otherwise."""
    return 2**-8 if device.type == "cuda" else 4e-6


def single_sequence_arguments(
    q: torch.Tensor, mean: torch.Tensor, pages: Pages, layout: Layout, tokens: range, skip: torch.Tensor
) -> tuple[Any, ...]:
    """Return arguments for `merge_approximate`, for one sequence without exact attention. Values are not mixed."""
    bounds = torch.tensor([tokens.start, tokens.stop, skip.shape[1]], dtype=torch.int32, device=q.device)
    starts, stops, counts = bounds.unsqueeze(1).repeat(1, len(q))
    no_exact_attention = torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    identity, table = torch.eye(q.shape[2], device=q.device), table_of([pages])
    return q, mean, identity, layout, table, starts, stops, skip.contiguous(), counts, tokens.stop, *no_exact_attention


@pytest.mark.sampled
@pytest.mark.parametrize(("d", "group", "value_bits"), [(64, 7, 2), (12, 2, 4)])
@pytest.mark.parametrize("skipped", [True, False], ids=["some skipped", "none skipped"])
@pytest.mark.parametrize("tokens", [range(5, 600), range(64, 65), range(510, 560)])
def test_approximate_attention_equals_the_definition(
    kernel_device: torch.device, tokens: range, d: int, group: int, value_bits: int, skipped: bool
) -> None:
    from offload_rt.kernels.triton_low_bit import merge_approximate

    torch.manual_seed(d + group)
    layout = Layout(d, value_bits)
    pages = random_pages(layout, 2, 600, kernel_device)
    q = torch.randn(2, group, d, device=kernel_device) * d**-0.5
    mean = torch.randn(2, d, device=kernel_device)
    skip = torch.stack([torch.randperm(len(tokens))[: len(tokens) // 3] + tokens.start for _ in range(2)])
    skip = torch.cat((skip, torch.tensor([[-1], [-1]])), 1).to(kernel_device)[:, : None if skipped else 0]
    softcap = 1.5 if value_bits == 2 else None
    out, lse = merge_approximate(*single_sequence_arguments(q, mean, pages, layout, tokens, skip), softcap)
    expected, expected_lse = approximate_attention(q, mean, pages, layout, tokens, skip, softcap)
    torch.testing.assert_close(out, expected, rtol=0, atol=rounding(kernel_device) * largest_value(layout, pages, 600))
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-5)


def test_approximate_attention_without_tokens_is_zero(kernel_device: torch.device) -> None:
    from offload_rt.kernels.triton_low_bit import merge_approximate

    layout = Layout(64, 2)
    pages = random_pages(layout, 2, 700, kernel_device)
    q, skip = torch.randn(2, 2, 64, device=kernel_device), torch.arange(3, 640, device=kernel_device).repeat(2, 1)
    mean = torch.zeros(2, 64, device=kernel_device)
    out, lse = merge_approximate(*single_sequence_arguments(q, mean, pages, layout, range(3, 640), skip))
    assert out.eq(0).all() and lse.isneginf().all()


def properties(d: int, group: int, value_bits: int, **other: Any) -> set[Any]:
    """Return the properties of a shape that select specialised code in the kernel."""
    return {("bits", value_bits), ("split", d > 128), ("padded", d % 16 > 0), ("programs", group > 16), group == 1}


@pytest.mark.sampled(features=properties)
@pytest.mark.parametrize(("d", "group", "value_bits"), SHAPES)
def test_batch_is_merged_with_exact_attention(kernel_device: torch.device, d: int, group: int, value_bits: int) -> None:
    from offload_rt.kernels.triton_low_bit import merge_approximate

    torch.manual_seed(d)
    arguments = ragged_lists(Layout(d, value_bits), group, kernel_device)
    table = arguments[4]
    (actual, actual_lse), (expected, expected_lse) = (
        merge_approximate(*arguments),
        low_bit_lists.merge_approximate(*arguments),
    )
    torch.testing.assert_close(actual_lse, expected_lse, rtol=1e-6, atol=1e-5)
    largest = max(largest_value(arguments[3], own, n) for own, n in zip(table.pages, (600, 4, 70), strict=True))
    torch.testing.assert_close(actual, expected, rtol=0, atol=rounding(kernel_device) * largest * d**0.5)
    exact = arguments[-2]
    assert actual[2:6].eq(exact[2:6]).all() and not actual[:2].isclose(exact[:2], atol=0.1).all()


@pytest.mark.parametrize(("d", "group", "value_bits"), SHAPES)
def test_scores_equal_the_definition(kernel_device: torch.device, d: int, group: int, value_bits: int) -> None:
    from offload_rt.kernels.triton_low_bit_scores import scores

    torch.manual_seed(d)
    q, mean, _, layout, table, starts, stops, *_ = ragged_lists(Layout(d, value_bits), group, kernel_device)
    actual = scores(q, mean, layout, table, starts, stops, 700)
    expected = low_bit_lists.scores(q, mean, layout, table, starts, stops, 700)
    torch.testing.assert_close(actual.scores, expected.scores, rtol=1e-6, atol=1e-5)
    assert torch.equal(actual.maxima.amax(-1), actual.scores.amax(-1)) and actual.maxima.amax(-1)[2:4].isneginf().all()
    torch.testing.assert_close(actual.lse, expected.lse, rtol=1e-6, atol=1e-5)


@pytest.mark.sampled(pairs=True)
@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize(("d", "value_bits"), [(64, 4), (80, 2), (12, 4), (576, 4)])
@pytest.mark.parametrize(("start", "count"), [(0, 64), (500, 620), (70, 1), (130, 0)])
def test_stored_prompt_equals_the_definition(
    kernel_device: torch.device, d: int, value_bits: int, start: int, count: int, values: bool
) -> None:
    from offload_rt.kernels.triton_low_bit_rows import store_rows

    torch.manual_seed(d)
    layout = Layout(d, value_bits)
    pages = random_pages(layout, 2, 3 * PAGE_TOKENS - 10, kernel_device).of_layer(1)
    expected = cloned_pages(pages)
    rows = (
        torch.randn(2, count, d, device=kernel_device)
        * torch.logspace(-7, 4, max(1, count), device=kernel_device)[:count, None]
    )
    rows[:, :1], rows[:, 1:2, ::2] = 0, -1e5  # zeros, and very large numbers
    rows[:, 2:3] = torch.linspace(-1, 1, d, device=kernel_device)
    store_rows(pages, layout, rows, start, values=values)
    low_bit.store_rows(expected, layout, rows, start, values=values)
    assert concatenated_pages(pages).equal(concatenated_pages(expected))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("d", "value_bits"), [(64, 4), (80, 2), (576, 4)])
def test_newest_rows_are_appended(kernel_device: torch.device, d: int, value_bits: int, dtype: torch.dtype) -> None:
    """Codes may differ from the definition by one at a rounding boundary. KV of other tokens must not change."""
    from offload_rt.kernels.triton_low_bit_rows import append_rows

    torch.manual_seed(d)
    layout = Layout(d, value_bits)
    pages = [random_pages(layout, 2, tokens, kernel_device) for tokens in (PAGE_TOKENS + 64, 190)]
    copies, positions = [cloned_pages(actual) for actual in pages], (PAGE_TOKENS + 63, 70)
    slots = torch.tensor(positions, device=kernel_device).repeat_interleave(2)
    k, v = torch.randn(2, 4, d, device=kernel_device).to(dtype)
    v[1] = 0
    basis, mean = torch.randn(2, d, d, device=kernel_device), torch.randn(2, d, device=kernel_device)
    arguments = (k, v, basis, mean, mixing(d).float().to(kernel_device), layout)
    append_rows(*arguments, table_of(pages), slots)
    low_bit_lists.append_rows(*arguments, table_of(copies), slots)
    different = 0
    for actual, expected, slot in zip(
        map(concatenated_pages, pages), map(concatenated_pages, copies), positions, strict=True
    ):
        for parts, bits in ((layout.keys, KEY_BITS), (layout.values, value_bits)):
            (packed, steps), (expected_packed, expected_steps) = parts(actual), parts(expected)
            assert steps.equal(expected_steps)
            codes, expected_codes = (
                unpack_rows(x[:, slot // BLOCK, slot % BLOCK], bits).int() for x in (packed, expected_packed)
            )
            assert (codes - expected_codes).abs().max() <= 1
            different += int((codes != expected_codes).sum())
            packed[:, slot // BLOCK, slot % BLOCK] = expected_packed[:, slot // BLOCK, slot % BLOCK]
        assert actual.equal(expected), "other rows have changed"
    assert different <= 2
