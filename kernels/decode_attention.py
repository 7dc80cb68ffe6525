"""Exact decode attention for one sequence whose KV is in several parts. Uses C (on CPUs), Triton or torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F

from ..core import BLOCK_SIZE, KVPart
from . import native, team
from .dispatch import attend_counted, attend_runs
from .kv_runs import Run
from .pages import BLOCK
from .reference import attention_weights, merge_lse

MIN_TOKENS, MAX_PARTS = 1024, 16
"""Minimum number of tokens in a part, and maximum number of parts per KV head. A thread computes one part.

A part takes at least 10 us. The division into parts does not depend on the number of threads, so the rounding of the
results does not either.
"""

MIN_THREADED_WORK = 1 << 20
"""Calls that need fewer multiplications use one thread."""


def attend(
    q: torch.Tensor, parts: list[KVPart], scale: float, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the exact attention of one token over the KV entries of all parts.

    Args:
        q: Query `[H, d]`.
        parts: Disjoint KV entries of one layer. At least one part must not be empty.

    Returns:
        out `[H, d]` and lse `[H]` (natural log), in float32 (float64 for float64 inputs).
    """
    if q.is_cuda and softcap is None and all(part.counts is None for part in parts):
        out, lse = attend_runs(q.unsqueeze(1), [Run(0, 1, part.k, part.v) for part in parts], scale)
        return out.squeeze(1), lse.squeeze(1)
    if softcap is not None:
        parts = [_valid_entries(part) for part in parts]
    code = library(q.shape[1], q.dtype) if q.is_cpu else None
    outs, lses = list[torch.Tensor](), list[torch.Tensor]()
    for part in parts:
        kv_heads, n = part.shape
        if n == 0:
            continue
        if code is not None and part.counts is None:
            out, lse = attend_in_c(code, q, part, scale, softcap)
        else:
            grouped = q.view(kv_heads, -1, q.shape[1])
            if part.counts is not None:
                out, lse = attend_counted(grouped.contiguous(), part.k, part.v, part.counts, scale)
            else:
                weights, lse = attention_weights(grouped, part.k, scale, softcap)
                out = part.mix(weights).to(lse.dtype)
            out, lse = out.reshape(q.shape), lse.flatten()
        outs.append(out)
        lses.append(lse)
    assert outs, "all parts are empty"
    return (outs[0], lses[0]) if len(outs) == 1 else merge_lse(outs, lses)


def _valid_entries(part: KVPart) -> KVPart:
    if part.counts is None:
        return part
    valid = int(part.counts[0])
    return KVPart(part.k[:, :valid], part.v[:, :valid])


def apply_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Scale the attention output `[..., d]` for learned attention sinks, which add to the softmax denominator.

    lse `[...]` is the log-sum-exp of the scores without the sinks.
    """
    return out if sinks is None else (out * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(out.dtype)


def scores_lse(q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None = None) -> torch.Tensor:
    """Return the log-sum-exp `[H]` of scale * q·k over all keys k `[Hkv, n, d]`, on the device of k.

    It is used to compute the missed attention mass.
    """
    grouped = q.to(k.device).view(k.shape[0], -1, k.shape[2])
    return attention_weights(grouped, k, scale, softcap)[1].flatten()


def group_weights(
    q: torch.Tensor, parts: list[KVPart], scale: float, lse: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    """Return the softmax weights `[Hkv, n]` of all n tokens in `parts`, summed over the query heads of each KV head.

    q is `[H, d]`. lse `[H]` is the result of `attend` for the same parts.
    """
    kv_heads, d = parts[0].shape[0], q.shape[1]
    grouped, total = q.view(kv_heads, -1, d), lse.view(kv_heads, -1)
    weights = []
    for part in (part for part in parts if part.shape[1]):
        inner, part_lse = attention_weights(grouped, part.k, scale, softcap)
        weights.append((inner * (part_lse - total).exp().unsqueeze(-1)).sum(1))
    return torch.cat(weights, dim=1)


class PagedPart(KVPart):
    """KV entries of one sequence in one layer. C code reads them in place from the blocks of the host pool.

    The entries are ordered: first the sinks, then the recent tokens, then the selected tokens. Each access to `k` or
    `v` copies all entries.
    """

    # K and V of the pool as matrices `[R, d]`. A row is the key or value of one token in one KV head.
    rows: tuple[torch.Tensor, torch.Tensor]
    block_rows: torch.Tensor  # first row of block i, minus 64 i, int64 `[blocks]`
    first: int  # first row of the layer within a block
    head_rows: int  # number of rows from one KV head to the next
    resident: tuple[range, range]  # indices of the sinks and of the recent tokens
    tokens: torch.Tensor  # indices of the selected tokens of each KV head, int64 `[Hkv, n]`
    _gather: Callable[[int, torch.Tensor], torch.Tensor]
    _runs: Callable[[], list[KVPart]] | None

    def __init__(
        self,
        rows: tuple[torch.Tensor, torch.Tensor],
        block_rows: torch.Tensor,
        first: int,
        head_rows: int,
        resident: tuple[range, range],
        tokens: torch.Tensor,
        gather: Callable[[int, torch.Tensor], torch.Tensor],
        runs: Callable[[], list[KVPart]] | None = None,
    ) -> None:
        """Create a part. The other arguments are described at the fields of the same names.

        Args:
            gather: `gather(0, ids)` returns a copy `[Hkv, n, d]` of the K rows `ids` `[Hkv, n]`, and `gather(1, ids)`
                of the V rows.
            runs: Function that returns the entries as contiguous views. Must be None if `tokens` is not empty.
        """
        # The base class is frozen. Assigning attributes one by one would call its `__setattr__` in every layer.
        vars(self).update(
            rows=rows, block_rows=block_rows, first=first, head_rows=head_rows, resident=resident, tokens=tokens,
            _gather=gather, _runs=runs,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[int, int]:
        (kv_heads, n), (sinks, recent) = self.tokens.shape, self.resident
        return kv_heads, len(sinks) + len(recent) + n

    @property
    def ids(self) -> torch.Tensor:
        """Row indices of all entries, int64 `[Hkv, resident + n]`."""
        resident = torch.tensor([*self.resident[0], *self.resident[1]], dtype=torch.int64)
        tokens = torch.cat((resident.expand(len(self.tokens), -1), self.tokens), dim=1)
        heads = self.first + self.head_rows * torch.arange(len(tokens)).unsqueeze(1)
        return self.block_rows[tokens // BLOCK_SIZE] + tokens + heads

    @property
    def runs(self) -> list[KVPart]:
        return [self] if self._runs is None else self._runs()

    @property
    def k(self) -> torch.Tensor:
        # A gather of a whole context would enlarge the gather buffers, which never shrink.
        return self._gather(0, self.ids) if self._runs is None else torch.cat([run.k for run in self._runs()], dim=1)

    @property
    def v(self) -> torch.Tensor:
        return self._gather(1, self.ids) if self._runs is None else torch.cat([run.v for run in self._runs()], dim=1)

    def mix(self, weights: torch.Tensor) -> torch.Tensor:
        if weights.shape[1] > 1:
            return super().mix(weights)
        # An embedding bag is a weighted sum of rows.
        values, (kv_heads, n) = self.rows[1], self.shape
        bags, row_weights = torch.arange(0, kv_heads * n, n), weights.to(values.dtype).view(-1)
        return F.embedding_bag(self.ids.view(-1), values, bags, mode="sum", per_sample_weights=row_weights).unsqueeze(1)


class _Call(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "tokens", "block_rows")),
        *((name, ctypes.c_int64) for name in ("sinks", "sinks_stop", "recent", "recent_stop", "selected")),
        *((name, ctypes.c_void_p) for name in ("outs", "peaks", "sums", "out", "lse")),
        *((f"{name}_{step}", ctypes.c_int64) for name in ("k", "v") for step in ("head", "token")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "group", "n", "per_part")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


_ALL_TOKENS = (None, None, 0, 0, 0, 0, 0)
"""Values of the fields `tokens` to `selected` of `_Call` if all n tokens are attended to in order."""


@native.level_cache
def library(head_dim: int, dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the library compiled from `decode_attention.c` for these arguments, or None if torch must be used."""
    if dtype not in (torch.bfloat16, torch.float32) or head_dim % 32:
        return None
    code = native.compiled("decode_attention", _Call, HEAD_DIM=head_dim, BFLOAT16=int(dtype == torch.bfloat16))
    if code is not None:
        code.attend_all.argtypes, code.attend_all.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int], None
    return code


def attend_in_c(
    code: ctypes.CDLL, q: torch.Tensor, part: KVPart, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with q `[H, d]` to a non-empty part. Return float32 out `[H, d]` and lse `[H]`."""
    (heads, d), q = q.shape, q.contiguous()
    token_fields: tuple[int | None, ...]
    strides: tuple[int, ...]
    if isinstance(part, PagedPart):
        tokens, (sinks, recent), (k, v) = part.tokens.contiguous(), part.resident, part.rows
        (kv_heads, selected), step, first = tokens.shape, part.head_rows * d, part.first * d * k.element_size()
        n, strides = len(sinks) + len(recent) + selected, (step, d, step, d)
        token_fields = (
            tokens.data_ptr(), part.block_rows.data_ptr(),
            sinks.start, sinks.stop, recent.start, recent.stop, selected,
        )  # fmt: skip
    else:
        k, v = part.k if part.k.stride(2) == 1 else part.k.contiguous(), part.v
        v = v if v.stride(2) == 1 else v.contiguous()
        (kv_heads, n, _), first = k.shape, 0
        strides, token_fields = (*k.stride()[:2], *v.stride()[:2]), _ALL_TOKENS
    per_part = max(MIN_TOKENS, -(-n // (MAX_PARTS * BLOCK)) * BLOCK)
    pieces = -(-n // per_part)
    out, lse, scratch = torch.empty(heads, d), torch.empty(heads), torch.empty(heads * pieces * (d + 2))
    outs, results = scratch.data_ptr(), 4 * heads * pieces
    call = _Call(
        q.data_ptr(), k.data_ptr() + first, v.data_ptr() + first, *token_fields,
        outs, outs + results * d, outs + results * (d + 1), out.data_ptr(), lse.data_ptr(), *strides,
        kv_heads, heads // kv_heads, n, per_part, scale, softcap or 0.0,
    )  # fmt: skip
    threads = team.threads() if heads * n * d > MIN_THREADED_WORK else 1
    code.attend_all(ctypes.byref(call), team.runner(), threads)
    return out, lse
