"""Exact attention of few queries on a CPU (`decode_attention.c`): KV is read once, where it lies."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from ..core import ScatteredRows
from . import native, team
from .pages import BLOCK

LEAST_TOKENS, MOST_PARTS = 1024, 16
"""A part has at least so many tokens of a KV head (10 to 50 us), and a head has at most so many parts. Results do not
depend on the number of threads, because the parts do not."""

WORTH_THREADS = 1 << 20
"""Products of a call from which waking threads is worth it."""


class _Call(ctypes.Structure):
    """`Call` of decode_attention.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "ids", "outs", "peaks", "sums", "out", "lse")),
        *((f"{name}_{step}", ctypes.c_int64) for name in ("k", "v") for step in ("head", "token")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "group", "n", "per_part")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


@dataclass(frozen=True, eq=False)
class DecodeAttention:
    """The compiled code for one head dimension and one type of KV."""

    library: ctypes.CDLL

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with q `[Hkv, G, d]` to k, v `[Hkv, n, d]`, n >= 1: float32 out `[Hkv, G, d]` and lse `[Hkv, G]`, as
        `reference.attend_part` defines them."""
        return self._attend(q, k, v, None, k.shape[1], scale, softcap)

    def attend_scattered(
        self, q: torch.Tensor, rows: ScatteredRows, scale: float, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`attend` for KV vectors that lie anywhere."""
        kv_heads, n = rows.ids.shape
        k, v = (x.expand(kv_heads, -1, -1) for x in (rows.k, rows.v))
        return self._attend(q, k, v, rows.ids.contiguous(), n, scale, softcap)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ids: torch.Tensor | None,
        n: int,
        scale: float,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kv_heads, group, d = q.shape
        q, k, v = q.contiguous(), *(x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
        per_part = max(LEAST_TOKENS, -(-n // (MOST_PARTS * BLOCK)) * BLOCK)
        parts = -(-n // per_part)
        out, lse = torch.empty(kv_heads, group, d), torch.empty(kv_heads, group)
        room = torch.empty(kv_heads * parts * group * (d + 2))
        outs, results = room.data_ptr(), 4 * kv_heads * parts * group
        call = _Call(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), None if ids is None else ids.data_ptr(), outs,
            outs + results * d, outs + results * (d + 1), out.data_ptr(), lse.data_ptr(), *k.stride()[:2],
            *v.stride()[:2], kv_heads, group, n, per_part, scale, softcap or 0.0,
        )  # fmt: skip
        threads = team.threads() if kv_heads * group * n * d > WORTH_THREADS else 1
        team.run(self.library.attend_part, call, kv_heads * parts, threads)
        self.library.finish(ctypes.byref(call))
        return out, lse


def takes(q: torch.Tensor) -> DecodeAttention | None:
    """Return the code for queries q `[..., d]` and KV like them. None if the type or head dimension is not supported,
    or there is no compiled code."""
    if q.dtype not in (torch.bfloat16, torch.float32) or q.device.type != "cpu" or q.shape[-1] % 32:
        return None
    library = native.compiled("decode_attention", HEAD_DIM=q.shape[-1], BFLOAT16=int(q.dtype == torch.bfloat16))
    return None if library is None else _code(library)


@cache
def _code(library: ctypes.CDLL) -> DecodeAttention:
    library.finish.restype = None
    return DecodeAttention(library)
