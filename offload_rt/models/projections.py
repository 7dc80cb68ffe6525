"""From a layer's attention module to its queries, keys and values: projections of their own or fused, norms of queries
and keys for each head or over all of them. Attention itself is not here, and neither are positions.

Every parameter of the module is used, or the model is refused.
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
    """One layer's; `[heads, T, d]` each, before positions. Where keys and values are not equally wide, d is the wider
    of both, and zeros fill the narrower up: they add nothing to a score, and are cut off what was attended."""

    def __init__(self, attention: Any, heads: int, kv_heads: int) -> None:
        """heads, kv_heads: what the configuration says. Raises ModelError for a module that computes something else."""
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
            self._q, self._split = attention.qkv_proj, self._one_behind_the_other
            used.add("qkv_proj")
        elif hasattr(attention, "query_key_value"):
            self._q, self._split = attention.query_key_value, self._head_by_head
            used.add("query_key_value")
        else:
            raise ModelError(
                f"{type(attention).__name__} has none of q_proj, qkv_proj and query_key_value", reason="modules"
            )
        self._query_norm = self._norm(attention, ("q_norm", "q_layernorm"), heads, used)
        self._key_norm = self._norm(attention, ("k_norm", "k_layernorm"), kv_heads, used)
        self._behind: Callable[[torch.Tensor], torch.Tensor] | None = getattr(attention, "qk_norm", None)
        refuse_unused(attention, used)
        self._check_widths(attention)

    def qkv(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[H, T, d]`, k and v `[Hkv, T, d]` of attention inputs `[T, D]`."""
        if self._split is None:
            return self.query(x), *self.key_value(x)
        q, k, v = self._split(self._q(x))
        return self._wide(self._query_norm(q)), self._wide(self._key_norm(k)), self._wide(v.transpose(0, 1))

    def query(self, x: torch.Tensor) -> torch.Tensor:
        """q `[H, T, d]`; a fused projection computes all three."""
        if self._split is not None:
            return self._wide(self._query_norm(self._split(self._q(x))[0]))
        return self._wide(self._query_norm(self._q(x).view(len(x), self.heads, self._key_dim)))

    def key_value(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v `[Hkv, T, d]`."""
        if self._split is not None:
            _, k, v = self._split(self._q(x))
        else:
            k, v = (each(x).view(len(x), self.kv_heads, -1) for each in (self._k, self._v))
        return self._wide(self._key_norm(k)), self._wide(v.transpose(0, 1))

    def normed_behind(self, rows: torch.Tensor) -> torch.Tensor:
        """Queries or keys `[heads, T, d]`, rotated, through a norm that stands behind the rotation and has no gain
        (Llama 4), so that a later rotation changes nothing of it."""
        return rows if self._behind is None else self._behind(rows)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """`[T, D]` of what was attended, `[T, H d]`."""
        if self._value_dim < self.head_dim:
            attended = attended.view(len(attended), self.heads, -1)[..., : self._value_dim].flatten(1)
        out: torch.Tensor = self._output(attended)
        return out

    def _wide(self, rows: torch.Tensor) -> torch.Tensor:
        """`[heads, T, d]` of keys, queries or values."""
        missing = self.head_dim - rows.shape[-1]
        return F.pad(rows, (0, missing)) if missing else rows

    def _one_behind_the_other(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v `[T, heads, d]` of `[T, (H + 2 Hkv) d]`: all queries, all keys, all values (Phi-3)."""
        rows = fused.view(len(fused), -1, self._key_dim)
        q, k, v = rows.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v

    def _head_by_head(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v `[T, heads, d]` of `[T, Hkv (G + 2) d]`: each KV head's queries, its key, its value (GPT-NeoX,
        Falcon)."""
        rows = fused.view(len(fused), self.kv_heads, -1, self._key_dim)
        return rows[:, :, :-2].flatten(1, 2), rows[:, :, -2], rows[:, :, -1]

    def _norm(self, attention: Any, names: Collection[str], heads: int, used: set[str]) -> Norm:
        """`[T, heads, d]` to `[heads, T, d]` through the first module of these names, if there is one: over a head
        (`[d]`), over all (`[heads * d]`), or a gain for each (`[heads, d]`)."""
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
            f"{type(attention).__name__}.{name} norms {shape}, neither a head of {self._key_dim} nor {heads} of them",
            reason="modules",
        )

    def _check_widths(self, attention: Any) -> None:
        """Raises ModelError where keys and values are not as wide as the heads say."""
        q, k, v = (self.heads, self._key_dim), (self.kv_heads, self._key_dim), (self.kv_heads, self._value_dim)
        for name, (heads, dim) in {"q_proj": q, "k_proj": k, "v_proj": v}.items():
            width = getattr(getattr(attention, name, None), "out_features", heads * dim)
            if width != heads * dim:
                raise ModelError(
                    f"{type(attention).__name__}.{name} gives {width} numbers, not {heads} heads of {dim}: every layer "
                    "must have as many heads, as wide, as the configuration says",
                    reason="heads",
                )


def first_of(module: Any, names: Collection[str]) -> Any:
    """The first attribute of `module` of these names that is there. Raises ModelError where none is."""
    found = next((each for each in (getattr(module, name, None) for name in names) if each is not None), None)
    if found is None:
        raise ModelError(f"{type(module).__name__} has none of {', '.join(names)}", reason="modules")
    return found


def refuse_unused(module: nn.Module, used: Collection[str]) -> None:
    """Raises ModelError where `module` has weights under a name that is not among `used`."""
    children = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    own = [name for name, _ in module.named_parameters(recurse=False)]
    strange = sorted({*children, *own} - set(used))
    if strange:
        raise ModelError(
            f"{type(module).__name__} has {', '.join(strange)}, which this version does not know how to use",
            reason="modules",
        )


def _refuse_latent(attention: Any) -> None:
    if hasattr(attention, "kv_b_proj") or hasattr(attention, "kv_a_proj_with_mqa"):
        raise ModelError(
            f"{type(attention).__name__} is multi-head latent attention: what it caches is not keys and values of each "
            "head; see 'Architectures' in the documentation",
            reason="latent_attention",
        )
