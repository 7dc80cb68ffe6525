"""Compare scores of compressed keys, their maxima and LSE, and the compression of a new key with float64."""

from __future__ import annotations

import math

import pytest
import torch
from support.interpreter import is_compiled
from support.select_models import dequantise

from offload_rt.kernels import lists
from offload_rt.kernels.pointer_table import PointerTable
from offload_rt.kernels.selection import GAUSSIAN_STEP, pack, quantise, quantise_query, unpack

PARTIAL_SHAPES = [
    (38, 4, torch.float16),
    (19, 1, torch.float32),
    (38, 16, torch.bfloat16),
    (76, 3, torch.bfloat16),
    (19, 20, torch.float32),
]
PACKED_SHAPES = [
    (64, 1, 4),
    (80, 4, 2),
    (96, 3, 8),
    (128, 16, 4),
    (256, 2, 8),
    (19, 8, 8),
    (128, 4, 2),
    (576, 20, 4),
    (96, 20, 2),
    (176, 20, 8),
]
HEADS = 2


def ragged_ranges(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return starts and stops `[P]` for two sequences, and the number of stored tokens. The second range is empty."""
    stored = 131_072 if is_compiled(device) else 520
    stops = torch.tensor([stored - 13, stored - 13, 4, 4], dtype=torch.int32, device=device)
    return torch.tensor([5, 5, 4, 4], dtype=torch.int32, device=device), stops, stored


def separate_tensors(lists_: torch.Tensor) -> PointerTable:
    """Split `[P, a, c]` into two sequences in separate memory. The second one has more capacity."""
    wider = torch.nn.functional.pad(lists_[HEADS:], (0, 0, 0, 3))
    return PointerTable.of([lists_[:HEADS], wider[:, : lists_.shape[1]]])


def check_scores(actual: lists.Scores, expected: lists.Scores, tolerance: torch.Tensor) -> None:
    """Compare scores with a `tolerance` `[P, G, 1]`. Check that maximum and LSE match the actual scores."""
    finite = expected.scores.isfinite()
    assert torch.equal(actual.scores.isfinite(), finite)
    error = torch.where(finite, actual.scores.double() - expected.scores, 0).abs()
    assert (error <= tolerance).all(), f"{float((error / tolerance).max())} times the bound"
    assert torch.equal(actual.maxima.amax(-1), actual.scores.amax(-1))
    torch.testing.assert_close(actual.lse.double(), torch.logsumexp(actual.scores.double(), -1), rtol=1e-6, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("capacity", [9, 8], ids=["odd", "aligned"])
@pytest.mark.parametrize(("r", "group", "dtype"), PARTIAL_SHAPES)
def test_partial_scores_equal_float64(
    kernel_device: torch.device, r: int, group: int, dtype: torch.dtype, capacity: int
) -> None:
    """Unaligned columns are read one element at a time. For aligned columns, wide loads may go past the last token."""
    from offload_rt.kernels.triton_scores import partial_scores

    torch.manual_seed(r)
    starts, stops, stored = ragged_ranges(kernel_device)
    q = torch.randn(4, group, r, device=kernel_device)
    keys = torch.randn(4, r, stored + capacity, device=kernel_device).to(dtype)[:, :, :stored]
    keys[:, :, stored - 13 :] = math.nan  # reserved, never written
    table = separate_tensors(keys)
    assert table.aligned == (capacity == 8)
    actual = partial_scores(q, table, starts, stops, stored + 250)
    expected = lists.partial_scores(q.double(), table, starts, stops, stored + 250)
    # r products and sums, each rounded to 2^-24 of the sum of |q k|, which is at most |q|_1 * max |k|
    bound = r * 2.0**-24 * q.double().abs().sum(-1, keepdim=True) * keys[:, :, : stored - 13].double().abs().max()
    check_scores(actual, expected, bound)


@pytest.mark.parametrize(("d", "group", "bits"), PACKED_SHAPES)
def test_quantised_scores_equal_integer_products(kernel_device: torch.device, d: int, group: int, bits: int) -> None:
    from offload_rt.kernels.triton_scores import quantised_scores

    torch.manual_seed(d + bits)
    starts, stops, stored = ragged_ranges(kernel_device)
    mean = torch.randn(HEADS, d, device=kernel_device)
    step = torch.rand(HEADS, d, device=kernel_device) + 0.01
    codes = torch.randint(0, 1 << bits, (4, stored, d), dtype=torch.uint8, device=kernel_device)
    # padding after the columns of a row
    padding = torch.randint(-128, 128, (4, stored * bits // 8, -d % 16), dtype=torch.int8, device=kernel_device)
    packed, q = torch.cat((pack(codes, bits), padding), 2), torch.randn(4, group, d, device=kernel_device)
    assert separate_tensors(packed).aligned
    actual = quantised_scores(q, separate_tensors(packed), mean, step, bits, starts, stops, stored)
    # Compute the definition in float64 from the int8 query of float32, so that only the last steps round differently.
    weights, scale = quantise_query(q * step.repeat(2, 1).unsqueeze(1))
    centred = codes.double() - ((1 << bits) - 1) / 2
    exact = weights.double() @ centred.transpose(1, 2) * scale.double()
    exact += q.double() @ mean.double().repeat(2, 1).unsqueeze(2)
    expected = lists.mask_scores(exact, starts, stops)
    magnitudes = q.double().abs() * (mean.double().abs() + step.double() * (1 << bits)).repeat(2, 1).unsqueeze(1)
    check_scores(actual, expected, d * 2.0**-24 * magnitudes.sum(-1, keepdim=True))


def test_quantised_scores_equal_the_torch_definition(kernel_device: torch.device) -> None:
    """Integer sums are exact. Rounding after them changes scores below 64 by at most one unit in the last place."""
    from offload_rt.kernels.triton_scores import quantised_scores

    torch.manual_seed(3)
    starts, stops, stored = ragged_ranges(kernel_device)
    mean, step = torch.zeros(HEADS, 64, device=kernel_device), torch.rand(HEADS, 64, device=kernel_device)
    packed = torch.randint(-128, 128, (4, stored // 2, 64), dtype=torch.int8, device=kernel_device)
    q = torch.randn(4, 5, 64, device=kernel_device)
    table = separate_tensors(packed)
    actual = quantised_scores(q, table, mean, step, 4, starts, stops, stored)
    expected = lists.quantised_scores(q, table, mean, step, 4, starts, stops, stored)
    torch.testing.assert_close(actual.scores, expected.scores, rtol=3e-7, atol=4e-6)


@pytest.mark.parametrize(
    ("d", "r", "dtype"),
    [(64, 19, torch.float32), (80, 24, torch.float16), (256, 76, torch.bfloat16), (576, 173, torch.float32)],
)
def test_appended_column_equals_the_skewed_key(kernel_device: torch.device, d: int, r: int, dtype: torch.dtype) -> None:
    from offload_rt.kernels.triton_append import append_partial

    torch.manual_seed(d)
    k = torch.randn(4, d, device=kernel_device).to(dtype)
    basis = torch.linalg.qr(torch.randn(HEADS, d, d, device=kernel_device)).Q[:, :, :r].contiguous()
    keys = torch.randn(4, r, 33, device=kernel_device).to(dtype)
    slots, expected, table = torch.tensor([0, 32, 7, 7], device=kernel_device), keys.double(), separate_tensors(keys)
    append_partial(k, basis, table, slots)
    keys = torch.cat(table.tensors)
    lists.append_partial(k.double(), basis.double(), PointerTable.of(expected.split(HEADS)), slots)
    unit = torch.finfo(dtype).eps
    if is_compiled(kernel_device) or dtype != torch.bfloat16:
        unit /= 2  # round to nearest; the interpreter truncates bfloat16
    bound = unit * expected.abs() + d * 2.0**-24 * k.double().abs().max()
    assert ((keys.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(
    ("d", "r", "dtype"),
    [(64, 64, torch.float32), (96, 28, torch.bfloat16), (128, 128, torch.float16), (576, 173, torch.bfloat16)],
)
def test_appended_code_equals_the_quantised_key(
    kernel_device: torch.device, d: int, r: int, dtype: torch.dtype, bits: int
) -> None:
    """The appended key, once dequantised, is within half a quantisation step of the original. The codes of other
    tokens do not change."""
    from offload_rt.kernels.triton_append import append_quantised

    torch.manual_seed(d + bits)
    k = torch.randn(4, d, device=kernel_device).to(dtype)
    basis = torch.linalg.qr(torch.randn(HEADS, d, d, device=kernel_device)).Q[:, :, :r].contiguous()
    mean = torch.randn(HEADS, r, device=kernel_device) * 0.1
    step = torch.full((HEADS, r), GAUSSIAN_STEP[bits], device=kernel_device)
    packed = torch.randint(-128, 128, (4, 9, r), dtype=torch.int8, device=kernel_device)
    slots, before = torch.tensor([0, 8, 3, 5], device=kernel_device), unpack(packed, bits)
    table = separate_tensors(packed)
    append_quantised(k, basis, mean, step, bits, table, slots)
    after = unpack(torch.cat(table.tensors), bits)
    skewed = torch.einsum("bhd,hdr->hbr", k.double().view(2, HEADS, d), basis.double())
    expected = quantise(skewed, mean.double(), step.double(), bits)
    heads = torch.arange(4, device=kernel_device)
    actual = after[heads, slots].view(2, HEADS, r).transpose(0, 1)
    tolerance = step.double().unsqueeze(1) / 2 + d * 2.0**-22
    within_tolerance = (dequantise(actual, mean.double(), step.double(), bits) - skewed).abs() <= tolerance
    assert (within_tolerance | (actual == expected)).all() and (actual == expected).float().mean() > 0.999
    after[heads, slots] = before[heads, slots]
    assert torch.equal(after, before)
