"""Test Triton kernels for packed weights: compare products with float64, and unpacked weights with torch."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from support.packed_rows import FORMATS, random_rows

from offload_rt.kernels.packed_format import PackedFormat

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ODD_FORMAT = PackedFormat(128, 4, 128, has_zeros=True)
"""Format with an odd number of bytes per row."""

CASES = list(zip([*FORMATS, ODD_FORMAT], cycle([False, True]), cycle(DTYPES), cycle([1, 2, 5, 11]), strict=False))


@pytest.mark.parametrize(("form", "bias", "dtype", "rows"), CASES, ids=str)
def test_products_equal_float64(
    kernel_device: torch.device, form: PackedFormat, bias: bool, dtype: torch.dtype, rows: int
) -> None:
    from offload_rt.kernels import triton_packed

    torch.manual_seed(form.ins)
    packed, weights = (part.to(kernel_device) for part in random_rows(form, 7))
    x = (torch.randn(rows, 2 * form.ins, device=kernel_device) / 256).to(dtype)[:, form.ins :]  # no overflow in float16
    bias_vector = torch.randn(7, device=kernel_device).to(dtype) if bias else None
    actual = triton_packed.linear(x, packed, form, bias_vector)
    expected = x.double() @ weights.T + (0 if bias_vector is None else bias_vector.double())
    magnitude = x.double().norm(dim=1)[:, None] * weights.norm(dim=1)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert actual.dtype == dtype and actual.shape == (rows, 7)
    assert ((actual.double() - expected).abs() <= rounding * expected.abs() + 2e-6 * magnitude).all()


@pytest.mark.parametrize(("form", "dtype"), list(zip([*FORMATS, ODD_FORMAT], cycle(DTYPES[:2]), strict=False)), ids=str)
def test_unpacked_weights_equal_torch(kernel_device: torch.device, form: PackedFormat, dtype: torch.dtype) -> None:
    from offload_rt.kernels import triton_packed

    torch.manual_seed(form.ins)
    packed = random_rows(form, 7)[0].to(kernel_device)
    # The kernel may use fused multiply-adds. The interpreter truncates bfloat16.
    expected = form.unpack(packed, dtype)
    tolerance: dict[str, Any] = {
        "rtol": 0 if dtype == torch.float32 else 2**-7,
        "atol": 1e-6 * float(expected.abs().max()),
    }
    torch.testing.assert_close(triton_packed.unpack(packed, form, dtype), expected, **tolerance)
    ids = torch.tensor([3, 3, 0, 6, 1], device=kernel_device)
    actual = triton_packed.unpack(packed, form, dtype, ids)
    torch.testing.assert_close(actual, expected[ids], **tolerance)
    part = range(form.ins - 64, form.ins)
    actual = triton_packed.unpack(packed, form, dtype, ids, part)
    torch.testing.assert_close(actual, expected[ids, part.start :], **tolerance)


def test_each_row_uses_the_weight_of_its_expert(kernel_device: torch.device) -> None:
    from offload_rt.kernels import triton_packed

    form = PackedFormat(64, 5, 32, offset=12)
    packed, weights = (part.to(kernel_device).unflatten(0, (3, 5)) for part in random_rows(form, 15))
    x, bias = torch.randn(4, 64, device=kernel_device), torch.randn(3, 5, device=kernel_device)
    experts = torch.tensor([2, 0, 2, 1], device=kernel_device)
    expected = torch.einsum("ni,noi->no", x.double(), weights[experts]) + bias[experts]
    actual = triton_packed.linear(x, packed, form, bias, experts)
    torch.testing.assert_close(
        actual.double(), expected, rtol=1e-5, atol=2e-6 * float(x.norm(dim=1).max() * weights.norm())
    )


@pytest.mark.parametrize(("bits", "half"), [(4, 0), (4, 1), (8, 0)])
def test_assembly_unpacks_codes_into_mantissas(bits: int, half: int) -> None:
    """The interpreter cannot run assembly code, so the test computes its three instructions in Python."""
    from offload_rt.kernels import triton_packed

    packed = [0x00, 0xFF, 0x3A, 0xC5]
    registers = {"$4": int.from_bytes(packed, "little"), "one": 0x3F800000}
    for line in triton_packed._spread(bits, half).split(";")[2:-1]:
        name, target, *operands = line.replace(",", "").split()
        a, *more = (registers[operand] if operand in registers else int(operand, 0) for operand in operands)
        if name == "lop3.b32":
            mask, one, table = more
            assert table == 0xEA  # (a & b) | c
            registers[target] = (a & mask) | one
        else:
            registers[target] = (a << more[0] if name == "shl.b32" else a >> more[0]) & 0xFFFFFFFF
    codes = [(byte >> 4 * half) & 15 if bits == 4 else byte for byte in packed]
    words = torch.tensor([registers[f"${byte}"] for byte in range(4)], dtype=torch.int32)
    assert words.view(torch.float32).tolist() == [1 + code / (128 if bits == 4 else 256) for code in codes]
