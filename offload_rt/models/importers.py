"""Importers of checkpoint folders with packed weights: GPTQ, AWQ, compressed-tensors and MXFP4.

An importer converts the tensors of one linear layer, or of stacked experts, to packed rows (`PackedFormat`). When
unpacked, these rows equal the weights that the checkpoint's own library computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ..kernels.packed_format import GROUPS, PackedFormat
from .packed_checkpoint import CannotPackError

Options = Mapping[str, Any]
"""The `quantization_config` of a checkpoint."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a module's tensors by name suffix, such as "qweight"."""

Tensors = Mapping[str, torch.Tensor]
"""A module's tensors by name suffix, such as "qweight"."""


@dataclass(frozen=True)
class PackedLayer:
    """A linear layer, or stacked experts, with packed weights.

    Attributes:
        rows: Packed rows, uint8 `[out, form.row_bytes]`, or `[experts, out, form.row_bytes]`.
        order: int32 `[ins]`: packed input i is input `order[i]` of the layer. None if the inputs keep their order.
    """

    form: PackedFormat
    rows: torch.Tensor
    order: torch.Tensor | None = None


class Importer(ABC):
    """Converts the layers of one kind of checkpoint.

    All methods raise CannotPackError if the checkpoint is an unsupported variant.

    Attributes:
        method: Value of `quant_method` in the configuration of these checkpoints.
        suffixes: Name suffixes of the tensors to convert. Other tensors are copied.
    """

    method: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    def split(self, name: str) -> tuple[str, str]:
        module, _, part = name.rpartition(".")
        return module, part

    @abstractmethod
    def check(self, options: Options) -> None: ...

    @abstractmethod
    def packed_format(self, shapes: Shapes, options: Options, ins: int) -> PackedFormat | None:
        """Return the packed format of a layer with `ins` inputs, or None if the layer is not packed.

        The format's `exponent` and `permuted` depend on the weights, so `pack` may still change them.
        """

    @abstractmethod
    def pack(self, tensors: Tensors, form: PackedFormat, options: Options) -> PackedLayer: ...


class GPTQ(Importer):
    """4-bit and 8-bit checkpoints of AutoGPTQ and GPTQModel. Weights are `scale * (code - zero)`.

    A layer has these tensors:

    * qweight, int32 `[in * bits / 32, out]`. Each word packs the codes of consecutive inputs.
    * scales `[groups, out]`.
    * qzeros, int32 `[groups, out * bits / 32]`. If `checkpoint_format` is "gptq", the stored values are the zeros minus
      1 (AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py).
    * g_idx, the group of each input.
    """

    method = "gptq"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")

    def check(self, options: Options) -> None:
        layout = self._layout(options)
        if layout not in ("gptq", "gptq_v2") or options.get("is_marlin_format"):
            raise CannotPackError(
                f"the layout {layout if layout != 'gptq' else 'marlin'}; supported are gptq and gptq_v2"
            )

    def packed_format(self, shapes: Shapes, options: Options, ins: int) -> PackedFormat | None:
        if "qweight" not in shapes:
            return None
        bits = shapes["qweight"][0] * 32 // ins
        return _format(ins, bits, shapes["scales"][0], permuted=bool(options.get("desc_act")))

    def pack(self, tensors: Tensors, form: PackedFormat, options: Options) -> PackedLayer:
        zeros = _unpack_words(tensors["qzeros"], form.bits).T.int() + (1 if self._layout(options) == "gptq" else 0)
        codes = _unpack_words(tensors["qweight"].T, form.bits)
        return _pack_layer(codes, tensors["scales"].T, zeros, form, tensors.get("g_idx"))

    @staticmethod
    def _layout(options: Options) -> str:
        return str(options.get("checkpoint_format") or options.get("format") or "gptq")


class AWQ(Importer):
    """4-bit checkpoints in the GEMM layout of AutoAWQ. Weights are `(code - zero) * scale`.

    A layer has these tensors (AutoAWQ, awq/utils/packing_utils.py):

    * qweight, int32 `[in, out / 8]`. Each word packs the codes of outputs 0, 2, 4, 6, 1, 3, 5, 7, in this order.
    * qzeros, int32 `[groups, out / 8]`, in the same order.
    * scales `[groups, out]`.
    """

    method = "awq"
    suffixes = ("qweight", "qzeros", "scales")

    def check(self, options: Options) -> None:
        layout = str(options.get("version") or options.get("format") or "gemm").lower()
        if layout != "gemm":
            raise CannotPackError(f"the layout {layout}; supported is gemm")

    def packed_format(self, shapes: Shapes, options: Options, ins: int) -> PackedFormat | None:
        if "qweight" not in shapes:
            return None
        bits = 32 * shapes["qweight"][1] // shapes["scales"][1]
        if bits != 4:
            raise CannotPackError(f"{bits} bits; supported are 4")
        return _format(ins, bits, shapes["scales"][0], permuted=False)

    def pack(self, tensors: Tensors, form: PackedFormat, options: Options) -> PackedLayer:
        codes, zeros = (self._unpack(tensors[name]) for name in ("qweight", "qzeros"))
        return _pack_layer(codes, tensors["scales"].T, zeros, form, None)

    @staticmethod
    def _unpack(words: torch.Tensor) -> torch.Tensor:
        """Unpack int32 words `[n, out / 8]` to uint8 codes `[out, n]`, with the outputs in their natural order."""
        codes = _unpack_words(words, 4).view(len(words), -1, 8)
        return codes[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1).T.contiguous()


class CompressedTensors(Importer):
    """compressed-tensors checkpoints (llm-compressor) with 4-bit or 8-bit weights and 16-bit activations.

    Weights are `(code - zero) * scale`, and weight_scale is `[out, groups]`, `[out, 1]` or `[1]`. The other tensors
    depend on the format (compressed-tensors, compressors/pack_quantized/helpers.py, quantization/lifecycle/forward.py):

    * "pack-quantized": each word of weight_packed, int32 `[out, in * bits / 32]`, packs the codes of consecutive
      inputs, increased by 2^(bits - 1). Each word of weight_zero_point, int32 `[out * bits / 32, groups]`, packs
      consecutive outputs.
    * "int-quantized": weight and weight_zero_point are int8.
    """

    method = "compressed-tensors"
    suffixes = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    _formats = ("pack-quantized", "int-quantized")

    def check(self, options: Options) -> None:
        for group in (options.get("config_groups") or {}).values():
            layout, weights = group.get("format") or options.get("format"), group.get("weights") or {}
            if layout not in self._formats:
                raise CannotPackError(f"the format {layout}; supported are {' and '.join(self._formats)}")
            if weights.get("type", "int") != "int" or weights.get("num_bits") not in (4, 8):
                raise CannotPackError(f"weights of the type {weights.get('type')} with {weights.get('num_bits')} bits")
            if group.get("input_activations") is not None:
                raise CannotPackError("quantised activations; supported are quantised weights alone")
            if weights.get("strategy") not in ("group", "channel", "tensor"):
                raise CannotPackError(f"scales for each {weights.get('strategy')}")
        for name in ("sparsity_config", "transform_config", "kv_cache_scheme"):
            if options.get(name):
                raise CannotPackError(f"a {name}")

    def packed_format(self, shapes: Shapes, options: Options, ins: int) -> PackedFormat | None:
        if "weight_scale" not in shapes:
            return None
        bits = shapes["weight_packed"][1] * 32 // ins if "weight_packed" in shapes else 8
        return _format(ins, bits, self._groups(shapes["weight_scale"]), permuted="weight_g_idx" in shapes)

    def pack(self, tensors: Tensors, form: PackedFormat, options: Options) -> PackedLayer:
        packed, zeros, scales = (tensors.get(f"weight_{name}") for name in ("packed", "zero_point", "scale"))
        assert scales is not None
        zero_point = 1 << form.bits - 1
        codes = tensors["weight"].view(torch.uint8) ^ 128 if packed is None else _unpack_words(packed, form.bits)
        scales = scales.reshape(-1, self._groups(scales.shape)).expand(len(codes), -1)
        if zeros is None:
            zeros = torch.full(scales.shape, zero_point)
        elif zeros.dtype == torch.int32:
            zeros = _unpack_words(zeros.T, form.bits)[:, : len(codes)].T
        else:
            zeros = zeros.int().reshape(-1, scales.shape[1]).expand(len(codes), -1) + zero_point
        return _pack_layer(codes, scales, zeros, form, tensors.get("weight_g_idx"))

    @staticmethod
    def _groups(scale: tuple[int, ...]) -> int:
        return scale[1] if len(scale) == 2 else 1


class MXFP4Experts(Importer):
    """MXFP4 checkpoints of gpt-oss: the stacked experts of each layer in 4-bit floating point.

    Weights are `number[code] * 2^(scale - 127)` (transformers, integrations/mxfp4.py). Each projection has two tensors:
    blocks, uint8 `[experts, out, groups, 16]`, and scales, uint8 `[experts, out, groups]`. Byte i of a group contains
    input 2i in its lower half and input 2i + 1 in its upper half.
    """

    method = "mxfp4"
    suffixes = ("blocks", "scales")
    _group = 32
    _doubled = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the number of each code; the sign is a separate bit
    _zero = 12

    def check(self, options: Options) -> None: ...

    def split(self, name: str) -> tuple[str, str]:
        module, separator, part = name.rpartition("_")
        return (module, part) if separator and part in self.suffixes else super().split(name)

    def packed_format(self, shapes: Shapes, options: Options, ins: int) -> PackedFormat | None:
        if "blocks" not in shapes:
            return None
        groups, size = shapes["blocks"][2:]
        if 2 * size != self._group:
            raise CannotPackError(f"groups of {2 * size} inputs; groups of {self._group} are supported")
        if groups * self._group != ins:
            raise CannotPackError(f"{groups} groups of {self._group} do not cover {ins} inputs")
        if not PackedFormat.fits(ins, 5, self._group):
            raise CannotPackError(f"{ins} inputs; a multiple of 64 is supported")
        # Twice each number is an integer from -12 to 12, so the packed codes have 5 bits.
        return PackedFormat(ins, 5, self._group, offset=self._zero)

    def pack(self, tensors: Tensors, form: PackedFormat, options: Options) -> PackedLayer:
        blocks, exponents = tensors["blocks"], tensors["scales"]
        if blocks.shape[:-1] != exponents.shape:
            raise CannotPackError(
                f"scales of shape {tuple(exponents.shape)} do not match blocks of shape {tuple(blocks.shape)}"
            )
        if int(exponents.max()) == 255:
            raise CannotPackError("scales that are not finite")
        codes = torch.tensor([self._zero + sign * magnitude for sign in (1, -1) for magnitude in self._doubled]).byte()
        codes = codes[torch.stack((blocks & 15, blocks >> 4), dim=-1).int()].flatten(-3)
        scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 128)  # 127, and 1 for the doubled numbers
        scales *= (codes.unflatten(-1, (-1, self._group)) != self._zero).any(-1)  # scales of zeros may be out of range
        form, halves = _half_scales(scales, form)
        rows = form.pack(codes.flatten(0, 1), halves.flatten(0, 1))
        return PackedLayer(form, rows.unflatten(0, codes.shape[:2]))


IMPORTERS: dict[str, Importer] = {
    importer.method: importer for importer in (GPTQ(), AWQ(), CompressedTensors(), MXFP4Experts())
}


def _format(ins: int, bits: int, groups: int, *, permuted: bool) -> PackedFormat:
    """Return the format for `bits`-bit codes and `groups` groups per row. Raise CannotPackError if no format fits.

    `permuted` says whether the inputs are stored in a different order.
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


def _unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 words `[n, m]`, lowest bits first, to uint8 codes `[n, m * 32 / bits]`."""
    data = words.contiguous().view(torch.uint8)
    return data if bits == 8 else torch.stack((data & 15, data >> 4), dim=-1).flatten(1)


def _pack_layer(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, form: PackedFormat, groups: torch.Tensor | None
) -> PackedLayer:
    """Pack a layer whose weights are `(code - zero) * scale`. Raise CannotPackError if the values do not fit.

    Args:
        codes: uint8 `[out, ins]`.
        scales: `[out, n]` for n groups.
        zeros: `[out, n]`, with integer values.
        groups: Group of each input, `[ins]`. None means groups of adjacent inputs.
    """
    if int(zeros.min()) < 0 or int(zeros.max()) > 255:
        raise CannotPackError("zero points outside 0 to 255")
    order, count = None, scales.shape[1]
    if groups is not None and not torch.equal(groups.long(), torch.arange(form.ins) * count // form.ins):
        if not torch.equal(torch.bincount(groups.long(), minlength=count), torch.full((count,), form.ins // count)):
            raise CannotPackError("groups of different sizes")
        order = torch.argsort(groups.long(), stable=True)
        codes = codes[:, order]
    form, halves = _half_scales(scales, replace(form, permuted=order is not None))
    repeats = form.ins // form.group // count
    parts = (part.repeat_interleave(repeats, dim=1) for part in (halves, zeros.to(torch.uint8)))
    return PackedLayer(form, form.pack(codes, *parts), None if order is None else order.int())


def _half_scales(scales: torch.Tensor, form: PackedFormat) -> tuple[PackedFormat, torch.Tensor]:
    """Convert scales to float16, dividing them by 2^exponent if necessary.

    Return `form` with this exponent, and the scales.

    Raise CannotPackError if the conversion is not exact.
    """
    wide = scales.float()
    if not bool(wide.isfinite().all()):
        raise CannotPackError("scales that are not finite")
    for exponent in (0, int(torch.frexp(wide.abs().amax()).exponent) - 15):
        scaled = torch.ldexp(wide, torch.tensor(-exponent))
        if torch.equal(scaled.half().float(), scaled):
            return replace(form, exponent=exponent), scaled.half()
    raise CannotPackError(f"scales that float16 cannot hold, from {wide.abs().min():.2g} to {wide.abs().max():.2g}")
