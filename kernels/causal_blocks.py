"""Causal attention for many queries, with keys that are read from disk block by block.

All queries attend to a block before the next block is read, so the KV cache need not fit in memory.
"""

from __future__ import annotations

import ctypes

import torch

from . import causal_cpu
from .reference import attention_weights, capped, merge_lse, scaled_scores

_BLOCK = 1024
"""Number of keys that are scored at a time."""


class BlockedAttention:
    """Accumulates the attention of queries q `[H, m, d]` over blocks of keys, in float32 (float64 for float64 inputs).

    Call `add` for each block of tokens that precedes the queries, in any order. Then call `add_causal` once with the
    remaining keys, which include those of the m query tokens.
    """

    def __init__(self, q: torch.Tensor, kv_heads: int, scale: float, softcap: float | None = None) -> None:
        self.q = q
        self._grouped, self._scale, self._softcap = q.unflatten(0, (kv_heads, -1)), scale, softcap
        self._library = causal_cpu.library_for(q)
        wide = torch.promote_types(q.dtype, torch.float32)
        self._out = torch.zeros(self._grouped.shape, dtype=wide, device=q.device)
        self._lse = torch.full(self._grouped.shape[:-1], -torch.inf, dtype=wide, device=q.device)

    def add(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Attend to all keys of a block, without a mask. k and v are `[Hkv, n, d]`."""
        if self._library is not None:
            self._attend_in_c(self._library, k, v, causal=False)
            return
        q = self._grouped.flatten(1, 2)
        if self._uses_flash:
            out, lse = _flash(q[None], k[None], v[None], causal=False, scale=self._scale)
            self._merge(out[0].view(self._out.shape), lse[0].view(self._lse.shape))
            return
        for first in range(0, k.shape[1], _BLOCK):
            block = slice(first, first + _BLOCK)
            weights, lse = attention_weights(q, k[:, block], self._scale, self._softcap)
            out = torch.bmm(weights.to(v.dtype), v[:, block])
            self._merge(out.view(self._out.shape), lse.view(self._lse.shape))

    def add_causal(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Attend causally to keys and values `[Hkv, n, d]`, n >= m. The last m keys belong to the query tokens."""
        if self._library is not None:
            self._attend_in_c(self._library, k, v, causal=True)
            return
        m = self.q.shape[1]
        if k.shape[1] > m:
            self.add(k[:, :-m], v[:, :-m])
            k, v = k[:, -m:], v[:, -m:]
        if self._uses_flash:
            for group in range(self._grouped.shape[1]):
                out, lse = _flash(self._grouped[None, :, group], k[None], v[None], causal=True, scale=self._scale)
                self._merge(out[0].unsqueeze(1), lse[0].unsqueeze(1), slice(group, group + 1))
            return
        hidden = torch.ones(m, m, dtype=torch.bool, device=k.device).triu_(1)
        for group in range(self._grouped.shape[1]):
            scores = capped(scaled_scores(self._grouped[:, group], k, self._scale), self._softcap)
            scores = scores.masked_fill_(hidden, -torch.inf)
            lse = scores.logsumexp(-1)
            out = torch.bmm((scores - lse.unsqueeze(-1)).exp_().to(v.dtype), v)
            self._merge(out.unsqueeze(1), lse.unsqueeze(1), slice(group, group + 1))

    def result(self, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Return the attention `[H, m, d]` over all blocks. `sinks` `[H]` are learned attention sinks."""
        out = self._out.flatten(0, 1)
        if sinks is not None:
            out = out * torch.sigmoid(self._lse.flatten(0, 1) - sinks.to(self._lse.dtype)[:, None]).unsqueeze(-1)
        return out.to(self.q.dtype)

    def _attend_in_c(self, library: ctypes.CDLL, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> None:
        out, lse = self._out.flatten(0, 1), self._lse.flatten(0, 1)
        causal_cpu.attend_and_merge(library, self.q, k, v, out, lse, self._scale, self._softcap, causal=causal)

    @property
    def _uses_flash(self) -> bool:
        return self.q.device.type == "cpu" and self._softcap is None

    def _merge(self, out: torch.Tensor, lse: torch.Tensor, groups: slice = slice(None)) -> None:
        outs, sums = self._out[:, groups], self._lse[:, groups]
        merged, merged_lse = merge_lse([outs, out.to(outs.dtype)], [sums, lse.to(sums.dtype)])
        outs.copy_(merged)
        sums.copy_(merged_lse)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse
