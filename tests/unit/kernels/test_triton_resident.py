"""Test attention to resident and fetched KV through pointer tables, and appending of resident KV, against torch."""

from __future__ import annotations

import math

import pytest
import torch
from support.interpreter import ROUNDING

from offload_rt.kernels import lists
from offload_rt.kernels.pointer_table import PointerTable

HEADS, ROOM = 2, 300


def kept_rows(device: torch.device, d: int, dtype: torch.dtype, planes: int = 2) -> PointerTable:
    """Return resident KV of three sequences in separate memory, one of them within a larger tensor.

    The first and last slot are NaN, as they must not be read. If `planes` is 1, keys are also the values.
    """
    rows = torch.randn(3, planes * HEADS, ROOM, d, device=device).to(dtype)
    rows[:, :, 0] = rows[:, :, -1] = math.nan
    layers = torch.zeros(3, planes * HEADS, ROOM, d, device=device, dtype=dtype)
    layers[1] = rows[1]
    return PointerTable.of([rows[0], layers[1], rows[2].clone()])


@pytest.mark.parametrize(
    ("d", "group", "dtype", "planes"),
    [
        (64, 1, torch.float32, 2),
        (80, 3, torch.float16, 2),
        (128, 4, torch.bfloat16, 2),
        (80, 3, torch.float32, 1),
        (576, 20, torch.float32, 1),
        (576, 20, torch.float16, 1),
        (40, 70, torch.bfloat16, 1),
    ],
)
def test_resident_and_fetched_kv_are_attended_to(
    kernel_device: torch.device, d: int, group: int, dtype: torch.dtype, planes: int
) -> None:
    """Cover ragged ranges and counts, a sequence without fetched KV, and a range of two pieces."""
    from offload_rt.kernels.triton_resident import attend_resident

    torch.manual_seed(d)
    kept = kept_rows(kernel_device, d, dtype, planes)
    q = torch.randn(3 * HEADS, group, d, device=kernel_device).to(dtype)
    k, v = torch.randn(2, 3 * HEADS, 270, d, device=kernel_device).to(dtype)
    if group > 16:  # as in latent attention
        v = k
    starts, stops, counts = (
        torch.tensor(each, dtype=torch.int32, device=kernel_device).repeat_interleave(HEADS)
        for each in ([1, 3, 200], [2, 299, 290], [270, 0, 33])
    )
    out, lse = attend_resident(q, kept, starts, stops, k, v, counts, d**-0.5)
    wide = PointerTable.of([rows.double() for rows in kept.tensors])
    want, want_lse = lists.attend_resident(q.double(), wide, starts, stops, k.double(), v.double(), counts, d**-0.5)
    largest = max(float(x.double().nan_to_num(0).abs().max()) for x in (v, *kept.tensors))
    rounding = ROUNDING[dtype] if q.is_cuda else 0.0  # the interpreter multiplies in float32
    assert want.isfinite().all() and ((out - want).abs() <= (rounding + 4e-6) * largest).all()
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("planes", [2, 1])
def test_resident_and_fetched_kv_equal_attention_to_their_union(planes: int) -> None:
    torch.manual_seed(2)
    kept = kept_rows(torch.device("cpu"), 16, torch.float64, planes)
    q, (k, v) = torch.randn(6, 2, 16, dtype=torch.float64), torch.randn(2, 6, 9, 16, dtype=torch.float64)
    starts, stops, counts = (torch.full((6,), at, dtype=torch.int32) for at in (1, 299, 9))
    out, lse = lists.attend_resident(q, kept, starts, stops, k, v, counts, 0.25)
    for b, rows in enumerate(kept.tensors):
        own = slice(b * HEADS, (b + 1) * HEADS)
        keys, values = (
            torch.cat((part[:, 1:299], more[own]), 1)
            for part, more in zip((rows[:HEADS], rows[-HEADS:]), (k, v), strict=True)
        )
        scores = 0.25 * q[own] @ keys.transpose(1, 2)
        torch.testing.assert_close(out[own], torch.softmax(scores, -1) @ values, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[own], torch.logsumexp(scores, -1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "planes"), [(torch.float32, 2), (torch.bfloat16, 2), (torch.float32, 1)])
def test_the_newest_rows_are_stored_at_their_positions(
    kernel_device: torch.device, dtype: torch.dtype, planes: int
) -> None:
    from offload_rt.kernels.triton_append import store_resident

    kept = kept_rows(kernel_device, 24, dtype, planes)
    want = PointerTable.of([rows.clone() for rows in kept.tensors])
    k, v = torch.randn(2, 3 * HEADS, 24, device=kernel_device).to(dtype)
    places = torch.tensor([0, 299, 17], device=kernel_device)
    store_resident(k, v, kept, places)
    lists.store_resident(k, v, want, places)
    for b, (rows, expected) in enumerate(zip(kept.tensors, want.tensors, strict=True)):
        assert torch.equal(rows.nan_to_num(9.0), expected.nan_to_num(9.0))
        last = v if planes == 2 else k
        assert torch.equal(rows[-HEADS:, int(places[b])], last[b * HEADS : (b + 1) * HEADS])
