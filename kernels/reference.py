"""Attention over scattered rows, in torch: the definition that every faster kernel is tested against.

LSE is the natural logarithm everywhere. Scores, softmax and LSE are float32 (float64 for float64 inputs); the second
product, of weights and values, runs in the dtype of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

CACHED = 8 << 20
"""Bytes of keys that the caches of a processor may hold."""

FEW = 8
"""Queries a KV head for which keys are read faster than they are multiplied."""


HALF = (torch.bfloat16, torch.float16)

WIDENED = 1 << 20
"""Bytes of keys in half precision that a CPU widens at a time, within its caches."""


def scaled_scores(q: torch.Tensor, k: torch.Tensor, scale: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """scale * q k^T `[Hkv, G, n]`, in `out` if there is one, of q `[Hkv, G, d]` and k `[Hkv, n, d]`: float32 (float64
    for float64), whatever the dtype of the rows. On a CPU float32 keys beyond the caches are multiplied as k q^T for
    few queries, which streams them. Within the caches, and for many queries, the plain order is as fast or faster."""
    if k.dtype in HALF:
        if out is None:
            out = torch.empty(*q.shape[:2], k.shape[1], dtype=torch.float32, device=q.device)
        return _half_products(q, k, out).mul_(scale)
    q = q * scale
    if k.device.type == "cpu" and k.dtype == torch.float32 and q.shape[1] <= FEW and k.nbytes >= CACHED:
        product = torch.bmm(k, q.transpose(1, 2)).transpose(1, 2)
        return product.contiguous() if out is None else out.copy_(product)
    return torch.bmm(q, k.transpose(1, 2), out=out)


def _half_products(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """q k^T of half precision rows, summed and kept in float32: rounded to the rows' dtype a score of 20 is off by 0.05
    in bfloat16, and so is its weight."""
    if k.is_cuda:
        return out.copy_(torch.bmm(q, k.transpose(1, 2), out_dtype=torch.float32))
    rows = max(1, WIDENED // (k.shape[2] * k.itemsize))
    for query, keys, scores in zip(q.float(), k, out, strict=True):
        for first in range(0, len(keys), rows):
            torch.mm(query, keys[first : first + rows].float().t(), out=scores[:, first : first + rows])
    return out


def attention_weights(
    q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unnormalised softmax of one part. q `[Hkv, G, d]`, k `[Hkv, n, d]`, n >= 1.

    Returns exp(s - lse) `[Hkv, G, n]` and lse `[Hkv, G]` of the scores s = scale * q k^T, capped if there is a softcap.
    """
    scores = capped(scaled_scores(q, k, scale), softcap)
    weights = torch.softmax(scores, -1)
    return weights, scores.amax(-1) - weights.amax(-1).log()


def capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Scaled scores s as c tanh(s / c), changed in place; as they are where c is None."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def attend_part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode attention of one query per head over rows that lie together.

    q `[Hkv, G, d]`, k and v `[Hkv, n, d]`, n >= 1. Returns out `[Hkv, G, d]` and lse `[Hkv, G]`, both float32
    (float64 for float64).
    """
    weights, lse = attention_weights(q, k, scale)
    out = torch.bmm(weights.to(v.dtype), v)
    return out.to(lse.dtype), lse


def merge_lse(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint parts from the attention over each (Hydragen §3.1, ChunkAttention eq. 2).

    outs `[..., d]` and lses `[...]` of each part. Returns out `[..., d]` and lse `[...]` of the union.
    """
    stacked = torch.stack(list(lses))
    lse = torch.logsumexp(stacked, 0)
    shares = (stacked - lse).exp_().unsqueeze(-1)
    out = outs[0] * shares[0]
    for part, share in zip(outs[1:], shares[1:], strict=True):
        out = torch.addcmul(out, part, share)
    return out, lse
