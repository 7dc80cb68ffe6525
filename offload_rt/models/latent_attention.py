"""Projections of multi-head latent attention (MLA, DeepSeek-V2 §2.1) in absorbed form.

K and V of all heads are linear functions of one latent vector c per token. All heads also share one rotated key r. Head
h has the key (W_UK,h c, r) and the value W_UV,h c. In absorbed form, attention has only one KV head, with the key (c,
r) and the value c:

* Head h has the query (W_UK,h^T q, r_q). Its product with (c, r) equals the original score.
* W_UV,h is applied after attention, to the weighted sum of latent vectors.

The KV cache stores only keys. Attention also uses them as values, and `output` ignores the components of the weighted
sum that come from r.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ModelError
from .decoder_layer import fused_norm, refuse_unused
from .linear import absorbable_weight
from .rotary import Rotate

_QUERY = ("q_a_proj", "q_a_layernorm", "q_b_proj")


def is_latent(attention: Any) -> bool:
    return hasattr(attention, "kv_a_proj_with_mqa")


class LatentProjections:
    """Projections of one layer with latent attention. Provides the same methods as `decoder_layer.Projections`."""

    kv_heads = 1
    gated = False

    def __init__(self, attention: Any) -> None:
        self.heads = int(attention.num_heads)
        self._rank, self._rope_dim = int(attention.kv_lora_rank), int(attention.qk_rope_head_dim)
        self._nope_dim, self._value_dim = int(attention.qk_nope_head_dim), int(attention.v_head_dim)
        self.head_dim, self.value_dim = self._rank + self._rope_dim, self._rank
        self.default_scale = (self._nope_dim + self._rope_dim) ** -0.5
        names = ("q_proj",) if getattr(attention, "q_proj", None) is not None else _QUERY
        self._query_modules = [fused_norm(getattr(attention, name)) for name in names]
        self._kv_a_proj, self._kv_a_norm = attention.kv_a_proj_with_mqa, fused_norm(attention.kv_a_layernorm)
        self._kv_b_proj, self._o_proj = attention.kv_b_proj, attention.o_proj
        refuse_unused(attention, {*names, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"})
        if getattr(self._kv_b_proj, "bias", None) is not None:
            raise ModelError(
                f"{type(attention).__name__}.kv_b_proj has a bias, which absorbed latent attention does not support",
                reason="modules",
            )
        self._unpacked_weights: torch.Tensor | None = None

    def qkv(self, x: torch.Tensor, rotate: Rotate) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query(x, rotate), *self.key_value(x, rotate)

    def query(self, x: torch.Tensor, rotate: Rotate) -> torch.Tensor:
        for project in self._query_modules:
            x = project(x)
        q_nope, q_rope = x.view(len(x), self.heads, -1).transpose(0, 1).split([self._nope_dim, self._rope_dim], dim=-1)
        return torch.cat((torch.bmm(q_nope, self._kv_b_weights(x)[:, : self._nope_dim]), rotate(q_rope)), dim=-1)

    def key_value(self, x: torch.Tensor, rotate: Rotate) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v, which are the same tensor `[1, T, d]`."""
        latent, k_rope = self._kv_a_proj(x).split([self._rank, self._rope_dim], dim=-1)
        k = torch.cat((self._kv_a_norm(latent)[None], rotate(k_rope[None])), dim=-1)
        return k, k

    def query_and_gate(self, x: torch.Tensor, rotate: Rotate) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("latent attention has no output gate")

    def rotate_cached(self, k: torch.Tensor, rotate: Rotate) -> torch.Tensor:
        """Apply `rotate` to the part r of cached keys `[1, n, d]`. Return the resulting keys."""
        return torch.cat((k[..., : self._rank], rotate(k[..., self._rank :])), dim=-1)

    def output(self, attended: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        latent = attended.view(len(attended), self.heads, -1)[..., : self._rank].transpose(0, 1)
        values = torch.bmm(latent, self._kv_b_weights(latent)[:, self._nope_dim :].mT)
        out: torch.Tensor = self._o_proj(values.transpose(0, 1).flatten(1))
        return out

    def _kv_b_weights(self, like: torch.Tensor) -> torch.Tensor:
        """Return W_UK and W_UV of all heads, `[H, key + value, rank]`, with the dtype and device of `like`."""
        # A plain weight is read in each call, because it may be streamed or changed.
        weight: torch.Tensor | None = absorbable_weight(self._kv_b_proj, like.dtype)
        if weight is None:
            if self._unpacked_weights is None:
                self._unpacked_weights = self._unpack(like)
            weight = self._unpacked_weights
        return weight.view(self.heads, -1, self._rank)

    def _unpack(self, like: torch.Tensor) -> torch.Tensor:
        """Return the weight of `kv_b_proj`, whatever its format, by applying the layer to the identity matrix."""
        identity = torch.eye(self._rank, dtype=like.dtype, device=like.device)
        expanded: torch.Tensor = self._kv_b_proj(identity)
        return expanded.T.contiguous()
