"""Append the newest token to the resident KV and the scoring keys on the device, in Triton.

Memory traffic per KV head: d * r elements of the basis (4 bytes each), d elements of the key, and r elements of the
result. Sums over d are computed in float32 and in a different order than in torch, so a value halfway between two codes
may get either code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .pointer_table import FIELDS, PointerTable

_COLUMNS = 16
"""Number of columns per program."""

_FIELDS = tl.constexpr(FIELDS)


@triton.jit
def _skewed(
    k: tl.tensor,
    basis: tl.tensor,
    p: tl.tensor,
    heads: tl.tensor,
    column: tl.tensor,
    r: tl.tensor,
    d: tl.constexpr,
    D: tl.constexpr,
) -> tl.tensor:
    """Return columns `column` of the skewed key of list p (one KV head of one sequence) in float32."""
    row = tl.arange(0, D)
    key = tl.load(k + p * d + row, mask=row < d, other=0.0).to(tl.float32)
    tile = tl.load(basis + (p % heads) * d * r + row[:, None] * r + column[None, :],
                   mask=(row < d)[:, None] & (column < r)[None, :], other=0.0)  # fmt: skip
    return tl.sum(key[:, None] * tile, 0)


@triton.jit(do_not_specialize=["bases", "heads"])
def _partial(
    k: tl.tensor, basis: tl.tensor, table: tl.tensor, slots: tl.tensor, bases: tl.tensor, heads: tl.tensor,
    r: tl.tensor, KEYS: tl.constexpr, d: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (p, c) computes and stores COLUMNS columns of the skewed key of list p (a KV head of a sequence)."""
    p = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    skewed = _skewed(k, basis, p, bases, column, r, d, D)
    fields = table + p // heads * _FIELDS
    keys = tl.load(fields).to(tl.pointer_type(KEYS)) + p % heads * tl.load(fields + 1)
    address = keys + column.to(tl.int64) * tl.load(fields + 2) + tl.load(slots + p)
    tl.store(address, skewed.to(KEYS), mask=(column < r) & (tl.load(slots + p) >= 0))


@triton.jit(do_not_specialize=["heads"])
def _quantised(
    k: tl.tensor, basis: tl.tensor, mean: tl.tensor, step: tl.tensor, table: tl.tensor, slots: tl.tensor,
    heads: tl.tensor, r: tl.tensor,
    d: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (p, c) quantises and packs COLUMNS columns of the skewed key of list p (a KV head of a sequence).

    The codes of other tokens in the same bytes do not change.
    """
    p, slot = tl.program_id(0).to(tl.int64), tl.load(slots + tl.program_id(0))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    skewed = _skewed(k, basis, p, heads, column, r, d, D)
    scale, mask = (p % heads) * r + column, (column < r) & (slot >= 0)
    difference = skewed - tl.load(mean + scale, mask=mask, other=0.0)
    code = tl.floor(tl.div_rn(difference, tl.load(step + scale, mask=mask, other=1.0))) + (1 << (BITS - 1))
    code = tl.minimum(tl.maximum(code, 0.0), (1 << BITS) - 1).to(tl.int32)
    F: tl.constexpr = 8 // BITS
    fields = table + p // heads * _FIELDS
    packed = tl.load(fields).to(tl.pointer_type(tl.int8)) + p % heads * tl.load(fields + 1)
    address = packed + (slot // F) * tl.load(fields + 2) + column
    shift = ((slot % F) * BITS).to(tl.int32)
    old = tl.load(address, mask=mask, other=0).to(tl.int32) ^ 128
    new = (old & ~(((1 << BITS) - 1) << shift)) | (code << shift)
    tl.store(address, (new ^ 128).to(tl.int8), mask=mask)


@triton.jit(do_not_specialize=["heads"])
def _store_resident(
    k: tl.tensor, v: tl.tensor, table: tl.tensor, indices: tl.tensor, heads: tl.tensor,
    d: tl.constexpr, D: tl.constexpr, PLANES: tl.constexpr,
) -> None:  # fmt: skip
    """Program p copies K and V (only K if PLANES is 1) of list p, one KV head of one sequence, to the resident KV."""
    p, column = tl.program_id(0).to(tl.int64), tl.arange(0, D)
    fields = table + p // heads * _FIELDS
    step = tl.load(fields + 1)
    rows = tl.load(fields).to(tl.pointer_type(k.dtype.element_ty)) + p % heads * step
    index = tl.load(indices + p // heads)
    address, mask = rows + index * tl.load(fields + 2) + column, (column < d) & (index >= 0)
    tl.store(address, tl.load(k + p * d + column, mask=mask), mask=mask)
    if PLANES == 2:
        tl.store(address + heads * step, tl.load(v + p * d + column, mask=mask), mask=mask)


def append_partial(k: torch.Tensor, basis: torch.Tensor, keys: PointerTable, slots: torch.Tensor) -> None:
    """Skew the newest keys of a batch and store them as partial keys, in one launch. See `lists.append_partial`.

    The basis must be float32.
    """
    (lists, d), (bases, _, r) = k.shape, basis.shape
    assert basis.shape[1] == d and lists == keys.lists and keys.tensors[0].shape[1] == r and slots.shape == (lists,)
    assert k.is_contiguous() and basis.is_contiguous() and basis.dtype == torch.float32 and lists % bases == 0
    _partial[(lists, triton.cdiv(r, _COLUMNS))](
        k, basis, keys.table, slots, bases, keys.heads, r,
        KEYS=triton_dtype(keys.dtype), d=d, D=triton.next_power_of_2(d), COLUMNS=_COLUMNS,
        num_warps=_warps(d),
    )  # fmt: skip


def append_quantised(
    k: torch.Tensor,
    basis: torch.Tensor,
    mean: torch.Tensor,
    step: torch.Tensor,
    bits: int,
    packed: PointerTable,
    slots: torch.Tensor,
) -> None:
    """Skew, quantise and pack the newest keys of a batch, in one launch. See `lists.append_quantised`.

    basis, mean and step must be float32.
    """
    (lists, d), (heads, _, r) = k.shape, basis.shape
    assert packed.lists == lists and packed.heads == heads and packed.tensors[0].shape[2] >= r
    assert k.is_contiguous() and basis.is_contiguous() and mean.is_contiguous() and step.is_contiguous()
    assert basis.dtype == mean.dtype == step.dtype == torch.float32 and slots.shape == (lists,)
    assert mean.shape == step.shape == (heads, r) and packed.dtype == torch.int8
    _quantised[(lists, triton.cdiv(r, _COLUMNS))](
        k, basis, mean, step, packed.table, slots, heads, r,
        d=d, D=triton.next_power_of_2(d), COLUMNS=_COLUMNS, BITS=bits,
        num_warps=_warps(d),
    )  # fmt: skip


def store_resident(k: torch.Tensor, v: torch.Tensor, resident: PointerTable, indices: torch.Tensor) -> None:
    """Write the newest K and V of a batch to the resident KV, in one launch. See `lists.store_resident`.

    k, v and the resident KV must have the same dtype.
    """
    lists, d = k.shape
    assert k.shape == v.shape and k.is_contiguous() and v.is_contiguous() and k.dtype == v.dtype == resident.dtype
    planes = resident.lists // lists
    assert planes in (1, 2) and resident.tensors[0].shape[2] == d and indices.shape == (len(resident.tensors),)
    _store_resident[(lists,)](
        k, v, resident.table, indices, resident.heads // planes, d=d, D=triton.next_power_of_2(d), PLANES=planes
    )


def _warps(d: int) -> int:
    """Return the number of warps for a tile of the basis with d rows, so that each thread gets at most 64 elements."""
    return 8 if d > 512 else 4


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
