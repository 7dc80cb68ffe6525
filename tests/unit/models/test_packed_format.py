"""Test the layout of packed weights, and compare their products with float64 at every instruction set level."""

from __future__ import annotations

import ctypes
import mmap
from itertools import cycle
from typing import Any

import pytest
import torch
from support.packed_rows import FORMATS, random_rows
from torch import nn

from offload_rt.kernels import packed_products, team
from offload_rt.kernels.packed_format import PackedFormat, interleave
from offload_rt.models.linear.packed import use_packed_weights
from offload_rt.utils.native_code import available_levels

needs_code = pytest.mark.skipif(packed_products.compiled_for(torch.float32) is None, reason="there is no compiled code")


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_rows_unpack_to_the_same_numbers(form: PackedFormat) -> None:
    rows, weights = random_rows(form, 21)
    assert rows.shape == (21, form.row_bytes) and form.row_bytes % 4 == 0
    assert form.unpack(rows, torch.float64).equal(weights.float().double())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_rows_are_scaled_exactly(form: PackedFormat, interleaved: bool) -> None:
    rows, weights = random_rows(form, 21)
    scales = torch.randint(-3, 4, (21,)).float().exp2()  # larger ones would round numbers close to 0
    if interleaved:
        form, rows = form.for_cpu(), interleave(rows)
    before = rows.clone()
    scaled_form, scaled = form.scale_rows(rows, scales)
    assert scaled_form.unpack(scaled, torch.float64).equal(weights.float().double() * scales[:, None])
    assert rows.equal(before)


@pytest.mark.parametrize("outs", [5, 16, 21, 48])
def test_interleaved_rows_are_read_by_id(outs: int) -> None:
    form = FORMATS[0]
    rows, _ = random_rows(form, outs)
    packed, tiled = interleave(rows), form.for_cpu()
    assert packed.shape == rows.shape and tiled.rows(packed).equal(rows)
    assert tiled.unpack(packed, torch.float32).equal(form.unpack(rows, torch.float32))
    ids = torch.randperm(outs)
    assert tiled.rows(packed, ids).equal(rows[ids])
    assert interleave(rows.expand(2, -1, -1)).equal(packed.expand(2, -1, -1))
    if outs >= 16:  # word 1 of row 3, after word 0 of 16 rows
        assert packed.flatten()[4 * (16 + 3) :][:4].equal(rows[3, 4:8])


LEVELS = available_levels()
CODE = [
    (level, dtype)
    for i, level in enumerate(LEVELS)
    for j, dtype in enumerate((torch.float32, torch.bfloat16))
    if level == LEVELS[-1] or i % 2 == j
]
"""Both dtypes at the highest level, and one at each lower level, because compiling this file takes ten seconds."""
of_each_code = pytest.mark.parametrize(("level", "dtype"), CODE, indirect=["level"], ids=str)


@needs_code
@of_each_code
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_compiled_code_unpacks_the_same_numbers(form: PackedFormat, dtype: torch.dtype, level: str) -> None:
    rows, _ = random_rows(form, 21)
    code = packed_products.compiled_for(dtype)
    assert code is not None
    expected = form.unpack(rows, dtype)
    assert code.unpack(rows, form, dtype).equal(expected)
    assert code.unpack(interleave(rows), form.for_cpu(), dtype).equal(expected)


@needs_code
@of_each_code
@pytest.mark.parametrize(("form", "bias"), [*zip(FORMATS, cycle([False, True]), strict=False)], ids=str)
def test_products_equal_float64(form: PackedFormat, bias: bool, dtype: torch.dtype, level: str) -> None:
    rows, weights = random_rows(form, 21)
    layer = nn.Linear(form.ins, 21, bias=bias).to(dtype)
    use_packed_weights(layer, form.for_cpu(), dtype, interleave(rows))
    x = torch.randn(packed_products.MAX_ROWS + 1, form.ins * 2, dtype=dtype)[..., ::2]
    expected = x.double() @ weights.T + (layer.bias.double() if bias else 0)
    size = (x.double().norm(dim=1)[:, None] * weights.norm(dim=1)).double()
    with torch.inference_mode():
        many, few = layer(x), layer(x[:-1])
        fewer = [layer(x[:rows]) for rows in range(1, packed_products.MAX_ROWS)]
    assert few.dtype == many.dtype == dtype and many.shape == expected.shape
    error = 2**-8 if dtype == torch.bfloat16 else 1e-5
    assert ((few.double() - expected[:-1]).abs() <= error * expected[:-1].abs() + 1e-5 * size[:-1]).all()
    assert ((many.double() - expected).abs() <= error * expected.abs() + 2 * error * size).all()
    # up to MAX_ROWS rows, a row's result does not depend on the number of rows
    assert all(few[: len(rows)].equal(rows) for rows in fewer)


@needs_code
@of_each_code
@pytest.mark.parametrize("count", [1, 13])  # 13 rows are split into 4, 4, 4 and 1
def test_products_do_not_read_beyond_the_inputs(count: int, dtype: torch.dtype, level: str) -> None:
    """After the inputs follows a page that must not be read. A wrong product ends the process."""
    form, page = FORMATS[0].for_cpu(), mmap.PAGESIZE
    size = count * form.ins * dtype.itemsize
    memory = mmap.mmap(-1, -(-size // page) * page + page)
    x = torch.frombuffer(memory, dtype=dtype, offset=len(memory) - page - size, count=count * form.ins)
    x.view(count, -1).copy_(torch.randn(count, form.ins))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(x.data_ptr() + size), ctypes.c_size_t(page), 0) == 0
    code = packed_products.compiled_for(dtype)
    assert code is not None
    rows = random_rows(FORMATS[0], 32)[0]
    found = code.linear(x.view(count, -1), interleave(rows), form, None)
    assert found.equal(code.linear(x.clone().view(count, -1), interleave(rows), form, None))


def test_inputs_get_gradients() -> None:
    rows, weights = random_rows(FORMATS[0], 3)
    layer, x = nn.Linear(192, 3), torch.randn(2, 192, requires_grad=True)
    use_packed_weights(layer, FORMATS[0], torch.float32, rows)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, weights.sum(0).float().expand(2, 192))


@needs_code
def test_threads_share_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_products, "MIN_THREADED_WORK", 0)
    monkeypatch.setattr(packed_products, "PART_BYTES", 1000)
    monkeypatch.setattr(team, "threads", lambda: threads)
    form = FORMATS[0].for_cpu()
    packed, x, found = interleave(random_rows(FORMATS[0], 70)[0]), torch.randn(9, 192), []
    code = packed_products.compiled_for(torch.float32)
    assert code is not None
    for threads in (1, 3, 300):  # noqa: B007
        found.append(code.linear(x, packed, form, None))
    assert all(found[0].equal(other) for other in found)


@needs_code
@of_each_code
def test_non_finite_inputs_give_non_finite_results(dtype: torch.dtype, level: str) -> None:
    rows, _ = random_rows(FORMATS[0], 3)
    code = packed_products.compiled_for(dtype)
    assert code is not None
    for odd in (torch.nan, torch.inf, -torch.inf):
        x = torch.zeros(2, 192, dtype=dtype)
        x[0, 77] = odd
        out = code.linear(x, interleave(rows), FORMATS[0].for_cpu(), None)
        assert not out[0].isfinite().any() and out[1].equal(torch.zeros(3, dtype=dtype))


@needs_code
@of_each_code
def test_products_of_tiny_and_large_inputs_equal_float64(dtype: torch.dtype, level: str) -> None:
    rows, weights = random_rows(FORMATS[0], 3)
    code: Any = packed_products.compiled_for(dtype)
    for size in (1e-40, 1e-30, 1e30):
        x = (torch.randn(1, 192) * size).to(dtype)
        error = code.linear(x, interleave(rows), FORMATS[0].for_cpu(), None).double() - x.double() @ weights.T
        allowed = 2**-8 if dtype == torch.bfloat16 else 1e-5
        assert (error.abs() <= allowed * x.double().norm() * weights.norm(dim=1) + 1e-34).all()
