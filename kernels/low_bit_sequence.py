"""Store, score, select and attend to the low-bit KV of one sequence.

`low_bit.py` is the reference implementation. On a CPU, `low_bit.c` computes the results in float32. On other devices,
the sequence is treated as a batch of one (`low_bit_lists`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from . import dispatch, low_bit, native, team
from .h2d_copy import to_device
from .low_bit import Layout
from .pages import BLOCK, PAGE_BLOCKS, Pages, PageTable
from .selection import select_in_c, select_tokens

MAX_QUERIES = 32
"""Maximum number of queries per KV head that `low_bit.c` supports."""

MIN_BLOCKS, MAX_PARTS = 16, 16
"""Minimum number of blocks in a part, and maximum number of parts per KV head.

The split does not depend on the number of threads, so the rounding of the results does not either.
"""


class _Call(ctypes.Structure):
    _fields_: ClassVar = [
        ("pages", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("offset", "heads", "group", "start", "stop", "per_part")),
        *((name, ctypes.c_void_p) for name in ("q", "mean", "scores", "peaks", "lses", "part_peaks", "part_sums")),
        ("skip", ctypes.c_void_p),
        ("skipped", ctypes.c_int64),
        ("hidden", ctypes.c_void_p),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("part_outs", "mixed_sums", "unmixing", "outs", "lses_of_outs")),
    ]


class _StoreCall(ctypes.Structure):
    _fields_: ClassVar = [
        ("pages", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("offset", "heads", "slot", "count")),
        ("rows", ctypes.c_void_p),
        ("values", ctypes.c_int32),
    ]


@native.level_cache
def library(head_dim: int, value_bits: int) -> ctypes.CDLL | None:
    """Return the library compiled from `low_bit.c` for these sizes, or None if torch must be used."""
    if head_dim % 32:
        return None
    constants = {"HEAD_DIM": head_dim, "VALUE_BITS": value_bits, "PAGE_BLOCKS": PAGE_BLOCKS}
    code = native.compiled("low_bit", _Call, _StoreCall, **constants)
    if code is not None:
        pointer = ctypes.c_void_p
        code.score_all.argtypes, code.score_all.restype = [pointer, pointer, ctypes.c_int], None
        code.mix_all.argtypes, code.mix_all.restype = [pointer, pointer, ctypes.c_int], None
    return code


def low_bit_query(
    q: torch.Tensor, mean: torch.Tensor, pages: Pages, layout: Layout, tokens: range
) -> LowBitQuery | NativeQuery:
    """Prepare the queries of one token for scoring and attention. The result is valid until the low-bit KV changes."""
    (heads, group, _), native_type = q.shape, q.is_cpu and q.dtype == torch.float32
    code = library(layout.head_dim, layout.value_bits) if native_type else None
    if code is None or group > MAX_QUERIES or not tokens:
        return LowBitQuery(q, mean, pages, layout, tokens)
    q, mean, first, last = q.contiguous(), mean.contiguous(), tokens.start // BLOCK, -(-tokens.stop // BLOCK)
    per_part = max(MIN_BLOCKS, -(-(last - first) // MAX_PARTS))
    parts = -(-(last - first) // per_part)
    scores = native.SCRATCH.empty((heads, group, (last - first) * BLOCK), torch.float32)
    statistics = torch.empty(2 + 2 * parts, heads, group)
    size, address = 4 * heads * group, statistics.data_ptr()
    call = _Call(
        pages.addresses.data_ptr(), pages.offset, heads, group, tokens.start, tokens.stop, per_part, q.data_ptr(),
        mean.data_ptr(), scores.data_ptr(), address, address + size, address + 2 * size, address + (2 + parts) * size,
    )  # fmt: skip
    code.score_all(
        ctypes.byref(call), team.runner(), team.threads(heads * group * len(tokens) // native.MIN_SCORES_PER_THREAD)
    )
    offset = tokens.start % BLOCK
    return NativeQuery(code, call, scores[:, :, offset : offset + len(tokens)], statistics, (q, mean, pages))


@dataclass(frozen=True, eq=False)
class LowBitQuery:
    """The queries of one token, which score the low-bit KV of its sequence and attend to it, in Triton or torch."""

    q: torch.Tensor  # queries `[Hkv, G, d]`, scaled and transformed to the basis of the keys
    mean: torch.Tensor  # mean that was subtracted from the keys, `[Hkv, d]`
    pages: Pages
    layout: Layout
    tokens: range  # range of tokens to score and to attend to

    @cached_property
    def scores(self) -> torch.Tensor:
        starts, stops = self._repeated(self.tokens.start, self.tokens.stop)
        result = dispatch.score_low_bit(self.q, self.mean, self.layout, self._table, starts, stops, self.tokens.stop)
        return result.scores[:, :, self.tokens.start :]

    def select(self, alpha: float, limit: int) -> torch.Tensor:
        """Select tokens with `selection.select_tokens`. Return indices `[Hkv, n]` relative to the start of `tokens`."""
        return select_tokens(self.scores, alpha, limit)

    def merge(
        self,
        exact: tuple[torch.Tensor, torch.Tensor],
        excluded: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
        softcap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge exact attention with approximate attention to all other tokens, in one softmax.

        Args:
            exact: out `[Hkv, G, d]` and lse `[Hkv, G]` of the exact attention. Both may be overwritten.
            excluded: Tokens that exact attention covers, int64 `[Hkv, n]`. Negative entries are padding.
            rotations: Matrix `[d, d]` by which values were multiplied before quantisation, and its inverse.
        """
        starts, stops, counts = self._repeated(self.tokens.start, self.tokens.stop, excluded.shape[1])
        out, lse = (tensor.to(self.q.dtype).contiguous() for tensor in exact)
        return dispatch.merge_approximate(
            self.q, self.mean, rotations[0], self.layout, self._table, starts, stops, excluded.contiguous(),
            counts, self.tokens.stop, out, lse, softcap,
        )  # fmt: skip

    @property
    def _table(self) -> PageTable:
        return PageTable((self.pages,), self.pages.table.unsqueeze(0))

    def _repeated(self, *numbers: int) -> torch.Tensor:
        counted = torch.tensor(numbers, dtype=torch.int32).unsqueeze(1).expand(-1, len(self.q))
        return to_device(counted.contiguous(), self.q.device)


@dataclass(frozen=True, eq=False)
class NativeQuery:
    """C implementation of `LowBitQuery`. The scores are computed when the object is created.

    All processors with fused multiply-add compute the same scores, because the products of codes are exact integers.
    Softmax weights are rounded to 16 bits. Their error is at most 2^-16 of the largest weight among 64 tokens.
    """

    code: ctypes.CDLL
    call: _Call  # arguments of the C functions, with the addresses of all tensors of this object
    scores: torch.Tensor  # scores `[Hkv, G, n]` of the n tokens
    # `[2 + 2 * parts, Hkv, G]`: largest score and log-sum-exp of each query over all tokens, followed by both numbers
    # for each part of the tokens.
    statistics: torch.Tensor
    # Queries `[Hkv, G, d]`, mean of the keys, and pages. `call` contains their addresses, so they must stay alive.
    inputs: tuple[torch.Tensor, torch.Tensor, Pages]

    def select(self, alpha: float, limit: int) -> torch.Tensor:
        chosen = select_in_c(self.scores, self.statistics[0], self.statistics[1], alpha, limit)
        return select_tokens(self.scores, alpha, limit) if chosen is None else chosen

    def merge(
        self,
        exact: tuple[torch.Tensor, torch.Tensor],
        excluded: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
        softcap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        call, (heads, group, d) = self.call, self.inputs[0].shape
        blocks, parts = self.scores.stride(1) // BLOCK, len(self.statistics) // 2 - 1
        excluded, results = excluded.contiguous(), heads * group * parts
        out, lse = exact[0].float().contiguous(), exact[1].float().contiguous()
        scratch = torch.empty(heads * blocks * 2 + results * (d + 1))
        call.skip, call.skipped, call.hidden = excluded.data_ptr(), excluded.shape[1], scratch.data_ptr()
        call.softcap, call.unmixing = softcap or 0.0, rotations[1].data_ptr()
        call.outs, call.lses_of_outs = out.data_ptr(), lse.data_ptr()
        call.part_outs = scratch.data_ptr() + 8 * heads * blocks
        call.mixed_sums = call.part_outs + 4 * results * d
        threads = team.threads(self.scores.numel() // native.MIN_SCORES_PER_THREAD)
        self.code.mix_all(ctypes.byref(call), team.runner(), threads)
        return out, lse


def store_rows(pages: Pages, layout: Layout, rows: torch.Tensor, start: int, *, values: bool) -> None:
    """Compute `low_bit.store_rows` in Triton, C or torch."""
    if dispatch.uses_triton(rows):
        from . import triton_low_bit_rows

        triton_low_bit_rows.store_rows(pages, layout, rows, start, values=values)
        return
    native_type = rows.is_cpu and rows.dtype == torch.float32
    code = library(layout.head_dim, layout.value_bits) if native_type else None
    if code is None:
        low_bit.store_rows(pages, layout, rows, start, values=values)
        return
    rows = rows.contiguous()
    heads, count, _ = rows.shape
    call = _StoreCall(pages.addresses.data_ptr(), pages.offset, heads, start, count, rows.data_ptr(), values)
    threads = team.threads(rows.numel() // native.MIN_SCORES_PER_THREAD)
    team.runner()(code.store_rows, ctypes.byref(call), heads, threads)
