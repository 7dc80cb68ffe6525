"""Attention over low-bit rows in Triton: scores, softmax and values in one pass.

Bytes: each packed row and its two steps are read once for all G query heads of its group, d * (4 + bits) / 8 + 2 bytes,
and one byte that says whether it counts. Scores are whole numbers before their scale; the softmax weights, steps in
them, are rounded to bfloat16 before the second product (not under the interpreter). Blocks are cut into pieces so that
a batch of one fills the device, and the pieces are merged. Definition: `low_bit.tail_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .low_bit import BLOCK, KEY_BITS, SMALLEST, Layout, hidden_tokens
from .selection import quantise_query
from .triton_attention import merge_parts

PIECE_BLOCKS = 8
"""Blocks of a program: 512 tokens."""

_BLOCK, _SMALLEST = tl.constexpr(BLOCK), tl.constexpr(SMALLEST)


@triton.jit
def _steps(codes: tl.tensor) -> tl.tensor:
    """float32 steps of their codes (`low_bit.decode_steps`)."""
    return ((codes.to(tl.int32) + _SMALLEST) << 20).to(tl.float32, bitcast=True)


@triton.jit
def _levels(raw: tl.tensor, FIELD: tl.constexpr, BITS: tl.constexpr, WIDEN: tl.constexpr) -> tl.tensor:
    """Field FIELD of packed values, around 0."""
    codes = ((raw >> (FIELD * BITS)) & ((1 << BITS) - 1)).to(tl.float32) - ((1 << BITS) - 1) * 0.5
    return codes if WIDEN else codes.to(tl.bfloat16)


@triton.jit
def _mixed(
    acc: tl.tensor, kept: tl.tensor, weights: tl.tensor, raw: tl.tensor,
    FIELD: tl.constexpr, BITS: tl.constexpr, WIDEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """acc `[GROUP, V]` times kept `[GROUP]` and the values of one field under weights `[GROUP, 64]`."""
    return acc * kept[:, None] + tl.dot(weights, _levels(raw, FIELD, BITS, WIDEN), input_precision="ieee")


@triton.jit
def _store_field(
    outs: tl.tensor, first: tl.tensor, acc: tl.tensor, total: tl.tensor,
    d: tl.constexpr, VALUES: tl.constexpr, V: tl.constexpr, FIELD: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """The channels of one field of rows [first, first + G) of a part."""
    head, column = tl.arange(0, GROUP), tl.arange(0, V)
    at = outs + (first + head)[:, None] * d + FIELD * VALUES + column[None, :]
    tl.store(at, acc / total[:, None], mask=(head < G)[:, None] & (column < VALUES)[None, :])


@triton.jit
def _attend(
    weights: tl.tensor, middle: tl.tensor, scale: tl.tensor, shift: tl.tensor, storage: tl.tensor, hidden: tl.tensor,
    outs: tl.tensor, lses: tl.tensor, head_stride: tl.tensor, blocks: tl.tensor, lists: tl.tensor,
    d: tl.constexpr, KEYS: tl.constexpr, K: tl.constexpr, VALUES: tl.constexpr, V: tl.constexpr, BITS: tl.constexpr,
    G: tl.constexpr, GROUP: tl.constexpr, PIECE: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Program (p, s): blocks [s * PIECE, ...) of KV head p. Writes part s: out `[G, d]` (0 where no token counts) and
    lse. KEYS and VALUES are the bytes of a packed key and value, K and V these numbers padded."""
    p, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, token, byte, column = tl.arange(0, GROUP), tl.arange(0, _BLOCK), tl.arange(0, K), tl.arange(0, V)
    row, real = p * G + head, head < G
    at = weights + row[:, None] * d + byte[None, :]
    known = real[:, None] & (byte < KEYS)[None, :]
    low, high = tl.load(at, mask=known, other=0), tl.load(at + KEYS, mask=known, other=0)
    centre = tl.load(middle + row, mask=real, other=0.0)
    factor, offset = tl.load(scale + row, mask=real, other=0.0), tl.load(shift + row, mask=real, other=0.0)
    peak = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    acc0, acc1 = tl.zeros((GROUP, V), tl.float32), tl.zeros((GROUP, V), tl.float32)
    acc2, acc3 = tl.zeros((GROUP, V), tl.float32), tl.zeros((GROUP, V), tl.float32)
    for block in range(piece * PIECE, tl.minimum(blocks, (piece + 1) * PIECE)):
        own = storage + p * head_stride + block * (_BLOCK * (KEYS + VALUES + 2))
        keys = tl.load(own + byte[:, None] * _BLOCK + token[None, :], mask=(byte < KEYS)[:, None], other=0)
        sums = tl.dot(low, (keys & 15).to(tl.int8), out_dtype=tl.int32)
        sums += tl.dot(high, (keys >> 4).to(tl.int8), out_dtype=tl.int32)
        steps = own + _BLOCK * (KEYS + VALUES) + token
        scores = (sums.to(tl.float32) - centre[:, None]) * _steps(tl.load(steps))[None, :] * factor[:, None]
        counts = tl.load(hidden + p * blocks * _BLOCK + block * _BLOCK + token) == 0
        scores = tl.where(counts[None, :], scores + offset[:, None], float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        shares, kept = tl.exp(scores - safe[:, None]), tl.exp(peak - safe)
        total = total * kept + tl.sum(shares, 1)
        share = shares * _steps(tl.load(steps + _BLOCK))[None, :]
        if not WIDEN:
            share = share.to(tl.bfloat16)
        start = own + _BLOCK * KEYS
        raw = tl.load(start + token[:, None] * VALUES + column[None, :], mask=(column < VALUES)[None, :], other=0)
        acc0 = _mixed(acc0, kept, share, raw, 0, BITS, WIDEN)
        acc1 = _mixed(acc1, kept, share, raw, 1, BITS, WIDEN)
        if BITS == 2:
            acc2 = _mixed(acc2, kept, share, raw, 2, BITS, WIDEN)
            acc3 = _mixed(acc3, kept, share, raw, 3, BITS, WIDEN)
        peak = higher
    some = tl.maximum(total, 1e-30)
    first = (piece * lists + p) * G
    tl.store(lses + first + head, tl.where(total > 0.0, peak + tl.log(some), float("-inf")), mask=real)
    _store_field(outs, first, acc0, some, d, VALUES, V, 0, G, GROUP)
    _store_field(outs, first, acc1, some, d, VALUES, V, 1, G, GROUP)
    if BITS == 2:
        _store_field(outs, first, acc2, some, d, VALUES, V, 2, G, GROUP)
        _store_field(outs, first, acc3, some, d, VALUES, V, 3, G, GROUP)


def tail_attention(
    q: torch.Tensor, shift: torch.Tensor, storage: torch.Tensor, layout: Layout, tokens: range, skip: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`low_bit.tail_attention` of float32 queries: one launch over pieces of blocks, then a merge."""
    heads, group, d = q.shape
    assert q.dtype == torch.float32 and storage.stride(2) == 1 and storage.stride(1) == layout.block_bytes
    first, hidden = hidden_tokens(tokens, skip)
    blocks = hidden.shape[1] // BLOCK
    pieces = triton.cdiv(blocks, PIECE_BLOCKS)
    weights, scale = quantise_query(q)
    middle = weights.sum(-1, dtype=torch.float32) * (((1 << KEY_BITS) - 1) / 2)
    outs = torch.empty(pieces, heads * group, d, dtype=torch.float32, device=q.device)
    lses = torch.empty(pieces, heads * group, dtype=torch.float32, device=q.device)
    _attend[(heads, pieces)](
        weights, middle, scale.contiguous(), shift.contiguous(), storage[:, first:], hidden, outs, lses,
        storage.stride(0), blocks, heads,
        d=d, KEYS=layout.key_bytes, K=max(32, triton.next_power_of_2(layout.key_bytes)), VALUES=layout.value_bytes,
        V=max(16, triton.next_power_of_2(layout.value_bytes)), BITS=layout.value_bits, G=group,
        GROUP=max(16, triton.next_power_of_2(group)), PIECE=PIECE_BLOCKS, WIDEN=not q.is_cuda,
    )  # fmt: skip
    out, lse = merge_parts(outs, lses)
    return out.view(heads, group, d), lse.view(heads, group)
