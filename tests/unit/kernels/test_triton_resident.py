"""Compare attention to resident KV and other KV through pointer tables, and appending resident KV, with torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.interpreter import ROUNDING

from offload_rt.core import BLOCK_SIZE
from offload_rt.kernels import lists
from offload_rt.kernels.pointer_table import PointerTable
from offload_rt.kernels.pool_rows import DeviceRows

HEADS, CAPACITY = 2, 300


def resident_rows(device: torch.device, d: int, dtype: torch.dtype, planes: int = 2) -> PointerTable:
    """Return resident KV for three sequences in separate memory. One of them is part of a larger tensor.

    The first and the last slot are NaN and must not be read. With `planes=1`, the keys are also the values.
    """
    rows = torch.randn(3, planes * HEADS, CAPACITY, d, device=device).to(dtype)
    rows[:, :, 0] = rows[:, :, -1] = math.nan
    layers = torch.zeros(3, planes * HEADS, CAPACITY, d, device=device, dtype=dtype)
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
def test_attention_to_resident_and_fetched_kv_equals_float64(
    kernel_device: torch.device, d: int, group: int, dtype: torch.dtype, planes: int
) -> None:
    from offload_rt.kernels.triton_resident import attend_resident

    torch.manual_seed(d)
    resident = resident_rows(kernel_device, d, dtype, planes)
    q = torch.randn(3 * HEADS, group, d, device=kernel_device).to(dtype)
    k, v = torch.randn(2, 3 * HEADS, 270, d, device=kernel_device).to(dtype)
    if group > 16:  # as in latent attention
        v = k
    starts, stops, counts = (
        torch.tensor(values, dtype=torch.int32, device=kernel_device).repeat_interleave(HEADS)
        for values in ([1, 3, 200], [2, 299, 290], [270, 0, 33])  # the second range needs two pieces
    )
    out, lse = attend_resident(q, resident, starts, stops, k, v, counts, d**-0.5)
    wide = PointerTable.of([rows.double() for rows in resident.tensors])
    expected_out, expected_lse = lists.attend_resident(
        q.double(), wide, starts, stops, k.double(), v.double(), counts, d**-0.5
    )
    largest = max(float(x.double().nan_to_num(0).abs().max()) for x in (v, *resident.tensors))
    rounding = ROUNDING[dtype] if q.is_cuda else 0.0  # the interpreter multiplies in float32
    assert expected_out.isfinite().all() and ((out - expected_out).abs() <= (rounding + 4e-6) * largest).all()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


SLOTS, FIRST = 24, 5000
"""Number of blocks in the device copies, and row id of the first copy."""


def copied_blocks(
    device: torch.device, d: int, dtype: torch.dtype, planes: int, spans: Sequence[tuple[int, int]]
) -> tuple[DeviceRows, torch.Tensor]:
    """Return copies of the blocks of three sequences, in random order, and their bases with room for ten blocks.

    All rows that are not in the token range `spans[b]` of a sequence are NaN and must not be read.
    """
    rows = torch.full((HEADS, planes, SLOTS * BLOCK_SIZE, d), math.nan, device=device, dtype=dtype)
    slots, bases = torch.randperm(SLOTS).tolist(), torch.zeros(len(spans), 10, dtype=torch.int64)
    for b, (first, end) in enumerate(spans):
        for block in range(-(-end // BLOCK_SIZE)):
            slot, start = slots.pop(), block * BLOCK_SIZE
            own = slice(slot * BLOCK_SIZE + max(0, first - start), slot * BLOCK_SIZE + min(BLOCK_SIZE, end - start))
            rows[:, :, own] = torch.randn_like(rows[:, :, own], dtype=torch.float32).to(dtype)
            bases[b, block] = FIRST + slot * BLOCK_SIZE
    offsets = torch.arange(HEADS * planes, device=device).view(HEADS, planes).T * SLOTS * BLOCK_SIZE - FIRST
    return DeviceRows(rows.flatten(0, 2), FIRST, offsets.contiguous()), bases.to(device)


@pytest.mark.parametrize(
    ("d", "group", "dtype", "planes"),
    [
        (64, 1, torch.float32, 2),
        (80, 3, torch.float16, 2),
        (128, 4, torch.bfloat16, 2),
        (576, 20, torch.float32, 1),
        (40, 70, torch.bfloat16, 1),
    ],
)
@pytest.mark.parametrize("pieces", [128, 1], ids=["pieces of 256", "one piece"])
def test_attention_to_copies_of_blocks_equals_float64(
    kernel_device: torch.device,
    d: int,
    group: int,
    dtype: torch.dtype,
    planes: int,
    pieces: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from offload_rt.kernels import triton_resident

    monkeypatch.setattr(triton_resident, "_COPIED_PIECES", pieces)
    torch.manual_seed(d)
    resident = resident_rows(kernel_device, d, dtype, planes)
    # A range that begins within a tile and needs three pieces, a range at the start of a block, and an empty range.
    spans = [(5, 577), (0, 65), (4, 4)]
    copies, bases = copied_blocks(kernel_device, d, dtype, planes, spans)
    q = torch.randn(3 * HEADS, group, d, device=kernel_device).to(dtype)
    starts, stops, firsts, ends = (
        torch.tensor(values, dtype=torch.int32, device=kernel_device).repeat_interleave(HEADS)
        for values in ([1, 3, 200], [2, 299, 201], *zip(*spans, strict=True))
    )
    out, lse = triton_resident.attend_copies(q, resident, starts, stops, copies, bases, firsts, ends, d**-0.5)
    wide = PointerTable.of([rows.double() for rows in resident.tensors])
    wide_copies = replace(copies, rows=copies.rows.double())
    expected_out, expected_lse = lists.attend_copies(
        q.double(), wide, starts, stops, wide_copies, bases, firsts, ends, d**-0.5
    )
    largest = max(float(x.double().nan_to_num(0).abs().max()) for x in (copies.rows, *resident.tensors))
    rounding = ROUNDING[dtype] if q.is_cuda else 0.0  # the interpreter multiplies in float32
    assert expected_out.isfinite().all() and ((out - expected_out).abs() <= (rounding + 4e-6) * largest).all()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("planes", [2, 1])
def test_resident_kv_and_copies_equal_attention_to_their_union(planes: int) -> None:
    torch.manual_seed(2)
    device, spans = torch.device("cpu"), [(5, 200), (0, 65), (4, 4)]
    resident = resident_rows(device, 16, torch.float64, planes)
    copies, bases = copied_blocks(device, 16, torch.float64, planes, spans)
    q = torch.randn(6, 2, 16, dtype=torch.float64)
    starts, stops, firsts, ends = (
        torch.tensor(values, dtype=torch.int32).repeat_interleave(HEADS)
        for values in ([1, 1, 1], [299, 299, 299], *zip(*spans, strict=True))
    )
    out, lse = lists.attend_copies(q, resident, starts, stops, copies, bases, firsts, ends, 0.25)
    stored = copies.rows.view(HEADS, planes, -1, 16)
    for b, rows in enumerate(resident.tensors):
        own = slice(b * HEADS, (b + 1) * HEADS)
        slots = [int(bases[b, t // BLOCK_SIZE]) - FIRST + t % BLOCK_SIZE for t in range(*spans[b])]
        keys, values = (
            torch.cat((part[:, 1:299], stored[:, plane, slots]), 1)
            for part, plane in ((rows[:HEADS], 0), (rows[-HEADS:], planes - 1))
        )
        scores = 0.25 * q[own] @ keys.transpose(1, 2)
        torch.testing.assert_close(out[own], torch.softmax(scores, -1) @ values, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[own], torch.logsumexp(scores, -1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("planes", [2, 1])
def test_resident_and_fetched_kv_equal_attention_to_their_union(planes: int) -> None:
    torch.manual_seed(2)
    resident = resident_rows(torch.device("cpu"), 16, torch.float64, planes)
    q, (k, v) = torch.randn(6, 2, 16, dtype=torch.float64), torch.randn(2, 6, 9, 16, dtype=torch.float64)
    starts, stops, counts = (torch.full((6,), at, dtype=torch.int32) for at in (1, 299, 9))
    out, lse = lists.attend_resident(q, resident, starts, stops, k, v, counts, 0.25)
    for b, rows in enumerate(resident.tensors):
        own = slice(b * HEADS, (b + 1) * HEADS)
        keys, values = (
            torch.cat((part[:, 1:299], more[own]), 1)
            for part, more in zip((rows[:HEADS], rows[-HEADS:]), (k, v), strict=True)
        )
        scores = 0.25 * q[own] @ keys.transpose(1, 2)
        torch.testing.assert_close(out[own], torch.softmax(scores, -1) @ values, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[own], torch.logsumexp(scores, -1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "planes"), [(torch.float32, 2), (torch.bfloat16, 2), (torch.float32, 1)])
def test_newest_rows_are_stored_at_their_positions(
    kernel_device: torch.device, dtype: torch.dtype, planes: int
) -> None:
    from offload_rt.kernels.triton_append import store_resident

    resident = resident_rows(kernel_device, 24, dtype, planes)
    reference = PointerTable.of([rows.clone() for rows in resident.tensors])
    k, v = torch.randn(2, 3 * HEADS, 24, device=kernel_device).to(dtype)
    positions = torch.tensor([0, 299, 17], device=kernel_device)
    store_resident(k, v, resident, positions)
    lists.store_resident(k, v, reference, positions)
    for b, (rows, expected) in enumerate(zip(resident.tensors, reference.tensors, strict=True)):
        assert torch.equal(rows.nan_to_num(9.0), expected.nan_to_num(9.0))
        newest_values = v if planes == 2 else k
        assert torch.equal(rows[-HEADS:, int(positions[b])], newest_values[b * HEADS : (b + 1) * HEADS])
