"""MXFP4 checkpoints of gpt-oss: the stacked experts of each layer in 4-bit floating point.

A projection has blocks, uint8 `[experts, out, groups, 16]`, with inputs 2i and 2i + 1 of a group in the lower and upper
half of byte i, and scales, uint8 `[experts, out, groups]`. Weights are `number[code] * 2^(scale - 127)`
(transformers, integrations/mxfp4.py). Twice each number is a whole number, so that the packed codes have 5 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ...kernels.packed_format import PackedFormat
from ..packed_checkpoint import CannotPackError
from .base import Importer, Options, PackedLayer, Shapes, exponent_of

_GROUP = 32
_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the number of each code without its sign, which is the highest of 4 bits."""
_ZERO = 12
_NOT_FINITE = 255
_EXPONENT_BIAS = 128
"""127 of the scales, and 1 for the doubled numbers."""


class MXFP4Experts(Importer):
    """Importer of checkpoints with MXFP4 experts (gpt-oss)."""

    method = "mxfp4"
    parts = ("blocks", "scales")

    def check(self, options: Options) -> None:
        pass

    def split(self, name: str) -> tuple[str, str]:
        module, separator, part = name.rpartition("_")
        return (module, part) if separator and part in self.parts else super().split(name)

    def form(self, shapes: Shapes, options: Options, ins: int) -> PackedFormat | None:
        if "blocks" not in shapes:
            return None
        groups, size = shapes["blocks"][2:]
        if 2 * size != _GROUP:
            raise CannotPackError(f"groups of {2 * size} inputs; groups of {_GROUP} are supported")
        if groups * _GROUP != ins:
            raise CannotPackError(f"{groups} groups of {_GROUP} do not cover {ins} inputs")
        if not PackedFormat.fits(ins, 5, _GROUP):
            raise CannotPackError(f"{ins} inputs; a multiple of 64 is supported")
        return PackedFormat(ins, 5, _GROUP, offset=_ZERO)

    def pack(self, tensors: Mapping[str, torch.Tensor], form: PackedFormat, options: Options) -> PackedLayer:
        blocks, stored = tensors["blocks"], tensors["scales"]
        if blocks.shape[:-1] != stored.shape:
            raise CannotPackError(
                f"scales of shape {tuple(stored.shape)} do not match blocks of shape {tuple(blocks.shape)}"
            )
        if int(stored.max()) == _NOT_FINITE:
            raise CannotPackError("scales that are not finite")
        whole = torch.tensor([_ZERO + sign * half for sign in (1, -1) for half in _HALVES], dtype=torch.uint8)
        codes = whole[torch.stack((blocks & 15, blocks >> 4), dim=-1).int()].flatten(-3)
        scales = torch.ldexp(torch.ones(stored.shape), stored.int() - _EXPONENT_BIAS)
        scales *= (codes.unflatten(-1, (-1, _GROUP)) != _ZERO).any(-1)  # the scales of zeros may be out of range
        exponent = exponent_of(scales)
        form = replace(form, exponent=exponent)
        halves = torch.ldexp(scales, torch.tensor(-exponent)).half()
        rows = form.pack(codes.flatten(0, 1), halves.flatten(0, 1))
        return PackedLayer(form, rows.unflatten(0, codes.shape[:2]))
