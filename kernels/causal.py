"""Exact causal attention of the newest m queries over all n keys so far. Used for prefill chunks and in calibration."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import causal_cpu
from .reference import capped, merge_lse, scaled_scores

KEYS_AT_ONCE = 1024
"""Number of keys that are processed at a time if soft caps or sinks are used."""

FEW_QUERIES = 128
"""Maximum number of queries per KV head (tokens times query heads per group) that are computed in one call."""


def attend_causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output `[H, m, d]` for the last m of n tokens.

    Args:
        q: Queries `[H, m, d]`. Query i attends to keys up to n - m + i, but only to the last `window` of them.
        k, v: Keys and values of all n tokens, `[Hkv, n, d]`.
        scale: Factor by which the scores q·k are multiplied.
        window: Length of the sliding window in tokens, or None for full attention.
        softcap: Soft cap c, which maps each score s to c tanh(s / c). None disables it.
        sinks: Learned attention sinks `[H]`. Each sink adds one score to the softmax denominator of its head, but has
            no value vector.
    """
    heads, m, d = q.shape
    if (library := causal_cpu.library_for(q)) is not None:
        return causal_cpu.attend_causal(library, q, k, v, scale, window, softcap, sinks)
    if softcap is not None or sinks is not None:
        return _online_softmax(q, k, v, scale, window or k.shape[1], softcap, sinks)
    if window is None and q.device.type == "cpu" and heads // k.shape[0] * m <= FEW_QUERIES:
        return _attend_few_queries(q.unflatten(0, (k.shape[0], -1)), k, v, scale)
    if window is None and heads > k.shape[0] and _supports_grouped_queries(q, k, v):
        return _attend_with_bias(q[None], k[None], v[None], scale, k.shape[1], enable_gqa=True)[0]
    attend = _windowed if window is not None and window < k.shape[1] else _CAUSAL.get(q.device.type, _attend_with_bias)
    grouped = q.unflatten(0, (k.shape[0], -1))
    # Compute one query head of each group at a time, so that K and V are never repeated.
    outs = [attend(grouped[None, :, g], k[None], v[None], scale, window or k.shape[1]) for g in range(grouped.shape[1])]
    return torch.stack([out[0] for out in outs], dim=1).view(heads, m, d)


def _attend_few_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend with few queries q `[Hkv, G, m, d]`. K and V are read only once for all G query heads of a group."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    m = q.shape[2]
    stacked, past = q.flatten(1, 2)[None], k.shape[1] - (m if m > 1 else 0)
    parts = []
    if past:
        parts.append(flash(stacked, k[None, :, :past], v[None, :, :past], 0.0, False, scale=scale))
    if m > 1:
        new_kv = (x[:, -m:].unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in (k, v))
        out, lse = flash(q, *new_kv, 0.0, True, scale=scale)
        parts.append((out.flatten(1, 2)[None], lse.flatten(1, 2)[None]))
    outs, sums = zip(*parts, strict=True)
    merged = outs[0] if len(parts) == 1 else merge_lse(list(outs), list(sums))[0].to(q.dtype)
    attended: torch.Tensor = merged[0].unflatten(1, (-1, m)).flatten(0, 1)
    return attended


def _windowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    m, n = q.shape[2], k.shape[2]
    first = max(0, n - m - window + 1)
    # Query i sees the keys (past + i - window, past + i]. One byte per pair, because windows may be long.
    past = n - m - first
    mask = torch.ones(m, n - first, dtype=torch.bool, device=q.device).tril_(past).triu_(past - window + 1)
    return F.scaled_dot_product_attention(q, k[:, :, first:], v[:, :, first:], attn_mask=mask, scale=scale)


def _supports_grouped_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    if q.device.type != "cuda":
        return False
    # torch's other kernels reject grouped queries, or repeat K and V if there is a mask.
    parameters = torch.backends.cuda.SDPAParams(q[None], k[None], v[None], None, 0.0, False, True)
    return torch.backends.cuda.can_use_flash_attention(parameters)


def _attend_with_bias(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, enable_gqa: bool = False
) -> torch.Tensor:
    """Attend with torch's `causal_lower_right` bias, which CUDA flash kernels apply without allocating a mask."""
    # Imported late: this takes longer than importing torch itself, and neither CPUs nor `info` need it.
    from torch.nn.attention.bias import causal_lower_right

    mask: torch.Tensor = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)


def _attend_in_two_parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """Attend to the m new tokens causally and to all earlier tokens without a mask, then merge both results."""
    # The public function does not return the log-sum-exp, so call the underlying operator.
    # torch would expand the causal bias object to a float mask `[m, n]`, which is slower.
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    m = q.shape[2]
    out: torch.Tensor
    out, lse = flash(q, k[:, :, -m:], v[:, :, -m:], 0.0, True, scale=scale)
    if k.shape[2] > m:
        past, past_lse = flash(q, k[:, :, :-m], v[:, :, :-m], 0.0, False, scale=scale)
        merged, _ = merge_lse([past, out], [past_lse, lse])
        out = merged.to(q.dtype)
    return out


def _online_softmax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend to keys block by block. Unlike torch's attention, this supports soft caps and sinks."""
    (heads, m, d), (kv_heads, n, _) = q.shape, k.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.reshape(kv_heads, -1, d)
    query_positions = torch.arange(n - m, n, device=q.device).repeat(heads // kv_heads)[:, None]
    # A sink is a score without a value, so the maximum starts as the sink's score, and the sum as exp(0) = 1.
    start = (
        torch.full((heads,), torch.finfo(wide).min, dtype=wide, device=q.device) if sinks is None else sinks.to(wide)
    )
    peak = start.view(kv_heads, -1, 1).expand(-1, -1, m).flatten(1)
    total = torch.full_like(peak, 0.0 if sinks is None else 1.0)
    out = torch.zeros(*peak.shape, d, dtype=wide, device=q.device)
    for first in range(max(0, n - m - window + 1), n, KEYS_AT_ONCE):
        block = slice(first, min(first + KEYS_AT_ONCE, n))
        distance = query_positions - torch.arange(block.start, block.stop, device=q.device)
        scores = capped(scaled_scores(grouped, k[:, block], scale), softcap)
        scores = scores.masked_fill_((distance < 0) | (distance >= window), -torch.inf)
        new_peak = torch.maximum(peak, scores.amax(-1))
        weights, rescale = (scores - new_peak[..., None]).exp_(), (peak - new_peak).exp()
        total = total * rescale + weights.sum(-1)
        out = out * rescale[..., None] + torch.bmm(weights.to(v.dtype), v[:, block])
        peak = new_peak
    return (out / total[..., None]).to(q.dtype).view(heads, m, d)


_CAUSAL = {"cpu": _attend_in_two_parts}
