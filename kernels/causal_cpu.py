"""Exact attention of many queries on a CPU by `causal.c`, faster than torch's kernels (scores and softmax in float32).

If there are many queries, the visible keys and values are also copied to a packed buffer.
"""

from __future__ import annotations

import ctypes

import torch

from . import native, team

KEYS = 64  # keys per packed block

WORTH_THREADS = 1 << 22
"""Minimum number of multiplications of a call for which several threads are used."""


class _Call(ctypes.Structure):
    """`Call` of causal.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "packed", "sinks", "lse")),
        *((f"{name}_{step}", ctypes.c_int64) for name in ("q", "k", "v", "out") for step in ("head", "token")),
        *(
            (name, ctypes.c_int64)
            for name in ("kv_heads", "group", "m", "n", "first", "window", "last_visible", "begun")
        ),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


def takes(q: torch.Tensor) -> ctypes.CDLL | None:
    """Return the compiled kernel for the dtype and head dimension of q `[..., d]`, or None.

    None if they are unsupported, if there is no compiled code, or for bfloat16 on a processor with AMX, where torch is
    faster.
    """
    if q.dtype not in (torch.bfloat16, torch.float32) or q.device.type != "cpu" or q.shape[-1] % 32:
        return None
    if q.dtype == torch.bfloat16 and native.has_tiles():
        return None
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
    """Compute `causal.attend_causal` with `library` (from `takes`)."""
    heads, m, d = q.shape
    out = q.new_empty(m, heads, d).transpose(0, 1)
    sinks = None if sinks is None else sinks.float().contiguous()
    _attend(library, q, k, v, out, scale, min(window or k.shape[1], k.shape[1]), softcap, sinks)
    return out


def attend_further(
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
    """Continue attention of q `[H, m, d]` over further k, v `[Hkv, n, d]`, n >= 1.

    Updates out `[H, m, d]` and lse `[H, m]` in place (float32, lse contiguous). Initialise them with 0 and -inf.

    Args:
        causal: Whether the last m keys belong to the query tokens and are masked causally. If False, every query sees
            all keys.
    """
    last_visible = k.shape[1] - (q.shape[1] if causal else 1)
    _attend(library, q, k, v, out, scale, k.shape[1], softcap, None, lse, last_visible=last_visible, begun=True)


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
    begun: bool = False,
) -> None:
    """Attend with q `[H, m, d]` to k and v `[Hkv, n, d]`, and store out `[H, m, d]` and lse `[H, m]`.

    Args:
        last_visible: The last token that the first query sees. Each further query sees one more. None means n - m.
        begun: Whether out and lse already contain attention to other tokens. The result is then merged into them.
    """
    (heads, m, d), (kv_heads, n) = q.shape, k.shape[:2]
    last_visible = n - m if last_visible is None else last_visible
    first = max(0, last_visible - window + 1)
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    tiles = -(-heads // kv_heads * m // library.tile_rows())
    blocks = -(-(n - first) // KEYS)
    packed = torch.empty(kv_heads * blocks * library.block_bytes(), dtype=torch.uint8) if tiles > 1 else None
    places = [None if x is None else x.data_ptr() for x in (q, k, v, out, packed, sinks, lse)]
    (q_head, q_token, _), (k_head, k_token, _) = q.stride(), k.stride()
    (v_head, v_token, _), (out_head, out_token, _) = v.stride(), out.stride()
    call = _Call(
        *places, q_head, q_token, k_head, k_token, v_head, v_token, out_head, out_token,
        kv_heads, heads // kv_heads, m, n, first, window, last_visible, begun, scale, softcap or 0.0,
    )  # fmt: skip
    threads = team.threads() if 2 * heads * m * (n - first) * d > WORTH_THREADS else 1
    if packed is not None:
        team.run(library.pack, call, kv_heads * blocks, threads)
    team.run(library.attend, call, kv_heads * tiles, threads)
