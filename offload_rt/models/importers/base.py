"""The interface of an importer, and functions that several importers use.

Each importer is one file. It converts the tensors of one linear layer in a checkpoint to packed rows (`PackedFormat`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ...kernels.packed_format import GROUPS, PackedFormat
from ..packed_checkpoint import CannotPackError

Options = Mapping[str, Any]
"""The `quantization_config` of a checkpoint."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a module's tensors, by the last part of their names."""


@dataclass(frozen=True)
class PackedLayer:
    """A linear layer with packed weights.

    Attributes:
        rows: Packed rows, uint8 `[out, form.row_bytes]`, or `[experts, out, form.row_bytes]`.
        order: Order of the inputs, int32 `[ins]`, if `form.permuted`: packed input i is input `order[i]` of the layer.
            Otherwise None.
    """

    form: PackedFormat
    rows: torch.Tensor
    order: torch.Tensor | None = None


class Importer(Protocol):
    """Converts linear layers of one kind of checkpoint."""

    method: str
    """Value of `quant_method` in the configurations of these checkpoints."""

    parts: tuple[str, ...]
    """Last parts of the names of tensors that are converted to packed weights. Other tensors are copied."""

    def split(self, name: str) -> tuple[str, str]:
        """Return the module and the part of a tensor's name."""
        module, _, part = name.rpartition(".")
        return module, part

    def check(self, options: Options) -> None:
        """Raise CannotPackError if the configuration states an unsupported variant."""

    def form(self, shapes: Shapes, options: Options, ins: int) -> PackedFormat | None:
        """Return the packed format of a layer with `ins` inputs, given the shapes of its tensors. None if not packed.

        The size of its rows is final. Its exponent, and whether its inputs are permuted, may change in `pack`, because
        they depend on the values.

        Raises:
            CannotPackError: The layer is packed in an unsupported way.
        """

    def pack(self, tensors: Mapping[str, torch.Tensor], form: PackedFormat, options: Options) -> PackedLayer:
        """Return the packed layer. Its unpacked weights equal those that the checkpoint's own library computes.

        Raises:
            CannotPackError: The values do not fit the format.
        """


def format_of(ins: int, bits: int, groups: int, *, permuted: bool) -> PackedFormat:
    """Return the packed format, with zeros, of a layer with `ins` inputs, `bits`-bit codes and `groups` groups per row.

    `permuted` tells whether the inputs are stored in another order. Raise CannotPackError if no format fits.
    """
    group = ins // max(1, groups)
    if groups < 1 or ins % groups:
        raise CannotPackError(f"{groups} groups for {ins} inputs")
    if groups == 1 and not PackedFormat.fits(ins, bits, group):  # one scale per output
        group = next((size for size in reversed(GROUPS) if ins % size == 0), group)
    if bits not in (4, 8) or not PackedFormat.fits(ins, bits, group):
        sizes = ", ".join(map(str, GROUPS))
        raise CannotPackError(
            f"{bits} bits in groups of {group} for {ins} inputs; supported are 4 and 8 bits in groups of {sizes}"
        )
    return PackedFormat(ins, bits, group, has_zeros=True, permuted=permuted)


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack the codes in int32 words `[n, m]`, lowest bits first. Return uint8 `[n, m * 32 / bits]`."""
    data = words.contiguous().view(torch.uint8)
    return data if bits == 8 else torch.stack((data & 15, data >> 4), dim=-1).flatten(1)


def pack_layer(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, form: PackedFormat, groups: torch.Tensor | None
) -> PackedLayer:
    """Pack a layer whose weights are `(code - zero) * scale`.

    Args:
        codes: Codes, uint8 `[out, ins]`.
        scales: Scales `[out, n]` of n groups.
        zeros: Zeros `[out, n]`, whole numbers.
        form: The packed format.
        groups: Index of each input's group, `[ins]`. None means groups of adjacent inputs.

    Raises:
        CannotPackError: The values do not fit the format.
    """
    if int(zeros.min()) < 0 or int(zeros.max()) > 255:
        raise CannotPackError("zero points outside 0 to 255")
    order, count = None, scales.shape[1]
    if groups is not None and not torch.equal(groups.long(), torch.arange(form.ins) * count // form.ins):
        if not torch.equal(torch.bincount(groups.long(), minlength=count), torch.full((count,), form.ins // count)):
            raise CannotPackError("groups of different sizes")
        order = torch.argsort(groups.long(), stable=True)
        codes = codes[:, order]
    exponent = exponent_of(scales)
    halves = torch.ldexp(scales.float(), torch.tensor(-exponent)).half()
    repeats = form.ins // form.group // count
    parts = (part.repeat_interleave(repeats, dim=1) for part in (halves, zeros.to(torch.uint8)))
    form = replace(form, exponent=exponent, permuted=order is not None)
    return PackedLayer(form, form.pack(codes, *parts), None if order is None else order.int())


def exponent_of(scales: torch.Tensor) -> int:
    """Return an exponent with which float16 represents all scales exactly. Raise CannotPackError if there is none."""
    wide = scales.float()
    if not bool(wide.isfinite().all()):
        raise CannotPackError("scales that are not finite")
    for exponent in (0, int(torch.frexp(wide.abs().amax()).exponent) - 15):
        scaled = torch.ldexp(wide, torch.tensor(-exponent))
        if torch.equal(scaled.half().float(), scaled):
            return exponent
    raise CannotPackError(f"scales that float16 cannot hold, from {wide.abs().min():.2g} to {wide.abs().max():.2g}")
