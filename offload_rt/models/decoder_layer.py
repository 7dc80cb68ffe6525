"""One decoder layer without its attention: norms, MLP, residual stream, and the projections of the attention module.

The structure is inferred from the names of the layer's modules. If a layer has parameters that would not be used, the
model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import ModelError
from ..kernels.dispatch import rms_norm
from .kv_sharing import uses_earlier_kv
from .layer_embeddings import LayerInputGate
from .rotary import Rotate
from .weights import attention_of

Norm = Callable[[torch.Tensor], torch.Tensor]

_MLP = ("mlp", "block_sparse_moe", "feed_forward", "shared_mlp")


@dataclass(frozen=True)
class Norms:
    """Attribute names of the norms before and after a layer's attention and MLP, or None where there is no norm.

    If `parallel` is set, attention and MLP both read the layer's input. If the MLP then has no norm of its own, it uses
    the norm of the attention.
    """

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None
    parallel: bool = False


_PLACEMENTS = (
    # Llama and most others; Apertus; VaultGemma
    Norms("input_layernorm", None, "post_attention_layernorm", None),
    Norms("attention_layernorm", None, "feedforward_layernorm", None),
    Norms("input_layernorm", None, "pre_feedforward_layernorm", None),
    # Gemma 2 and 3
    Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    # GLM-4
    Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    # OLMo 2 and 3
    Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    # Cohere, Phi, Falcon-7B
    Norms("input_layernorm", None, None, None, parallel=True),
    # Falcon-40B
    Norms("ln_attn", None, "ln_mlp", None, parallel=True),
    # Bamba, Falcon-H1; LFM2; LFM3; Nemotron-H, whose attention layers have no MLP
    Norms("input_layernorm", None, "pre_ff_layernorm", None),
    Norms("operator_norm", None, "ffn_norm", None),
    Norms("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
    Norms("norm", None, None, None),
)
"""Known norm placements. The names of a layer's norms determine which of them applies."""


class DecoderLayer:
    """The computations of one decoder layer before and after its attention."""

    def __init__(self, module: Any) -> None:
        """Find attention, MLP and norms among the submodules of `module`.

        Raise ModelError if the placement of the norms is unknown, or if a submodule with weights would not be used.
        """
        self.attention = attention_of(module)
        attention_only = self.attention is getattr(module, "mixer", None)
        self._mlp: Any = None if attention_only else first_of(module, _MLP)
        shared = None if attention_only else getattr(module, "shared_mlp", None)
        self._shared_mlp = None if shared is self._mlp else shared
        # Falcon-H1's recurrent mixer runs in parallel with the attention and gets the same input.
        self._mixer = getattr(module, "mamba", None)
        self._parallel_experts = ParallelExperts(module) if ParallelExperts.found_in(module) else None
        self._input_gate = LayerInputGate(module) if LayerInputGate.found_in(module) else None
        used = [self.attention, self._mlp, self._shared_mlp, self._mixer]
        children = list(module.named_children())
        optional = [part for part in (self._parallel_experts, self._input_gate) if part is not None]
        used_names = {name for name, child in children if any(child is each for each in used)}
        used_names |= {name for part in optional for name in part.MODULES}
        norm_names = {name for name, _ in children if "norm" in name or name.startswith("ln_")} - used_names
        norms = next((n for n in _PLACEMENTS if norm_names == _names(n)), None)
        if norms is None:
            raise ModelError(
                f"{type(module).__name__} has the norms {', '.join(sorted(norm_names))}, whose placement is unknown",
                reason="norms",
            )
        refuse_unused(module, used_names | norm_names)
        # MiniCPM3 calls the multiplier `residual_scale`.
        multiplier = float(getattr(module, "residual_multiplier", getattr(module, "residual_scale", 1.0)))
        self.before_attention = _norm_of(module, norms.before_attention)
        self._before_mlp = _norm_of(module, norms.before_mlp)
        self._after_attention = _norm_of(module, norms.after_attention, multiplier)
        self._after_mlp = _norm_of(module, norms.after_mlp, multiplier)
        self._parallel = norms.parallel or bool(getattr(module, "use_parallel_residual", False))
        if self._parallel and norms.before_mlp is None:
            self._before_mlp = self.before_attention
        self.input_multiplier = float(getattr(module, "attention_in_multiplier", 1.0))
        self._attention_multiplier = float(getattr(module, "attn_out_multiplier", 1.0))
        self._mixer_multiplier = float(getattr(module, "ssm_out_multiplier", 1.0))
        self.is_moe = hasattr(self._mlp, "experts")
        self._scalar_module: Any = module if hasattr(module, "layer_scalar") else None  # Gemma 4

    def after_attention(
        self, hidden: torch.Tensor, projected: torch.Tensor, run_mixer: Callable[[Any, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the residual stream `[T, D]`: the layer's input `hidden` plus its projected attention, both `[T, D]`.

        If attention and MLP run in parallel, the MLP's output is also added. `run_mixer` runs the Mamba mixer of layers
        that have one in parallel with attention (Falcon-H1).
        """
        if self._mixer is not None:
            mixer_output = run_mixer(self._mixer, self.before_attention(hidden)) * self._mixer_multiplier
            projected = mixer_output + projected * self._attention_multiplier
        residual = hidden + self._after_attention(projected)
        return residual + self._run_mlp(hidden) if self._parallel else residual

    def mlp(self, residual: torch.Tensor, layer_input: Callable[[], torch.Tensor] | None) -> torch.Tensor:
        """Return the layer's output `[T, D]`, computed from the residual stream after attention.

        `layer_input` computes the tokens' layer input `[T, P]` (see `LayerEmbeddings`). It is None for models without
        one.
        """
        if self._parallel or self._mlp is None:
            return residual
        out = residual + self._run_mlp(residual)
        if self._input_gate is not None:
            out = self._input_gate.add(out, layer_input)
        return out if self._scalar_module is None else out * self._scalar_module.layer_scalar

    def _run_mlp(self, x: torch.Tensor) -> torch.Tensor:
        normed = self._before_mlp(x)
        if not self.is_moe:
            out = self._mlp(normed)
            return self._after_mlp(out if self._parallel_experts is None else self._parallel_experts.add(out, x))
        # A mixture of experts needs an input of shape `[1, T, D]`, and it may return router scores as well.
        out = self._mlp(normed[None])
        mixed = (out[0] if isinstance(out, tuple) else out).view_as(x)
        if self._shared_mlp is not None:
            mixed = mixed + self._shared_mlp(normed)
        return self._after_mlp(mixed)


class ParallelExperts:
    """Experts that run in parallel with a layer's dense MLP and have their own norms and router (Gemma 4)."""

    MODULES = (
        "router", "experts", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_1",
        "post_feedforward_layernorm_2",
    )  # fmt: skip

    def __init__(self, module: Any) -> None:
        self._module = module

    @classmethod
    def found_in(cls, module: Any) -> bool:
        return all(hasattr(module, name) for name in cls.MODULES)

    def add(self, mlp: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Normalise the MLP output `mlp` and the output of the experts, and return their sum `[T, D]`."""
        layer = self._module  # its experts may be replaced later (`transfer.weights.experts`)
        _, weights, chosen = layer.router(residual)
        experts = layer.experts(layer.pre_feedforward_layernorm_2(residual), chosen, weights)
        mixed: torch.Tensor = layer.post_feedforward_layernorm_1(mlp) + layer.post_feedforward_layernorm_2(experts)
        return mixed


def _names(norms: Norms) -> set[str]:
    names = (norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp)
    return {name for name in names if name}


def _norm_of(module: nn.Module, name: str | None, multiplier: float = 1.0) -> Norm:
    norm = nn.Identity() if name is None else fused_norm(getattr(module, name))
    return norm if multiplier == 1 else lambda x: norm(x) * multiplier


def fused_norm(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that applies the norm `module`. On CUDA, norms with Llama's formula run as one kernel."""
    if not _is_llama_norm(module):
        return module
    llama_norm: Any = module

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda or x.dtype != llama_norm.weight.dtype:
            plain: torch.Tensor = llama_norm(x)
            return plain
        return rms_norm(x, llama_norm.weight, llama_norm.variance_epsilon)

    return forward


def _is_llama_norm(module: nn.Module) -> bool:
    """Return whether the norm's code equals that of `LlamaRMSNorm`, which many model files copy."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours, theirs = (getattr(kind.forward, "__code__", None) for kind in (type(module), LlamaRMSNorm))
    if ours is None or theirs is None or not hasattr(module, "variance_epsilon"):
        return False
    return (ours.co_code, ours.co_names) == (theirs.co_code, theirs.co_names) and ours.co_consts == theirs.co_consts


_HEADS_FIRST: Norm = partial(torch.transpose, dim0=0, dim1=1)
"""Transposes `[T, heads, d]` to `[heads, T, d]`."""


class Projections:
    """The q, k, v and output projections of one layer. Queries, keys and values are `[heads, T, d]`, after RoPE.

    If keys and values have different widths, the narrower vectors are padded with zeros, which do not change scores.
    `output` removes the padding.

    Some models multiply attention outputs by an output gate. In Qwen 3.5, `q_proj` computes it (each head's gate
    follows its query). In LFM3, `g_proj` computes one number per head.
    """

    value_dim: int | None = None  # values are not part of keys (`ModelGeometry.value_dim`)

    def __init__(self, attention: Any, heads: int, kv_heads: int) -> None:
        """Find the projections of an attention module with `heads` query heads and `kv_heads` KV heads.

        Raise ModelError if the module is not supported or its numbers of heads differ from these.
        """
        self.heads, self.kv_heads = heads, kv_heads
        self._key_dim = int(getattr(attention, "head_dim", None) or attention.head_size)
        self._value_dim = int(getattr(attention, "v_head_dim", None) or self._key_dim)
        self.default_scale = self._key_dim**-0.5
        self._output: nn.Module = first_of(attention, ("o_proj", "dense", "out_proj"))
        used = {"o_proj", "dense", "out_proj", "sinks", "g_proj"}
        self._gate: nn.Module | None = getattr(attention, "g_proj", None)
        self._key_multiplier = float(getattr(attention, "key_multiplier", 1.0))
        self._value_multiplier = float(getattr(attention, "v_scale", 1.0))
        self.gated_queries = False
        if hasattr(attention, "q_proj"):
            self._q = attention.q_proj
            if not uses_earlier_kv(attention):
                self._k, self._v = attention.k_proj, attention.v_proj
            self._split: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None
            used |= {"q_proj", "k_proj", "v_proj"}
            self.gated_queries = getattr(self._q, "out_features", None) == 2 * heads * self._key_dim
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
        self.gated = self.gated_queries or self._gate is not None
        self._norms = (
            self._norm(attention, ("q_norm", "q_layernorm"), heads, used),
            self._norm(attention, ("k_norm", "k_layernorm"), kv_heads, used),
            self._norm(attention, ("v_norm",), kv_heads, used),
        )
        self.pad_to(max(self._key_dim, self._value_dim))
        refuse_unused(attention, used)
        self._check_widths(attention)

    def pad_to(self, head_dim: int) -> None:
        assert head_dim >= max(self._key_dim, self._value_dim)
        self.head_dim = head_dim
        self._query_norm, self._key_norm, self._value_norm = (self._padded(norm) for norm in self._norms)

    def qkv(self, x: torch.Tensor, rotate: Rotate) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._split is None:
            return self.query(x, rotate), *self.key_value(x, rotate)
        q, k, v = self._split(self._q(x))
        return rotate(self._query_norm(q)), rotate(self._key_norm(k)), self._value_norm(v)

    def query(self, x: torch.Tensor, rotate: Rotate) -> torch.Tensor:
        if self._split is not None:
            return rotate(self._query_norm(self._split(self._q(x))[0]))
        rows = self._q(x).view(len(x), self.heads, -1)
        return rotate(self._query_norm(rows[..., : self._key_dim]))

    def query_and_gate(self, x: torch.Tensor, rotate: Rotate) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q `[H, T, d]` and the output gate (`[T, H, d]` or `[T, H, 1]`) for attention inputs `[T, D]`."""
        if self._gate is not None:
            return self.query(x, rotate), torch.sigmoid(self._gate(x)).unsqueeze(-1)
        q, gate = self._q(x).view(len(x), self.heads, -1).chunk(2, dim=-1)
        return rotate(self._query_norm(q)), torch.sigmoid(gate)

    def key_value(self, x: torch.Tensor, rotate: Rotate) -> tuple[torch.Tensor, torch.Tensor]:
        if self._split is not None:
            _, k, v = self._split(self._q(x))
        else:
            k = self._k(x).view(len(x), self.kv_heads, -1)
            v = k if self._v is None else self._v(x).view(len(x), self.kv_heads, -1)
        k = k if self._key_multiplier == 1 else k * self._key_multiplier
        v = v if self._value_multiplier == 1 else v * self._value_multiplier
        return rotate(self._key_norm(k)), self._value_norm(v)

    def rotate_cached(self, k: torch.Tensor, rotate: Rotate) -> torch.Tensor:
        return rotate(k)

    def output(self, attended: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply attention outputs `[T, H * d]` by `gate`, if given, and return their output projection `[T, D]`."""
        if gate is not None:
            attended = (attended.view(len(attended), self.heads, -1) * gate).flatten(1)
        if self._value_dim < attended.shape[-1] // self.heads:
            attended = attended.view(len(attended), self.heads, -1)[..., : self._value_dim].flatten(1)
        out: torch.Tensor = self._output(attended)
        return out

    def _padded(self, norm: Norm) -> Norm:
        if self._key_dim == self._value_dim == self.head_dim:
            return norm

        def pad(rows: torch.Tensor) -> torch.Tensor:
            normed = norm(rows)
            return F.pad(normed, (0, self.head_dim - normed.shape[-1]))

        return pad

    def _split_blocks(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split `[T, (H + 2 Hkv) d]` into q, k and v `[T, heads, d]`.

        The order is all queries, all keys, all values (Phi-3).
        """
        rows = fused.view(len(fused), -1, self._key_dim)
        q, k, v = rows.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        return q, k, v

    def _split_groups(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split `[T, Hkv (G + 2) d]` into q, k and v `[T, heads, d]`.

        Each group has G queries, one key and one value (GPT-NeoX).
        """
        rows = fused.view(len(fused), self.kv_heads, -1, self._key_dim)
        return rows[:, :, :-2].flatten(1, 2), rows[:, :, -2], rows[:, :, -1]

    def _norm(self, attention: Any, names: Collection[str], heads: int, used: set[str]) -> Norm:
        """Return a function from `[T, heads, d]` to `[heads, T, d]` that applies the norm whose module name is in
        `names`, or no norm if there is none.
        """
        name = next((name for name in names if getattr(attention, name, None) is not None), None)
        if name is None:
            return _HEADS_FIRST
        module = getattr(attention, name)
        used.add(name)
        shape = tuple(module.weight.shape) if hasattr(module, "weight") else None
        # the same weight for every head, or none
        if shape == (self._key_dim,) or getattr(module, "with_scale", True) is False:
            return lambda rows: module(rows.transpose(0, 1))
        if shape == (heads * self._key_dim,):  # one norm over all heads
            return lambda rows: module(rows.flatten(1)).view_as(rows).transpose(0, 1)
        if shape == (heads, self._key_dim):  # a separate weight for each head
            return lambda rows: module(rows).transpose(0, 1)
        raise ModelError(
            f"{type(attention).__name__}.{name} has weights of shape {shape}; expected one or {heads} heads of "
            f"{self._key_dim}",
            reason="modules",
        )

    def _check_widths(self, attention: Any) -> None:
        q, k, v = (self.heads, self._key_dim), (self.kv_heads, self._key_dim), (self.kv_heads, self._value_dim)
        q = (q[0], 2 * q[1]) if self.gated_queries else q
        for name, (heads, dim) in {"q_proj": q, "k_proj": k, "v_proj": v}.items():
            width = getattr(getattr(attention, name, None), "out_features", heads * dim)
            if width != heads * dim:
                raise ModelError(
                    f"{type(attention).__name__}.{name} has {width} outputs; expected {heads} heads of {dim}, which "
                    "are the number and width of heads in the configuration",
                    reason="heads",
                )


def first_of(module: Any, names: Collection[str]) -> Any:
    """Return the first attribute of `module` in `names` that is not None. Raise ModelError if there is none."""
    for name in names:
        if (attribute := getattr(module, name, None)) is not None:
            return attribute
    raise ModelError(f"{type(module).__name__} has none of {', '.join(names)}", reason="modules")


def refuse_unused(module: nn.Module, used: Collection[str]) -> None:
    """Raise ModelError if `module` has parameters, or submodules with parameters, whose names are not in `used`."""
    children = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    parameters = [name for name, _ in module.named_parameters(recurse=False)]
    unused = sorted({*children, *parameters} - set(used))
    if unused:
        raise ModelError(
            f"{type(module).__name__} has {', '.join(unused)}, which this version does not support",
            reason="modules",
        )
