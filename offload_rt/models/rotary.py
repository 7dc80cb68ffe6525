"""Rotary positions of a model's layers: cos and sin from its own module, in one of the two orders in which models pair
the dimensions of a head, over all of a head or its first dimensions.

How a model rotates is not declared: what `apply_rotary_pos_emb` of its file does to a few random queries is compared
with each order here, and a model that does something else is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ModelError
from ..kernels.dispatch import rotate_halves
from .reach import FOLLOWS

Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and signed sin (the minus of the rotation is in it), each `[1, T, w]`, for the first w of a head's dimensions."""


class Halves:
    """Dimension i turns with dimension i + w/2: Llama and most others."""

    @staticmethod
    def spread(waves: torch.Tensor) -> torch.Tensor:
        """Waves `[..., w/2]`, one for each pair, as `[..., w]`, one for each dimension."""
        return torch.cat((waves, waves), dim=-1)

    @staticmethod
    def signed(sin: torch.Tensor) -> torch.Tensor:
        """sin `[..., w]` with the sign that each dimension's partner enters it with."""
        first, second = sin.chunk(2, dim=-1)
        return torch.cat((-first, second), dim=-1)

    @staticmethod
    def partners(x: torch.Tensor) -> torch.Tensor:
        """x `[..., w]` with the dimensions of each pair swapped, a copy."""
        return x.roll(x.shape[-1] // 2, dims=-1)


class Neighbours:
    """Dimension 2i turns with dimension 2i + 1: Cohere, GLM."""

    @staticmethod
    def spread(waves: torch.Tensor) -> torch.Tensor:
        """As `Halves.spread`."""
        return waves.repeat_interleave(2, dim=-1)

    @staticmethod
    def signed(sin: torch.Tensor) -> torch.Tensor:
        """As `Halves.signed`."""
        first, second = sin.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((-first, second), dim=-1).flatten(-2)

    @staticmethod
    def partners(x: torch.Tensor) -> torch.Tensor:
        """As `Halves.partners`."""
        swapped: torch.Tensor = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return swapped


Order = type[Halves] | type[Neighbours]


def rotate(x: torch.Tensor, rotation: Rotation, order: Order) -> torch.Tensor:
    """RoPE of `x` `[heads, T, d]`: its first w dimensions times cos plus their partners times signed sin, which gives
    the bits of `x cos + rotate_half(x) sin` with fewer kernels. The others stay. Where the tables are of a wider dtype
    than `x` (OLMo), so is the computation."""
    cos, sin = rotation
    width = cos.shape[-1]
    if order is Halves and width == x.shape[-1]:
        return rotate_halves(x, cos, sin)
    turned, rest = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
    wide = turned.to(torch.promote_types(x.dtype, cos.dtype))
    out = (wide * cos).add_(order.partners(wide).mul_(sin)).to(x.dtype)
    return out if rest is None else torch.cat((out, rest), dim=-1)


class Rotary:
    """The rotations of all layers, from the decoder's rotary module.

    The rotations of the last positions are remembered. Layer 0 always computes them; deeper layers reuse them while
    they are called with the same tensor object, which must not be changed in place between layer 0 and the last one. A
    CUDA graph that captures a step from layer 0 on records their computation too.
    """

    def __init__(self, module: Any, kinds: Sequence[str | None], attention: Any) -> None:
        """kinds: for each layer the name under which `module` knows its frequencies, "" where it has only one, None
        for a layer without positions. attention: an attention module of the model, for its file."""
        self._module, self._kinds = module, tuple(kinds)
        self._positions: torch.Tensor | None = None
        self._rotations: dict[str, Rotation] = {}
        self._order: Order = Halves
        self._ready = True
        """Whether the module's tables are in this order already."""
        used = sorted({kind for kind in kinds if kind is not None})
        if used and not self._inverse(used[0]).is_meta:
            self._look_at(used[0], attention)

    def _look_at(self, kind: str, attention: Any) -> None:
        """Finds how the model rotates, and in which order the module's tables are."""
        inverse = self._inverse(kind)
        cos, sin = self._tables(kind, inverse.float(), torch.arange(5, device=inverse.device))
        pairs = len(inverse)
        by_halves = torch.equal(cos[..., :pairs], cos[..., -pairs:])
        picked = slice(None, pairs) if by_halves else slice(None, None, 2)
        self._order = _order_of(attention, (cos[..., picked], sin[..., picked]))
        self._ready = cos.shape[-1] == 2 * pairs and by_halves == (self._order is Halves)

    def rotate(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`x` `[heads, T, d]` of a layer at positions `[T]`, in its dtype; a layer without positions gives `x`."""
        if layer == 0 or positions is not self._positions:
            self._rotations.clear()
            self._positions = positions
        kind = self._kinds[layer]
        if kind is None:
            return x
        if kind not in self._rotations:
            cos, sin = self._tables(kind, x, positions)
            if not self._ready:
                pairs = len(self._inverse(kind))
                cos, sin = (self._order.spread(table[..., :pairs]) for table in (cos, sin))
            self._rotations[kind] = cos, self._order.signed(sin)
        return rotate(x, self._rotations[kind], self._order)

    def rotate_by(self, layer: int, k: torch.Tensor, offset: int) -> torch.Tensor:
        """Rotated keys `[Hkv, n, d]` of a layer `offset` positions on; angles are float64, the product float32."""
        kind = self._kinds[layer]
        if kind is None:
            return k
        angles = self._inverse(kind).to(torch.float64) * offset
        compute = torch.promote_types(k.dtype, torch.float32)
        cos, sin = (self._order.spread(wave.to(compute).to(k.device)) for wave in (angles.cos(), angles.sin()))
        return rotate(k.to(compute), (cos, self._order.signed(sin)), self._order).to(k.dtype)

    def _inverse(self, kind: str) -> torch.Tensor:
        """The inverse frequencies `[w/2]` of a kind."""
        found: torch.Tensor = getattr(self._module, f"{kind}_inv_freq" if kind else "inv_freq")
        return found

    def _tables(self, kind: str, x: torch.Tensor, positions: torch.Tensor) -> Rotation:
        """cos and sin of positions `[T]` in the dtype of `x`, as the module gives them: its attention factor (YaRN) is
        in them."""
        at = positions[None]
        if hasattr(self._module, "mrope_section"):  # of Qwen-VL: time, height and width, which a text has as one
            at = at.expand(3, 1, -1)
        tables: Any = self._module(x, at, kind) if kind else self._module(x, at)
        if isinstance(tables, torch.Tensor):  # Llama 4: one complex number for each pair of neighbours
            return tables.real, tables.imag
        rotation: Rotation = tables
        return rotation


def _order_of(attention: Any, waves: Rotation) -> Order:
    """The order that the file of `attention` rotates in, seen on `waves` `[1, T, w/2]`; where it says nothing, `Halves`
    (and the proof at load has the last word)."""
    file = sys.modules[type(attention).__module__]
    apply = getattr(file, "apply_rotary_pos_emb", None)
    if apply is None:
        return Neighbours if hasattr(file, "apply_rotary_emb") else Halves
    cos, sin = (wave.float() for wave in waves)
    width = 2 * cos.shape[-1]
    x = torch.randn(1, 1, cos.shape[1], width, generator=torch.Generator().manual_seed(0)).to(cos.device)
    for table in (lambda wave: torch.cat((wave, wave), -1), lambda wave: wave.repeat_interleave(2, -1), lambda w: w):
        try:
            expected = apply(x, x, table(cos), table(sin))[0][0]
        except (RuntimeError, TypeError):
            continue
        for order in (Halves, Neighbours):
            found = rotate(x[0], (order.spread(cos), order.signed(order.spread(sin))), order)
            if torch.allclose(found, expected, atol=1e-5):
                return order
    raise ModelError(
        f"{type(attention).__name__} rotates queries and keys in another way than by halves or by neighbours",
        reason="rotary",
    )


def refuse_length_dependent(rope_types: Sequence[str]) -> None:
    """Raises ModelError where cached keys could not stay valid: nobody has held the frequencies (`reach`)."""
    for rope_type in rope_types:
        if rope_type in FOLLOWS:
            raise ModelError(
                f"RoPE type {rope_type!r} changes its frequencies with the length of the text, so cached keys would go "
                "stale: give the model's folder or hub id instead of a loaded model, and they are held at those of "
                "max_model_len",
                reason="rope_length",
            )
