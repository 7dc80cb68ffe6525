"""The newest key of every list enters the scoring keys, in Triton: rotated by its basis, then stored as a column, or
quantised and put into its byte.

Bytes a KV head: d * r numbers of the basis (4 bytes each), d of the key, r of the result. Definitions:
`lists.append_partial`, `lists.append_quantised`. Sums over d are float32 in another order than torch's, so a number
within rounding of the border of two codes may take either; both are as near to it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 16
"""Columns of a program."""


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
    """Numbers `column` of the key of list p in its basis, float32."""
    row = tl.arange(0, D)
    key = tl.load(k + p * d + row, mask=row < d, other=0.0).to(tl.float32)
    tile = tl.load(basis + (p % heads) * d * r + row[:, None] * r + column[None, :],
                   mask=(row < d)[:, None] & (column < r)[None, :], other=0.0)  # fmt: skip
    return tl.sum(key[:, None] * tile, 0)


@triton.jit
def _partial(
    k: tl.tensor, basis: tl.tensor, keys: tl.tensor, slots: tl.tensor, heads: tl.tensor, r: tl.tensor,
    list_step: tl.tensor, column_step: tl.tensor,
    d: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (p, c): columns [c * COLUMNS, ...) of list p."""
    p = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    skewed = _skewed(k, basis, p, heads, column, r, d, D)
    at = keys + p * list_step + column.to(tl.int64) * column_step + tl.load(slots + p)
    tl.store(at, skewed.to(keys.dtype.element_ty), mask=column < r)


@triton.jit
def _quantised(
    k: tl.tensor, basis: tl.tensor, mean: tl.tensor, step: tl.tensor, packed: tl.tensor, slots: tl.tensor,
    heads: tl.tensor, r: tl.tensor, list_step: tl.tensor,
    row_step: tl.tensor, d: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr,
) -> None:  # fmt: skip
    """As `_partial`; the other tokens of the byte keep their codes."""
    p, slot = tl.program_id(0).to(tl.int64), tl.load(slots + tl.program_id(0))
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    skewed = _skewed(k, basis, p, heads, column, r, d, D)
    scale, known = (p % heads) * r + column, column < r
    away = skewed - tl.load(mean + scale, mask=known, other=0.0)
    code = tl.floor(tl.div_rn(away, tl.load(step + scale, mask=known, other=1.0))) + (1 << (BITS - 1))
    code = tl.minimum(tl.maximum(code, 0.0), (1 << BITS) - 1).to(tl.int32)
    F: tl.constexpr = 8 // BITS
    at = packed + p * list_step + (slot // F) * row_step + column
    shift = ((slot % F) * BITS).to(tl.int32)
    old = tl.load(at, mask=known, other=0).to(tl.int32) ^ 128
    new = (old & ~(((1 << BITS) - 1) << shift)) | (code << shift)
    tl.store(at, (new ^ 128).to(tl.int8), mask=known)


def append_partial(k: torch.Tensor, basis: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor) -> None:
    """See `lists.append_partial`."""
    (lists, d), (heads, _, r) = k.shape, basis.shape
    assert basis.shape[1] == d and keys.shape[:2] == (lists, r) and keys.stride(2) == 1 and slots.shape == (lists,)
    assert k.is_contiguous() and basis.is_contiguous() and basis.dtype == torch.float32
    _partial[(lists, triton.cdiv(r, _COLUMNS))](
        k, basis, keys, slots, heads, r, keys.stride(0), keys.stride(1),
        d=d, D=triton.next_power_of_2(d), COLUMNS=_COLUMNS,
    )  # fmt: skip


def append_quantised(
    k: torch.Tensor,
    basis: torch.Tensor,
    mean: torch.Tensor,
    step: torch.Tensor,
    bits: int,
    packed: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """See `lists.append_quantised`."""
    (lists, d), (heads, _, r) = k.shape, basis.shape
    assert packed.shape[::2] == (lists, r) and packed.stride(2) == 1 and mean.shape == step.shape == (heads, r)
    assert k.is_contiguous() and basis.is_contiguous() and mean.is_contiguous() and step.is_contiguous()
    assert basis.dtype == mean.dtype == step.dtype == torch.float32 and slots.shape == (lists,)
    _quantised[(lists, triton.cdiv(r, _COLUMNS))](
        k, basis, mean, step, packed, slots, heads, r, packed.stride(0), packed.stride(1),
        d=d, D=triton.next_power_of_2(d), COLUMNS=_COLUMNS, BITS=bits,
    )  # fmt: skip
