"""Exact causal attention of bfloat16 rows by `causal.c`, on processors that multiply bfloat16 in vectors: three to four
times as fast there as the kernel that torch brings, and as exact (scores and softmax in float32).

Memory beside the inputs and the output: the keys and values that are seen once more, packed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import torch

from . import native

KEYS = 64
"""Of a packed block."""

WORTH_THREADS = 1 << 28
"""Products of a call from which starting threads (a tenth of a millisecond) is not felt."""


class _Call(ctypes.Structure):
    """`Call` of causal.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "packed", "sinks")),
        *((f"{name}_{step}", ctypes.c_int64) for name in ("q", "k", "v", "out") for step in ("head", "token")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "group", "m", "n", "first", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> ctypes.CDLL | None:
    """The code for these rows, q `[H, m, d]`, k and v `[Hkv, n, d]`; None where it does not take them, where the
    processor lacks the instructions, or where torch has better ones (AMX)."""
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or q.shape[2] % 32 or k.shape != v.shape:
        return None
    asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    vectors, tiles = (getattr(torch.cpu, ask, bool)() for ask in asks)
    return native.compiled("causal", HEAD_DIM=q.shape[2]) if vectors and not tiles else None


def attend_causal(
    library: ctypes.CDLL,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """As `causal.attend_causal` defines it, by `library`, which `takes` gives."""
    (heads, m, d), (kv_heads, n, _) = q.shape, k.shape
    window = min(window or n, n)
    first = max(0, n - m - window + 1)
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    sinks = None if sinks is None else sinks.float().contiguous()
    out = q.new_empty(m, heads, d).transpose(0, 1)
    tiles = range(-(-heads // kv_heads * m // library.tile_rows()))
    packed = torch.empty(kv_heads, -(-(n - first) // KEYS), KEYS * d, dtype=torch.int32) if len(tiles) > 1 else None
    call = _Call(
        *(None if x is None else x.data_ptr() for x in (q, k, v, out, packed, sinks)),
        *(step for x in (q, k, v, out) for step in x.stride()[:2]),
        *(kv_heads, heads // kv_heads, m, n, first, window),
        *(scale, softcap or 0.0),
    )
    pack, attend = (partial(code, ctypes.byref(call)) for code in (library.pack, library.attend))
    work: list[list[Callable[[], object]]] = []
    if packed is not None:
        work += [[partial(pack, head) for head in range(kv_heads)]]
    work += [[partial(attend, head, tile) for head, tile in product(range(kv_heads), reversed(tiles))]]
    threads = torch.get_num_threads() if 2 * heads * m * (n - first) * d > WORTH_THREADS else 1
    _run(work, min(threads, kv_heads * len(tiles)))
    return out


def _run(work: list[list[Callable[[], object]]], threads: int) -> None:
    """Does each list of `work` before the next one."""
    if threads == 1:
        for each in work:
            for part in each:
                part()
        return
    with ThreadPoolExecutor(threads) as pool:
        for each in work:
            list(pool.map(lambda part: part(), each))
