"""Test the results and errors of the fast interpreter for Triton kernels."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
tl = triton.language

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled on this machine")


@triton.jit
def _arithmetic(a, b, out, TIMES: tl.constexpr) -> None:
    at = tl.arange(0, 4)
    rows, columns = tl.load(a + at), tl.load(b + at)
    table = rows[:, None] * TIMES - columns[None, :] + (rows[:, None] + 1)
    tl.store(out + at[:, None] * 4 + at[None, :], table)


def arithmetic(a: torch.Tensor, b: torch.Tensor, times: float) -> torch.Tensor:
    """Return `a * times - b + (a + 1)` for all pairs of elements, `[4, 4]`."""
    out = a.new_empty(4, 4)
    _arithmetic[(1,)](a, b, out, TIMES=times)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.int32, torch.int64])
def test_arithmetic_equals_torch(dtype: torch.dtype) -> None:
    a, b = torch.tensor([1, 2, 3, 4]).to(dtype), torch.tensor([7, 0, 5, 2]).to(dtype)
    expected = a[:, None] * 3 - b + (a[:, None] + 1)
    assert torch.equal(arithmetic(a, b, 3), expected)
    assert torch.equal(arithmetic(b, a, 3), b[:, None] * 3 - a + (b[:, None] + 1))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
@pytest.mark.parametrize(("a", "b", "times"), [(1, 0, 3), (-1, 1, 1), (1, 1, 1)], ids=["product", "difference", "sum"])
def test_integer_overflow_is_an_error(dtype: torch.dtype, a: int, b: int, times: int) -> None:
    largest = torch.full((4,), torch.iinfo(dtype).max, dtype=dtype)
    with pytest.raises(Exception, match="overflow"):
        arithmetic(a * largest, b * largest, times)


@triton.jit
def _add_different_shapes(a, out) -> None:
    tl.store(out + tl.arange(0, 4), tl.load(a + tl.arange(0, 4)) + tl.arange(0, 8))


def test_incompatible_shapes_are_an_error() -> None:
    with pytest.raises(Exception, match="incompatible dimensions"):
        _add_different_shapes[(1,)](torch.zeros(4), torch.zeros(4))


@triton.jit
def _masked(a, bits, out, n) -> None:
    at = tl.arange(0, 2)[:, None].to(tl.int64) * 4 + tl.arange(0, 4)[None, :]
    mask = (at < n) & (at >= 1)
    row = tl.load(a + at, mask=mask, other=-1.0)
    integers = row.to(tl.int32, bitcast=True)
    tl.store(bits + at, integers)
    row = integers.to(tl.float32, bitcast=True)  # must not round the value
    tl.store(out + at, row.to(tl.float64), mask=(row > 0.5) | (at == n))


def test_loads_masks_and_casts_equal_torch() -> None:
    a = torch.tensor([9.0, 0.75, -2.0, 3.0, 0.5, 8.0, 7.0, 6.0])
    bits, out = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.float64)
    _masked[(1,)](a, bits, out, 6)
    row = torch.tensor([-1.0, 0.75, -2.0, 3.0, 0.5, 8.0, -1.0, -1.0])
    assert torch.equal(bits, row.view(torch.int32))
    assert out.tolist() == [0, 0.75, 0, 3.0, 0, 8.0, -1.0, 0]


@triton.jit
def _invalid(a, out, KIND: tl.constexpr) -> None:
    at = tl.arange(0, 4)
    if KIND == "index":
        tl.store(out + at, a + 1.5)
    elif KIND == "mask":
        tl.store(out + at, tl.load(a + at, mask=at[:, None] < 2, other=0.0))
    else:
        tl.store(out + tl.arange(0, 2), tl.load(a + at))


@pytest.mark.parametrize("kind", ["index", "mask", "store"])
def test_invalid_triton_code_is_an_error(kind: str) -> None:
    with pytest.raises(Exception, match=r"IncompatibleType|incompatible|shape|Cannot"):
        _invalid[(1,)](torch.zeros(4), torch.zeros(4), KIND=kind)


@triton.jit
def _signed_row_sums(a, out, rows) -> None:
    at = tl.arange(0, 4)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        total = tl.sum(tl.load(a + row * 4 + at), 0)
        if tl.load(a + row * 4) < 0:
            tl.store(out + row, -total)
        else:
            tl.store(out + row, total)


@pytest.mark.parametrize("rows", [3, 6, 8])
def test_each_program_takes_its_own_branch(rows: int) -> None:
    a, out = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(rows)
    assert 0 < (a[:, 0] < 0).sum() < rows
    _signed_row_sums[(3,)](a, out, rows)  # with 8 rows, programs process different numbers of rows
    torch.testing.assert_close(out, torch.where(a[:, 0] < 0, -a.sum(1), a.sum(1)))


@triton.jit
def _count_and_branch(values, sums, largest, found) -> None:
    p, at = tl.program_id(0), tl.arange(0, 8)
    row = tl.load(values + p * 8 + at)
    tl.atomic_add(sums + row, row, mask=row > 0)
    tl.atomic_add(found + p // 2, 1)
    bins = tl.histogram(row, 4, mask=row > 0)
    if tl.load(values + p * 8) > 1:  # the programs that take this branch run the kernel from the start
        tl.store(largest + p, tl.max(bins, 0))


def test_programs_that_diverge_repeat_no_atomic_operation() -> None:
    values = torch.randint(0, 4, (5, 8), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    assert 0 < (values[:, 0] > 1).sum() < 5
    sums, largest, found = (torch.zeros(size, dtype=torch.int32) for size in (4, 5, 3))
    _count_and_branch[(5,)](values, sums, largest, found)
    assert sums.tolist() == [int(values[values == n].sum()) for n in range(4)] and found.tolist() == [2, 2, 1]
    most = [max(row.tolist().count(n) for n in range(1, 4)) for row in values]
    assert largest.tolist() == [most[p] if values[p, 0] > 1 else 0 for p in range(5)]
