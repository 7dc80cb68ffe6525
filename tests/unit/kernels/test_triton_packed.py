"""Test Triton kernels for packed weights: products against float64, and unpacked weights against torch."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from support.packed_rows import FORMATS, random_rows

from offload_rt.kernels.packed_format import PackedFormat

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ODD = PackedFormat(128, 4, 128, has_zeros=True)
"""A format whose rows have an odd number of bytes."""

CASES = list(zip([*FORMATS, ODD], cycle([False, True]), cycle(DTYPES), cycle([1, 2, 5, 11]), strict=False))


@pytest.mark.parametrize(("form", "bias", "dtype", "rows"), CASES, ids=str)
def test_products_equal_float64(
    kernel_device: torch.device, form: PackedFormat, bias: bool, dtype: torch.dtype, rows: int
) -> None:
    """The number of outputs is odd, and inputs are a slice of wider rows."""
    from offload_rt.kernels import triton_packed

    torch.manual_seed(form.ins)
    packed, weights = (part.to(kernel_device) for part in random_rows(form, 7))
    x = (torch.randn(rows, 2 * form.ins, device=kernel_device) / 256).to(dtype)[:, form.ins :]  # float16 is enough
    added = torch.randn(7, device=kernel_device).to(dtype) if bias else None
    got = triton_packed.linear(x, packed, form, added)
    want = x.double() @ weights.T + (0 if added is None else added.double())
    size = x.double().norm(dim=1)[:, None] * weights.norm(dim=1)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert got.dtype == dtype and got.shape == (rows, 7)
    assert ((got.double() - want).abs() <= rounding * want.abs() + 2e-6 * size).all()


@pytest.mark.parametrize(("form", "dtype"), list(zip([*FORMATS, ODD], cycle(DTYPES[:2]), strict=False)), ids=str)
def test_unpacked_weights_equal_torch(kernel_device: torch.device, form: PackedFormat, dtype: torch.dtype) -> None:
    from offload_rt.kernels import triton_packed

    torch.manual_seed(form.ins)
    packed = random_rows(form, 7)[0].to(kernel_device)
    # The kernel may use fused multiply-adds. The interpreter truncates bfloat16.
    want = form.unpack(packed, dtype)
    tolerance: dict[str, Any] = {"rtol": 0 if dtype == torch.float32 else 2**-7, "atol": 1e-6 * float(want.abs().max())}
    torch.testing.assert_close(triton_packed.unpack(packed, form, dtype), want, **tolerance)
    ids = torch.tensor([3, 3, 0, 6, 1], device=kernel_device)
    found = triton_packed.unpack(packed, form, dtype, ids)
    torch.testing.assert_close(found, want[ids], **tolerance)
    part = range(form.ins - 64, form.ins)
    found = triton_packed.unpack(packed, form, dtype, ids, part)
    torch.testing.assert_close(found, want[ids, part.start :], **tolerance)


def test_each_row_uses_the_weight_of_its_expert(kernel_device: torch.device) -> None:
    from offload_rt.kernels import triton_packed

    form = PackedFormat(64, 5, 32, offset=12)
    packed, weights = (part.to(kernel_device).unflatten(0, (3, 5)) for part in random_rows(form, 15))
    x, bias = torch.randn(4, 64, device=kernel_device), torch.randn(3, 5, device=kernel_device)
    experts = torch.tensor([2, 0, 2, 1], device=kernel_device)
    want = torch.einsum("ni,noi->no", x.double(), weights[experts]) + bias[experts]
    got = triton_packed.linear(x, packed, form, bias, experts)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6 * float(x.norm(dim=1).max() * weights.norm()))


@pytest.mark.parametrize(("bits", "half"), [(4, 0), (4, 1), (8, 0)])
def test_assembly_unpacks_codes_into_mantissas(bits: int, half: int) -> None:
    """The interpreter cannot run assembly code, so its three instructions are computed in Python."""
    from offload_rt.kernels import triton_packed

    given = [0x00, 0xFF, 0x3A, 0xC5]
    registers = {"$4": int.from_bytes(given, "little"), "one": 0x3F800000}
    for line in triton_packed._spread(bits, half).split(";")[2:-1]:
        name, into, *others = line.replace(",", "").split()
        a, *more = (registers[other] if other in registers else int(other, 0) for other in others)
        if name == "lop3.b32":
            mask, one, table = more
            assert table == 0xEA  # (a & b) | c
            registers[into] = (a & mask) | one
        else:
            registers[into] = (a << more[0] if name == "shl.b32" else a >> more[0]) & 0xFFFFFFFF
    codes = [(byte >> 4 * half) & 15 if bits == 4 else byte for byte in given]
    words = torch.tensor([registers[f"${byte}"] for byte in range(4)], dtype=torch.int32)
    assert words.view(torch.float32).tolist() == [1 + code / (128 if bits == 4 else 256) for code in codes]
