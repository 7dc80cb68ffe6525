"""Attention over gathered KV, norms, RoPE and embeddings in torch: reference implementations of the faster kernels.

Scores, softmax and log-sum-exp (LSE, natural logarithm) are float32 (float64 for float64 inputs). The softmax weights
are multiplied by the values in the dtype of the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

CACHE_BYTES = 8 << 20
"""Number of bytes of keys that fit in the caches of a processor."""

FEW_QUERIES = 8
"""With at most this many queries per KV head, scores are computed as k q^T if the keys exceed `CACHE_BYTES`."""


HALF = (torch.bfloat16, torch.float16)

WIDENED_BYTES = 1 << 20
"""Number of bytes of half-precision keys that a CPU converts to float32 at a time. They fit in its caches."""


def scaled_scores(q: torch.Tensor, k: torch.Tensor, scale: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the scores scale * q k^T `[Hkv, G, n]` for q `[Hkv, G, d]` and k `[Hkv, n, d]`, in `out` if it is given.

    The result is float32 (float64 for float64 keys), even for half-precision keys.
    """
    if k.dtype in HALF:
        if out is None:
            out = torch.empty(*q.shape[:2], k.shape[1], dtype=torch.float32, device=q.device)
        return _half_products(q, k, out).mul_(scale)
    q = q * scale
    # For few queries and keys that exceed the caches, k q^T is faster, because it reads the keys sequentially.
    if k.device.type == "cpu" and k.dtype == torch.float32 and q.shape[1] <= FEW_QUERIES and k.nbytes >= CACHE_BYTES:
        product = torch.bmm(k, q.transpose(1, 2)).transpose(1, 2)
        return product.contiguous() if out is None else out.copy_(product)
    return torch.bmm(q, k.transpose(1, 2), out=out)


def _half_products(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    # Scores must not be rounded to bfloat16: a score of 20 would change by about 0.05, and its weight by 5 %.
    if k.is_cuda:
        return out.copy_(torch.bmm(q, k.transpose(1, 2), out_dtype=torch.float32))
    rows = max(1, WIDENED_BYTES // (k.shape[2] * k.itemsize))
    for query, keys, scores in zip(q.float(), k, out, strict=True):
        for first in range(0, len(keys), rows):
            torch.mm(query, keys[first : first + rows].float().t(), out=scores[:, first : first + rows])
    return out


def attention_weights(
    q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax weights exp(s - lse) `[Hkv, G, n]` and lse `[Hkv, G]` over one part of the keys.

    The scores of q `[Hkv, G, d]` and k `[Hkv, n, d]` (n >= 1) are s = scale * q k^T, with an optional soft cap.
    """
    scores = capped(scaled_scores(q, k, scale), softcap)
    weights = torch.softmax(scores, -1)
    return weights, scores.amax(-1) - weights.amax(-1).log()


def capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Apply a soft cap c to scores s in place: s becomes c tanh(s / c). None leaves the scores unchanged."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def attend_part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with q `[Hkv, G, d]` to k and v `[Hkv, n, d]`, n >= 1. Return out `[Hkv, G, d]` and lse `[Hkv, G]`."""
    weights, lse = attention_weights(q, k, scale)
    out = torch.bmm(weights.to(v.dtype), v)
    return out.to(lse.dtype), lse


def merge_lse(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge out `[..., d]` and lse `[...]` from attention over disjoint parts (Hydragen §3.1, ChunkAttention eq. 2).

    An empty part has out 0 and lse -inf.
    """
    stacked = torch.stack(list(lses))
    lse = torch.logsumexp(stacked, 0)
    shares = (stacked - lse.clamp_min(torch.finfo(lse.dtype).min)).exp_().unsqueeze(-1)
    out = outs[0] * shares[0]
    for part, share in zip(outs[1:], shares[1:], strict=True):
        out = torch.addcmul(out, part, share)
    return out, lse


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide x `[T, D]` by its root mean square in float32, round to the dtype of x, and multiply by weight `[D]`.

    This is the order of operations in transformers' Llama.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to x `[heads, T, d]`: return x * cos + (x with swapped halves) * sin, in the dtype of x.

    cos and sin are `[1, T, d]`. sin includes the sign of each half. Products are computed in the wider of the two
    dtypes.
    """
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    return (wide * cos).add_(wide.roll(x.shape[-1] // 2, dims=-1).mul_(sin)).to(x.dtype)


def embedding_part(part: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows `ids` `[T]` of `part` `[V, P]`, on the device of `ids`.

    `part` contains some columns of an embedding table and may be in host memory.
    """
    return F.embedding(ids.to(part.device), part).to(ids.device)
