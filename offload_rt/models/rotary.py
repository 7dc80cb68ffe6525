"""Rotary position embedding (RoPE) with cos and sin from the model's own rotary module.

RoPE rotates pairs of dimensions of a head. The pairs have a half-split or an interleaved layout. The layout is detected
by applying the model's own rotation function to random queries. Models with any other layout are refused.

Some kinds of RoPE scaling have frequencies that depend on the text length. As in vLLM, the frequencies for the longest
supported text are used from the start, because a later change would invalidate cached keys.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any
from weakref import ref

import torch

from ..errors import ModelError
from ..kernels.dispatch import rotate_halves
from .multimodal import text_config, text_decoder

_LENGTH_DEPENDENT = ("dynamic", "longrope")
"""RoPE types with frequencies that depend on the text length.

Both types have one set of frequencies for texts up to the original training length. For longer texts, "longrope" (Phi)
has a second set, and "dynamic" has a different set for each length.
"""

MAX_CACHED_POSITIONS = 8
"""Number of `positions` tensors for which cos and sin are cached, one for each slice of a prefill."""

Rotate = Callable[[torch.Tensor], torch.Tensor]
"""A function that rotates queries or keys `[heads, T, d]` to the positions of their T tokens."""

Tables = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of the rotation angles for T positions, each `[1, T, w]`."""


class HalfSplit:
    """Layout of most models, such as Llama (NeoX): of w rotated dimensions, dimension i is paired with i + w/2."""

    @staticmethod
    def per_dimension(values: torch.Tensor) -> torch.Tensor:
        """Repeat the value of each pair, `[..., w/2]`, for both dimensions of the pair: `[..., w]`."""
        return torch.cat((values, values), dim=-1)

    @staticmethod
    def signed(sin: torch.Tensor) -> torch.Tensor:
        """Negate sin `[..., w]` for the first dimension of each pair."""
        first, second = sin.chunk(2, dim=-1)
        return torch.cat((-first, second), dim=-1)

    @staticmethod
    def swap_pairs(x: torch.Tensor) -> torch.Tensor:
        """Return x `[..., w]` with the dimensions of each pair swapped."""
        return x.roll(x.shape[-1] // 2, dims=-1)


class Interleaved:
    """Layout of Cohere and GLM, for example (GPT-J): dimension 2i is paired with 2i + 1."""

    @staticmethod
    def per_dimension(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(2, dim=-1)

    @staticmethod
    def signed(sin: torch.Tensor) -> torch.Tensor:
        first, second = sin.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((-first, second), dim=-1).flatten(-2)

    @staticmethod
    def swap_pairs(x: torch.Tensor) -> torch.Tensor:
        swapped: torch.Tensor = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return swapped


Layout = type[HalfSplit] | type[Interleaved]


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotation of the first w dimensions of each head to T positions.

    Attributes:
        cos: `[1, T, w]`.
        sin: `[1, T, w]`, negated for the first dimension of each pair (`HalfSplit.signed`).
    """

    cos: torch.Tensor
    sin: torch.Tensor
    layout: Layout

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the first w dimensions of `x` `[heads, T, d]`. The other dimensions are unchanged.

        The result has the dtype of `x` and is bitwise equal to `x cos + rotate_half(x) sin`. If cos and sin have a
        wider dtype (OLMo), the computation uses that dtype.
        """
        cos, sin, width = self.cos, self.sin, self.cos.shape[-1]
        if x.is_cuda and self.layout is HalfSplit and width == x.shape[-1]:
            return rotate_halves(x, cos, sin)
        rotated, rest = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
        wide = rotated.to(torch.promote_types(x.dtype, cos.dtype))
        out = (wide * cos).add_(self.layout.swap_pairs(wide).mul_(sin)).to(x.dtype)
        return out if rest is None else torch.cat((out, rest), dim=-1)


def unrotated(x: torch.Tensor) -> torch.Tensor:
    """Return `x` unchanged, for layers without rotary positions."""
    return x


class Rotary:
    """Applies RoPE to the queries and keys of all layers, using cos and sin from the model's rotary module.

    Layer 0 computes cos and sin for a tensor of positions. Later layers reuse them if they are called with the same
    tensor object, so the tensor must not be modified during a pass.
    """

    def __init__(self, module: Any, kinds: Sequence[str | None], attentions: Sequence[Any]) -> None:
        """Detect the layout of the model's rotation.

        Args:
            module: The decoder's rotary module.
            kinds: For each layer, the layer type that selects its frequencies; "" if all layers have the same
                frequencies, None if the layer has no RoPE.
            attentions: The model's attention modules. The model's rotation function is defined in their source file.
        """
        self._module, self._kinds = module, tuple(kinds)
        self._norms: list[Rotate | None] = [getattr(attention, "qk_norm", None) for attention in attentions]
        """The norm that Llama 4 applies to rotated queries and keys.

        It has no weight, so it commutes with later rotations.
        """
        self._cached: list[tuple[ref[torch.Tensor], dict[str | None, Rotate]]] = []
        """Cache of the latest `positions` tensors, newest first.

        Each comes with the rotation to these positions for each kind of layer.
        """
        self._layout: Layout = HalfSplit
        self._tables_match_layout = True
        """Whether the rotary module returns cos and sin in the detected layout. Otherwise, they must be reordered."""
        used = sorted({kind for kind in kinds if kind is not None})
        if used and not self._inverse(used[0]).is_meta:
            self._detect(used[0], attentions[0])

    def _detect(self, kind: str, attention: Any) -> None:
        inverse = self._inverse(kind)
        cos, sin = self._tables(kind, inverse.float(), torch.arange(5, device=inverse.device))
        pairs = len(inverse)
        half_split = torch.equal(cos[..., :pairs], cos[..., -pairs:])
        one_per_pair = slice(None, pairs) if half_split else slice(None, None, 2)
        self._layout = _layout_of(attention, (cos[..., one_per_pair], sin[..., one_per_pair]))
        self._tables_match_layout = cos.shape[-1] == 2 * pairs and half_split == (self._layout is HalfSplit)

    def rotation_to(self, layer: int, positions: torch.Tensor, like: torch.Tensor) -> Rotate:
        """Return the function that rotates queries and keys of a layer to `positions` `[T]`.

        `like` is a tensor with the dtype and device of the layer's input.
        """
        rotations = None
        for cached_positions, cached_rotations in self._cached if layer else ():
            if cached_positions() is positions:
                rotations = cached_rotations
        if rotations is None:
            rotations = self._new_entry(positions)
        kind, norm = self._kinds[layer], self._norms[layer]
        if kind not in rotations:
            rotations[kind] = unrotated if kind is None else self._rotation(kind, positions, like)
        rotate = rotations[kind]
        return rotate if norm is None else lambda x: norm(rotate(x))

    def _rotation(self, kind: str, positions: torch.Tensor, like: torch.Tensor) -> Rotation:
        cos, sin = self._tables(kind, like, positions)
        if not self._tables_match_layout:
            pairs = len(self._inverse(kind))
            cos, sin = (self._layout.per_dimension(table[..., :pairs]) for table in (cos, sin))
        return Rotation(cos, self._layout.signed(sin), self._layout)

    def _new_entry(self, positions: torch.Tensor) -> dict[str | None, Rotate]:
        others = [cached for cached in self._cached if (tensor := cached[0]()) is not None and tensor is not positions]
        entry: dict[str | None, Rotate] = {}
        self._cached = [(ref(positions), entry), *others[: MAX_CACHED_POSITIONS - 1]]
        return entry

    def rotation_by(self, layer: int, offset: int, like: torch.Tensor) -> Rotate:
        """Return the function that rotates keys `[Hkv, n, d]` again, so that their positions increase by `offset`.

        Angles are computed in float64. Products are computed in float32, or in the dtype of `like` if that is wider.
        """
        kind = self._kinds[layer]
        if kind is None:
            return unrotated
        angles = self._inverse(kind).to(torch.float64) * offset
        compute = torch.promote_types(like.dtype, torch.float32)
        cos, sin = (
            self._layout.per_dimension(wave.to(compute).to(like.device)) for wave in (angles.cos(), angles.sin())
        )
        return Rotation(cos, self._layout.signed(sin), self._layout)

    def _inverse(self, kind: str) -> torch.Tensor:
        frequencies: torch.Tensor = getattr(self._module, f"{kind}_inv_freq" if kind else "inv_freq")
        return frequencies

    def _tables(self, kind: str, like: torch.Tensor, positions: torch.Tensor) -> Tables:
        position_ids = positions[None]
        # Qwen-VL has three positions per token (time, height, width), which are equal for text.
        if hasattr(self._module, "mrope_section"):
            position_ids = position_ids.expand(3, 1, -1)
        result: Any = self._module(like, position_ids, kind) if kind else self._module(like, position_ids)
        if isinstance(result, torch.Tensor):  # Llama 4's module returns one complex number per pair.
            return result.real, result.imag
        tables: Tables = result
        return tables


def _layout_of(attention: Any, cos_and_sin: Tables) -> Layout:
    """Return the layout of the rotation function in the source file of `attention`.

    `cos_and_sin` are two tables `[1, T, w/2]`, with one value per pair of dimensions.
    """
    file = sys.modules[type(attention).__module__]
    if getattr(getattr(attention, "config", None), "rope_interleave", False):  # DeepSeek V3
        return Interleaved
    apply = getattr(file, "apply_rotary_pos_emb", None)
    if apply is None:  # Llama 4 has `apply_rotary_emb`. Load-time verification detects a wrong layout.
        return Interleaved if hasattr(file, "apply_rotary_emb") else HalfSplit
    cos, sin = (wave.float() for wave in cos_and_sin)
    width = 2 * cos.shape[-1]
    one_tensor = list(signature(apply).parameters)[1] == "cos"  # Gemma 4 rotates queries and keys in separate calls
    x = torch.randn(1, 1, cos.shape[1], width, generator=torch.Generator().manual_seed(0)).to(cos.device)
    for table in (lambda wave: torch.cat((wave, wave), -1), lambda wave: wave.repeat_interleave(2, -1), lambda w: w):
        try:
            tables = table(cos), table(sin)
            expected = (apply(x, *tables) if one_tensor else apply(x, x, *tables)[0])[0]
        except (RuntimeError, TypeError):
            continue
        for layout in (HalfSplit, Interleaved):
            rotated = Rotation(layout.per_dimension(cos), layout.signed(layout.per_dimension(sin)), layout)(x[0])
            if torch.allclose(rotated, expected, atol=1e-5):
                return layout
    raise ModelError(
        f"the rotary embedding of {type(attention).__name__} is neither half-split (NeoX) nor interleaved (GPT-J)",
        reason="rotary",
    )


def fix_rope_scaling(model: Any, max_model_len: int | None) -> None:
    """If the RoPE frequencies of `model` depend on the text length, fix them for texts of up to `max_model_len` tokens.

    By default, `max_model_len` is `max_position_embeddings`. If it is at most the training length,
    `max_position_embeddings` is set to the training length. Models with other frequencies are not changed.

    Raises:
        ModelError: No single set of frequencies is valid up to `max_model_len`.
    """
    rotary, config = getattr(text_decoder(model), "rotary_emb", None), text_config(model.config)
    kind = getattr(rotary, "rope_type", None)
    if rotary is None or kind not in _LENGTH_DEPENDENT:
        return
    declared: int = config.max_position_embeddings
    trained = int(config.rope_parameters["original_max_position_embeddings"]) if kind == "longrope" else declared
    if (max_model_len or declared) <= trained:
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
