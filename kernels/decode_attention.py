"""Exact decode attention (few queries per KV head) on a CPU, by `decode_attention.c`. KV is read once, in place."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..core import PagedRows
from . import native, team
from .pages import BLOCK

MIN_TOKENS, MAX_PARTS = 1024, 16
"""Minimum number of tokens in a part of a KV head (10 to 50 us of work), and maximum number of parts per head.

The split does not depend on the number of threads, so neither does the rounding of results.
"""

WORTH_THREADS = 1 << 20
"""Smallest number of multiplications that a call distributes over several threads."""

_ALL_ROWS = (None, None, 0, 0, 0, 0, 0)
"""Values of the fields `tokens` to `selected` of `_Call` for attention to all n tokens in order."""


class _Call(ctypes.Structure):
    """The structure `Call` of decode_attention.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "tokens", "block_rows")),
        *((name, ctypes.c_int64) for name in ("sinks", "sinks_stop", "recent", "recent_stop", "selected")),
        *((name, ctypes.c_void_p) for name in ("outs", "peaks", "sums", "out", "lse")),
        *((f"{name}_{step}", ctypes.c_int64) for name in ("k", "v") for step in ("head", "token")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "group", "n", "per_part")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


@dataclass(frozen=True, eq=False)
class DecodeAttention:
    """Attention code, compiled for one head dimension and one KV dtype."""

    library: ctypes.CDLL

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with q `[Hkv, G, d]` to k, v `[Hkv, n, d]`, n >= 1.

        Returns:
            out `[Hkv, G, d]` and lse `[Hkv, G]` in float32, as defined by `reference.attend_part`.
        """
        k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
        strides = (*k.stride()[:2], *v.stride()[:2])
        return self._attend(q, k.data_ptr(), v.data_ptr(), _ALL_ROWS, strides, k.shape[1], scale, softcap)

    def attend_paged(
        self, q: torch.Tensor, rows: PagedRows, scale: float, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with q `[Hkv, G, d]` to KV in the host pool, without copying it. Return out and lse like `attend`."""
        d, tokens = q.shape[2], rows.tokens.contiguous()
        skipped, step = rows.first * d * rows.k.element_size(), rows.head_rows * d
        sinks, recent = rows.resident
        places = (
            tokens.data_ptr(), rows.block_rows.data_ptr(),
            sinks.start, sinks.stop, recent.start, recent.stop, tokens.shape[1],
        )  # fmt: skip
        k, v = rows.k.data_ptr() + skipped, rows.v.data_ptr() + skipped
        return self._attend(q, k, v, places, (step, d, step, d), rows.shape[1], scale, softcap)

    def _attend(
        self,
        q: torch.Tensor,
        k: int,
        v: int,
        places: tuple[int | None, ...],
        strides: tuple[int, ...],
        n: int,
        scale: float,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to n tokens whose KV is at the memory addresses k and v.

        `places` are the values of the fields `tokens` to `selected` of `_Call`. `strides` are the values of the fields
        `k_head` to `v_token`.
        """
        (kv_heads, group, d), q = q.shape, q.contiguous()
        per_part = max(MIN_TOKENS, -(-n // (MAX_PARTS * BLOCK)) * BLOCK)
        parts = -(-n // per_part)
        out, lse = torch.empty(kv_heads, group, d), torch.empty(kv_heads, group)
        room = torch.empty(kv_heads * parts * group * (d + 2))
        outs, results = room.data_ptr(), 4 * kv_heads * parts * group
        call = _Call(
            q.data_ptr(), k, v, *places, outs, outs + results * d, outs + results * (d + 1), out.data_ptr(),
            lse.data_ptr(), *strides, kv_heads, group, n, per_part, scale, softcap or 0.0,
        )  # fmt: skip
        threads = team.threads() if kv_heads * group * n * d > WORTH_THREADS else 1
        self.library.attend_all(ctypes.byref(call), team.runner(), threads)
        return out, lse


def takes(q: torch.Tensor) -> DecodeAttention | None:
    """Return the code for the dtype and head dimension of queries q `[..., d]`.

    Return None if they are not supported or the code cannot be compiled.
    """
    if q.dtype not in (torch.bfloat16, torch.float32) or q.device.type != "cpu" or q.shape[-1] % 32:
        return None
    return _code(q.shape[-1], q.dtype)


@native.level_cache
def _code(head_dim: int, dtype: torch.dtype) -> DecodeAttention | None:
    library = native.compiled("decode_attention", _Call, HEAD_DIM=head_dim, BFLOAT16=int(dtype == torch.bfloat16))
    if library is None:
        return None
    library.attend_all.argtypes, library.attend_all.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int], None
    return DecodeAttention(library)
