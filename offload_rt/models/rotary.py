"""Rotary position embedding with cos and sin from the model's own rotary module.

RoPE rotates pairs of dimensions of a head: all dimensions or only the first ones. Models form pairs in one of two
layouts. To detect the layout, `apply_rotary_pos_emb` of the model's source file is applied to random queries, and the
result is compared with both layouts. Models that match neither layout are refused.

Some kinds of RoPE scaling use frequencies that depend on the text length. They are fixed to the frequencies for the
longest supported text, as in vLLM. Keys are rotated before they are cached, so a later change of frequencies would
invalidate cached keys.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from inspect import signature
from typing import Any
from weakref import ref

import torch

from ..errors import ModelError
from ..kernels.dispatch import rotate_halves
from .multimodal import text_config, text_decoder

_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""RoPE types with frequencies that depend on the text length.

Both have one set of frequencies for texts up to the original training length. For longer texts, "longrope" (Phi) has
one other set, and "dynamic" a different set for each length.
"""

KEPT = 8
"""Maximum number of `positions` tensors with cached tables. A prefill has one per chunk, a decode step has one."""

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Tables of a rotation: cos and signed sin, each `[1, T, w]`, for the first w dimensions of a head.

The sin of the first dimension of each pair is negated (`HalfSplit.signed`).
"""


class HalfSplit:
    """Layout that pairs dimension i with dimension i + w/2 (NeoX), as in Llama and most other models."""

    @staticmethod
    def spread(waves: torch.Tensor) -> torch.Tensor:
        """Expand values `[..., w/2]` of the pairs to `[..., w]`, one value per dimension."""
        return torch.cat((waves, waves), dim=-1)

    @staticmethod
    def signed(sin: torch.Tensor) -> torch.Tensor:
        """Negate sin `[..., w]` for the first dimension of each pair."""
        first, second = sin.chunk(2, dim=-1)
        return torch.cat((-first, second), dim=-1)

    @staticmethod
    def partners(x: torch.Tensor) -> torch.Tensor:
        """Return a copy of x `[..., w]` with the dimensions of each pair swapped."""
        return x.roll(x.shape[-1] // 2, dims=-1)


class Interleaved:
    """Layout that pairs dimension 2i with dimension 2i + 1 (GPT-J), as in Cohere and GLM."""

    @staticmethod
    def spread(waves: torch.Tensor) -> torch.Tensor:
        return waves.repeat_interleave(2, dim=-1)

    @staticmethod
    def signed(sin: torch.Tensor) -> torch.Tensor:
        first, second = sin.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((-first, second), dim=-1).flatten(-2)

    @staticmethod
    def partners(x: torch.Tensor) -> torch.Tensor:
        swapped: torch.Tensor = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return swapped


Layout = type[HalfSplit] | type[Interleaved]


def rotate(x: torch.Tensor, rotation: Rotation, layout: Layout) -> torch.Tensor:
    """Rotate the first w dimensions of `x` `[heads, T, d]`. The other dimensions are unchanged.

    The result is bitwise equal to `x cos + rotate_half(x) sin`, but takes fewer kernels. If cos and sin have a wider
    dtype than `x` (OLMo), the computation uses the wider dtype. The result has the dtype of `x`.
    """
    cos, sin = rotation
    width = cos.shape[-1]
    if x.is_cuda and layout is HalfSplit and width == x.shape[-1]:
        return rotate_halves(x, cos, sin)
    turned, rest = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
    wide = turned.to(torch.promote_types(x.dtype, cos.dtype))
    out = (wide * cos).add_(layout.partners(wide).mul_(sin)).to(x.dtype)
    return out if rest is None else torch.cat((out, rest), dim=-1)


class Rotary:
    """Applies RoPE to queries and keys in all layers, with tables (cos and sin) from the model's rotary module.

    The tables of the latest `KEPT` tensors of positions are cached, while these tensors exist. Layer 0 always computes
    them. Later layers reuse them if they are called with the same `positions` object, so this tensor must not be
    changed in place during a pass. A CUDA graph that captures a step from layer 0 includes this computation.
    """

    def __init__(self, module: Any, kinds: Sequence[str | None], attention: Any) -> None:
        """Detect the layout of the model's rotation in the source file of `attention`.

        Args:
            module: The decoder's rotary module.
            kinds: For each layer, the name of its set of frequencies in `module`: "" if there is only one set, and None
                if the layer has no RoPE.
            attention: An attention module of the model.
        """
        self._module, self._kinds = module, tuple(kinds)
        self._known: list[tuple[ref[torch.Tensor], dict[str, Rotation]]] = []
        """Tensors of positions with their tables by set of frequencies, newest first."""
        self._layout: Layout = HalfSplit
        self._ready = True
        """Whether the tables of the rotary module already are in the detected layout."""
        used = sorted({kind for kind in kinds if kind is not None})
        if used and not self._inverse(used[0]).is_meta:
            self._detect(used[0], attention)

    def _detect(self, kind: str, attention: Any) -> None:
        """Detect the layout of the model's rotation, and the layout of the rotary module's tables.

        `kind`: see `_inverse`.
        """
        inverse = self._inverse(kind)
        cos, sin = self._tables(kind, inverse.float(), torch.arange(5, device=inverse.device))
        pairs = len(inverse)
        half_split = torch.equal(cos[..., :pairs], cos[..., -pairs:])
        picked = slice(None, pairs) if half_split else slice(None, None, 2)
        self._layout = _layout_of(attention, (cos[..., picked], sin[..., picked]))
        self._ready = cos.shape[-1] == 2 * pairs and half_split == (self._layout is HalfSplit)

    def rotate(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate `x` `[heads, T, d]` to `positions` `[T]`. In a layer without RoPE, return `x` unchanged."""
        cached = [] if layer == 0 else [tables for own, tables in self._known if own() is positions]
        known = cached[0] if cached else self._new_entry(positions)
        kind = self._kinds[layer]
        if kind is None:
            return x
        if kind not in known:
            cos, sin = self._tables(kind, x, positions)
            if not self._ready:
                pairs = len(self._inverse(kind))
                cos, sin = (self._layout.spread(table[..., :pairs]) for table in (cos, sin))
            known[kind] = cos, self._layout.signed(sin)
        return rotate(x, known[kind], self._layout)

    def _new_entry(self, positions: torch.Tensor) -> dict[str, Rotation]:
        """Add an empty entry for `positions` to the cached tables, and return it.

        Drop the oldest entry if there are too many, and the entries of freed tensors.
        """
        kept = [each for each in self._known if (tensor := each[0]()) is not None and tensor is not positions]
        entry: dict[str, Rotation] = {}
        self._known = [(ref(positions), entry), *kept[: KEPT - 1]]
        return entry

    def rotate_by(self, layer: int, k: torch.Tensor, offset: int) -> torch.Tensor:
        """Rotate keys k `[Hkv, n, d]`, which already have RoPE, by `offset` further positions.

        Angles are computed in float64. Products are computed in float32, or in the dtype of `k` if it is wider.
        """
        kind = self._kinds[layer]
        if kind is None:
            return k
        angles = self._inverse(kind).to(torch.float64) * offset
        compute = torch.promote_types(k.dtype, torch.float32)
        cos, sin = (self._layout.spread(wave.to(compute).to(k.device)) for wave in (angles.cos(), angles.sin()))
        return rotate(k.to(compute), (cos, self._layout.signed(sin)), self._layout).to(k.dtype)

    def _inverse(self, kind: str) -> torch.Tensor:
        """Return the inverse frequencies `[w/2]` of the set `kind` of frequencies."""
        found: torch.Tensor = getattr(self._module, f"{kind}_inv_freq" if kind else "inv_freq")
        return found

    def _tables(self, kind: str, x: torch.Tensor, positions: torch.Tensor) -> Rotation:
        """Return the tables cos and sin for `positions` `[T]`, including the module's attention factor (YaRN)."""
        at = positions[None]
        # Qwen-VL has three positions per token (time, height, width), which are equal for text.
        if hasattr(self._module, "mrope_section"):
            at = at.expand(3, 1, -1)
        tables: Any = self._module(x, at, kind) if kind else self._module(x, at)
        if isinstance(tables, torch.Tensor):  # Llama 4's module returns one complex number per pair.
            return tables.real, tables.imag
        rotation: Rotation = tables
        return rotation


def _layout_of(attention: Any, waves: Rotation) -> Layout:
    """Return the layout of the rotation in the source file of `attention`. `waves` are cos and sin, each `[1, T, w/2]`.

    If the file has no `apply_rotary_pos_emb`, the layout is `Interleaved` if it has `apply_rotary_emb` (Llama 4), else
    `HalfSplit`. DeepSeek V3 states the layout in its configuration. Load-time verification detects a wrong guess.
    """
    file = sys.modules[type(attention).__module__]
    if getattr(getattr(attention, "config", None), "rope_interleave", False):
        return Interleaved
    apply = getattr(file, "apply_rotary_pos_emb", None)
    if apply is None:
        return Interleaved if hasattr(file, "apply_rotary_emb") else HalfSplit
    cos, sin = (wave.float() for wave in waves)
    width = 2 * cos.shape[-1]
    single = list(signature(apply).parameters)[1] == "cos"  # Gemma 4 rotates queries and keys in separate calls
    x = torch.randn(1, 1, cos.shape[1], width, generator=torch.Generator().manual_seed(0)).to(cos.device)
    for table in (lambda wave: torch.cat((wave, wave), -1), lambda wave: wave.repeat_interleave(2, -1), lambda w: w):
        try:
            tables = table(cos), table(sin)
            expected = (apply(x, *tables) if single else apply(x, x, *tables)[0])[0]
        except (RuntimeError, TypeError):
            continue
        for layout in (HalfSplit, Interleaved):
            found = rotate(x[0], (layout.spread(cos), layout.signed(layout.spread(sin))), layout)
            if torch.allclose(found, expected, atol=1e-5):
                return layout
    raise ModelError(
        f"the rotary embedding of {type(attention).__name__} is neither half-split (NeoX) nor interleaved (GPT-J)",
        reason="rotary",
    )


def fix_rope_scaling(model: Any, max_model_len: int | None) -> None:
    """Make length-dependent rotary frequencies of `model` constant, for texts of up to `max_model_len` tokens.

    If `max_model_len` is at most the training length, `max_position_embeddings` is set to the training length. Models
    whose frequencies do not depend on the length, or that have several RoPE types, stay unchanged.

    Args:
        model: A loaded transformers model.
        max_model_len: Length of the longest text in tokens. None means `max_position_embeddings`.

    Raises:
        ModelError: No single set of frequencies is valid up to `max_model_len`.
    """
    rotary, config = getattr(text_decoder(model), "rotary_emb", None), text_config(model.config)
    kind = getattr(rotary, "rope_type", None)
    if rotary is None or kind not in _LENGTH_DEPENDENT:
        return
    stated: int = config.max_position_embeddings
    trained = int(config.rope_parameters["original_max_position_embeddings"]) if kind == "longrope" else stated
    if (max_model_len or stated) <= trained:
        config.max_position_embeddings = trained
    elif kind == "dynamic":
        raise ModelError(
            f"RoPE type 'dynamic' changes its frequencies with every token beyond {trained}, so cached keys would "
            f"become invalid; max_model_len={max_model_len} must be at most {trained}",
            reason="rope_length",
        )
    # a forward pass beyond `trained` makes the module switch to the frequencies for long texts
    elif not rotary.inv_freq.is_meta:
        device = rotary.inv_freq.device
        rotary(torch.zeros(1, device=device), torch.full((1, 1), trained, device=device))
    rotary.rope_type = "default"


def refuse_length_dependent(rope_types: Sequence[str]) -> None:
    """Raise ModelError if frequencies depend on the text length and `fix_rope_scaling` has not fixed them."""
    for rope_type in rope_types:
        if rope_type in _LENGTH_DEPENDENT:
            raise ModelError(
                f"RoPE type {rope_type!r} changes its frequencies with the text length, so cached keys would become "
                "invalid: pass the model's folder or hub id instead of a loaded model, so that the frequencies for "
                "max_model_len are used throughout",
                reason="rope_length",
            )
