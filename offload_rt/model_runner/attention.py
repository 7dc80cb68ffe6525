"""Decode attention of one sequence over KV that is in several parts."""

from __future__ import annotations

import torch

from ..core import KVPart
from ..kernels import decode_attention
from ..kernels.dispatch import attend_counted, attend_runs
from ..kernels.reference import attention_weights, merge_lse
from ..kernels.segments import Run


def attend(
    q: torch.Tensor, parts: list[KVPart], scale: float, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute exact attention over all KV entries of the disjoint `parts`. At least one part must not be empty.

    Args:
        q: Query `[H, d]` of one token.
        parts: KV entries of one layer.
        scale: Factor by which scores q·k are multiplied.
        softcap: Soft cap of the scores, or None.

    Returns:
        out `[H, d]` and lse `[H]` (natural log), in float32 (float64 for float64 inputs).
    """
    heads, d = q.shape
    if q.is_cuda and softcap is None and all(part.counts is None for part in parts):
        whole, whole_lse = attend_runs(q.unsqueeze(1), [Run(0, 1, part.k, part.v) for part in parts], scale)
        return whole.view(heads, d), whole_lse.view(heads)
    grouped = q.view(parts[0].shape[0], -1, d)
    if softcap is not None:
        parts = [_known(part) for part in parts]
    if len(parts) == 1:
        out, lse = _attend_part(grouped, parts[0], scale, softcap)
    else:
        done = [_attend_part(grouped, part, scale, softcap) for part in parts if part.shape[1]]
        out, lse = merge_lse([o for o, _ in done], [s for _, s in done])
    return out.reshape(heads, d), lse.reshape(heads)


def _known(part: KVPart) -> KVPart:
    """Return the valid entries of the part, as a part without `counts`.

    If the part has counts, the host waits for the device to read them.
    """
    if part.counts is None:
        return part
    valid = int(part.counts[0])
    return KVPart(part.k[:, :valid], part.v[:, :valid])


def _attend_part(
    q: torch.Tensor, part: KVPart, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to one part with the fastest kernel. Return out `[Hkv, G, d]` and lse `[Hkv, G]` for q `[Hkv, G, d]`."""
    if part.counts is not None:
        return attend_counted(q.contiguous(), part.k, part.v, part.counts, scale)
    if (code := decode_attention.takes(q)) is not None:
        if (rows := part.paged) is not None:
            return code.attend_paged(q, rows, scale, softcap)
        return code.attend(q, part.k, part.v, scale, softcap)
    weights, lse = attention_weights(q, part.k, scale, softcap)
    return part.mix(weights).to(lse.dtype), lse


def give_to_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Scale the attention output for learned attention sinks, which add to the softmax denominator.

    `out` is `[..., d]`, lse `[...]` is the log-sum-exp of the scores without the sinks. If `sinks` is None, `out` is
    returned unchanged.
    """
    return out if sinks is None else (out * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(out.dtype)


def scores_lse(q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None = None) -> torch.Tensor:
    """Return the natural log of sum(exp(scale * q·k)) over all keys, `[H]`, from q `[H, d]` and k `[Hkv, n, d]`.

    The result is computed on the device of the keys. Its difference to the lse of the attended tokens gives the missed
    attention mass.
    """
    grouped = q.to(k.device).view(k.shape[0], -1, k.shape[2])
    return attention_weights(grouped, k, scale, softcap)[1].flatten()


def group_weights(
    q: torch.Tensor, parts: list[KVPart], scale: float, lse: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    """Return softmax weights `[Hkv, n]` of all n tokens in `parts`, summed over the query heads of each KV head.

    q is `[H, d]`. lse `[H]` is the log-sum-exp over all parts together, as returned by `attend`.
    """
    kv_heads, d = parts[0].shape[0], q.shape[1]
    grouped, whole = q.view(kv_heads, -1, d), lse.view(kv_heads, -1)
    weights = []
    for part in (part for part in parts if part.shape[1]):
        inner, part_lse = attention_weights(grouped, part.k, scale, softcap)
        weights.append((inner * (part_lse - whole).exp().unsqueeze(-1)).sum(1))
    return torch.cat(weights, dim=1)
