"""Compute queries, keys and values with the projections and norms of a layer's attention module.

Projections may be separate or fused. Norms may apply to each head or to all heads together. Rotary positions are in
`rotary`, attention is in `kernels`. A module with parameters that are not used here is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import ModelError

Norm = Callable[[torch.Tensor], torch.Tensor]


class Projections:
    """Projections of one layer, to `[heads, T, d]`, before rotation.

    If keys and values have different widths, d is the larger one and the other is padded with zeros. Zeros do not
    change scores, and `output` removes them from attention outputs.
    """

    def __init__(self, attention: Any, heads: int, kv_heads: int) -> None:
        """Find the projections of `attention`.

        Args:
            attention: The attention module of a layer.
            heads: Number of query heads in the configuration.
            kv_heads: Number of KV heads in the configuration.

        Raises:
            ModelError: The module is not supported, or does not match the configuration.
        """
        _refuse_latent(attention)
        self.heads, self.kv_heads = heads, kv_heads
        self._key_dim = int(getattr(attention, "head_dim", None) or attention.head_size)
        self._value_dim = int(getattr(attention, "v_head_dim", None) or self._key_dim)
        self.head_dim = max(self._key_dim, self._value_dim)
        self._output: nn.Module = first_of(attention, ("o_proj", "dense", "out_proj"))
        used = {"o_proj", "dense", "out_proj", "sinks"}
        if hasattr(attention, "q_proj"):
            self._q, self._k, self._v = attention.q_proj, attention.k_proj, attention.v_proj
            self._split: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None
            used |= {"q_proj", "k_proj", "v_proj"}
        elif hasattr(attention, "qkv_proj"):
            self._q, self._split = attention.qkv_proj, self._split_blocks
            used.add("qkv_proj")
        elif hasattr(attention, "query_key_value"):
            self._q, self._split = attention.query_key_value, self._split_groups
            used.add("query_key_value")
        else:
            raise ModelError(
                f"{type(attention).__name__} has none of q_proj, qkv_proj and query_key_value", reason="modules"
            )
        self._query_norm = self._norm(attention, ("q_norm", "q_layernorm"), heads, used)
        self._key_norm = self._norm(attention, ("k_norm", "k_layernorm"), kv_heads, used)
        self._norm_after_rotation: Callable[[torch.Tensor], torch.Tensor] | None = getattr(attention, "qk_norm", None)
        refuse_unused(attention, used)
        self._check_widths(attention)

    def qkv(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q `[H, T, d]`, k and v `[Hkv, T, d]` for attention inputs `[T, D]`."""
        if self._split is None:
            return self.query(x), *self.key_value(x)
        q, k, v = self._split(self._q(x))
        return self._wide(self._query_norm(q)), self._wide(self._key_norm(k)), self._wide(v.transpose(0, 1))

    def query(self, x: torch.Tensor) -> torch.Tensor:
        """Return q `[H, T, d]`. A fused projection computes k and v as well and discards them."""
        if self._split is not None:
            return self._wide(self._query_norm(self._split(self._q(x))[0]))
        return self._wide(self._query_norm(self._q(x).view(len(x), self.heads, self._key_dim)))

    def key_value(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v `[Hkv, T, d]`. A fused projection computes q as well and discards it."""
        if self._split is not None:
            _, k, v = self._split(self._q(x))
        else:
            k, v = (each(x).view(len(x), self.kv_heads, -1) for each in (self._k, self._v))
        return self._wide(self._key_norm(k)), self._wide(v.transpose(0, 1))

    def normed_after_rotation(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the norm after the rotation (Llama 4), if any, to queries or keys `[heads, T, d]`.

        This norm has no gain, so it commutes with a later rotation of cached keys.
        """
        return rows if self._norm_after_rotation is None else self._norm_after_rotation(rows)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """Apply the output projection to attention outputs `[T, H * d]`. Return `[T, D]`."""
        if self._value_dim < self.head_dim:
            attended = attended.view(len(attended), self.heads, -1)[..., : self._value_dim].flatten(1)
        out: torch.Tensor = self._output(attended)
        return out

    def _wide(self, rows: torch.Tensor) -> torch.Tensor:
        """Pad the last dimension of queries, keys or values with zeros to `head_dim`."""
        missing = self.head_dim - rows.shape[-1]
        return F.pad(rows, (0, missing)) if missing else rows

    def _split_blocks(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split `[T, (H + 2 Hkv) d]`, all queries before all keys before all values (Phi-3), into `[T, heads, d]`."""
        rows = fused.view(len(fused), -1, self._key_dim)
        q, k, v = rows.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v

    def _split_groups(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split `[T, Hkv (G + 2) d]`, with G queries, key and value of each KV head together, into `[T, heads, d]`.

        GPT-NeoX and Falcon use this layout.
        """
        rows = fused.view(len(fused), self.kv_heads, -1, self._key_dim)
        return rows[:, :, :-2].flatten(1, 2), rows[:, :, -2], rows[:, :, -1]

    def _norm(self, attention: Any, names: Collection[str], heads: int, used: set[str]) -> Norm:
        """Return a function from `[T, heads, d]` to `[heads, T, d]` that applies the first norm found under `names`.

        The shape of the norm's weight selects its kind: `[d]` for each head with shared gains, `[heads * d]` over all
        heads together, `[heads, d]` for each head with its own gains. Without a norm, the function only transposes.
        """
        name = next((name for name in names if getattr(attention, name, None) is not None), None)
        if name is None:
            return lambda rows: rows.transpose(0, 1)
        module = getattr(attention, name)
        used.add(name)
        shape = tuple(module.weight.shape) if hasattr(module, "weight") else None
        if shape == (self._key_dim,):
            return lambda rows: module(rows.transpose(0, 1))
        if shape == (heads * self._key_dim,):
            return lambda rows: module(rows.flatten(1)).view_as(rows).transpose(0, 1)
        if shape == (heads, self._key_dim):
            return lambda rows: module(rows).transpose(0, 1)
        raise ModelError(
            f"{type(attention).__name__}.{name} has weights of shape {shape}; expected one or {heads} heads of "
            f"{self._key_dim}",
            reason="modules",
        )

    def _check_widths(self, attention: Any) -> None:
        """Raise ModelError if the width of a projection does not match the number of heads."""
        q, k, v = (self.heads, self._key_dim), (self.kv_heads, self._key_dim), (self.kv_heads, self._value_dim)
        for name, (heads, dim) in {"q_proj": q, "k_proj": k, "v_proj": v}.items():
            width = getattr(getattr(attention, name, None), "out_features", heads * dim)
            if width != heads * dim:
                raise ModelError(
                    f"{type(attention).__name__}.{name} has {width} outputs; expected {heads} heads of {dim}, because "
                    "all layers must have the number and width of heads in the configuration",
                    reason="heads",
                )


def first_of(module: Any, names: Collection[str]) -> Any:
    """Return the first attribute of `module` under `names` that is not None. Raises ModelError if there is none."""
    found = next((each for each in (getattr(module, name, None) for name in names) if each is not None), None)
    if found is None:
        raise ModelError(f"{type(module).__name__} has none of {', '.join(names)}", reason="modules")
    return found


def refuse_unused(module: nn.Module, used: Collection[str]) -> None:
    """Raise ModelError if `module` has parameters or submodules with parameters that are not in `used`."""
    children = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    own = [name for name, _ in module.named_parameters(recurse=False)]
    strange = sorted({*children, *own} - set(used))
    if strange:
        raise ModelError(
            f"{type(module).__name__} has {', '.join(strange)}, which this version does not support",
            reason="modules",
        )


def _refuse_latent(attention: Any) -> None:
    if hasattr(attention, "kv_b_proj") or hasattr(attention, "kv_a_proj_with_mqa"):
        raise ModelError(
            f"{type(attention).__name__} is multi-head latent attention, which does not cache keys and values per head "
            "and is not supported; see 'Architectures' in the documentation",
            reason="latent_attention",
        )
