"""Exact causal attention on the CPU, computed by `causal.c`, which is faster than torch's kernels."""

from __future__ import annotations

import ctypes

import torch

from . import native, team

KEYS = 64  # tokens per packed block of keys and values

MIN_THREADED_WORK = 1 << 22
"""Calls that need fewer multiplications use one thread."""


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "packed", "sinks", "lse")),
        *((f"{name}_{step}", ctypes.c_int64) for name in ("q", "k", "v", "out") for step in ("head", "token")),
        *(
            (name, ctypes.c_int64)
            for name in ("kv_heads", "group", "m", "n", "first", "window", "last_visible", "begun")
        ),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


def library_for(q: torch.Tensor) -> ctypes.CDLL | None:
    """Return the library compiled from `causal.c` for queries q `[..., d]`, or None if torch must be used."""
    if q.dtype not in (torch.bfloat16, torch.float32) or q.device.type != "cpu" or q.shape[-1] % 32:
        return None
    if q.dtype == torch.bfloat16 and native.has_amx():
        return None  # torch is faster
    return native.compiled("causal", _Call, HEAD_DIM=q.shape[-1], BFLOAT16=int(q.dtype == torch.bfloat16))


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
    """Compute `causal.attend_causal` in C. `library` is the result of `library_for`."""
    heads, m, d = q.shape
    out = q.new_empty(m, heads, d).transpose(0, 1)
    sinks = None if sinks is None else sinks.float().contiguous()
    _attend(library, q, k, v, out, scale, min(window or k.shape[1], k.shape[1]), softcap, sinks)
    return out


def attend_and_merge(
    library: ctypes.CDLL,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    softcap: float | None,
    *,
    causal: bool,
) -> None:
    """Attend to additional keys, and merge the result into `out` and `lse` in place.

    Args:
        q: Queries `[H, m, d]`.
        k, v: Keys and values `[Hkv, n, d]`, n >= 1.
        out: Attention output accumulated by earlier calls, float32 `[H, m, d]`. Initially 0.
        lse: Log-sum-exp of the scores from earlier calls, contiguous float32 `[H, m]`. Initially -inf.
        causal: Whether the last m keys belong to the query tokens. If so, a causal mask is used.
    """
    last_visible = k.shape[1] - (q.shape[1] if causal else 1)
    _attend(library, q, k, v, out, scale, k.shape[1], softcap, None, lse, last_visible=last_visible, accumulate=True)


def _attend(
    library: ctypes.CDLL,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int,
    softcap: float | None,
    sinks: torch.Tensor | None,
    lse: torch.Tensor | None = None,
    last_visible: int | None = None,
    accumulate: bool = False,
) -> None:
    """Attend with q `[H, m, d]` to k and v `[Hkv, n, d]`. Write the result to out `[H, m, d]` and lse `[H, m]`.

    Query i attends to keys up to `last_visible` + i (default: n - m + i). If `accumulate` is true, the result is merged
    into out and lse.
    """
    (heads, m, d), (kv_heads, n) = q.shape, k.shape[:2]
    last_visible = n - m if last_visible is None else last_visible
    first = max(0, last_visible - window + 1)
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    tiles = -(-heads // kv_heads * m // library.tile_rows())
    blocks = -(-(n - first) // KEYS)
    # For many queries, visible keys and values are copied to a packed buffer first.
    packed = torch.empty(kv_heads * blocks * library.block_bytes(), dtype=torch.uint8) if tiles > 1 else None
    addresses = [None if x is None else x.data_ptr() for x in (q, k, v, out, packed, sinks, lse)]
    (q_head, q_token, _), (k_head, k_token, _) = q.stride(), k.stride()
    (v_head, v_token, _), (out_head, out_token, _) = v.stride(), out.stride()
    call = _Call(
        *addresses, q_head, q_token, k_head, k_token, v_head, v_token, out_head, out_token,
        kv_heads, heads // kv_heads, m, n, first, window, last_visible, accumulate, scale, softcap or 0.0,
    )  # fmt: skip
    threads = team.threads() if 2 * heads * m * (n - first) * d > MIN_THREADED_WORK else 1
    if packed is not None:
        team.runner()(library.pack, ctypes.byref(call), kv_heads * blocks, threads)
    team.runner()(library.attend, ctypes.byref(call), kv_heads * tiles, threads)
