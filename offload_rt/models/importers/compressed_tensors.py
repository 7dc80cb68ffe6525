"""Importer of compressed-tensors checkpoints (llm-compressor) with 4-bit or 8-bit weights, 16-bit activations.

In the format "pack-quantized", a layer has weight_packed, int32 `[out, in * bits / 32]`, with the codes of consecutive
inputs in a word; 2^(bits - 1) has been added to each code. Its weight_zero_point, int32 `[out * bits / 32, groups]`,
has consecutive outputs in a word. In the format "int-quantized", weight and weight_zero_point are int8. weight_scale is
`[out, groups]`, `[out, 1]` or `[1]`. Weights are `(code - zero) * scale` (compressed-tensors,
compressors/pack_quantized/helpers.py, quantization/lifecycle/forward.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...kernels.packed_format import PackedFormat
from ..packed_checkpoint import CannotPackError
from .base import Importer, Options, PackedLayer, Shapes, format_of, pack_layer, unpack_words

_FORMATS = ("pack-quantized", "int-quantized")


class CompressedTensors(Importer):
    """Importer of compressed-tensors checkpoints."""

    method = "compressed-tensors"
    parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def check(self, options: Options) -> None:
        for group in (options.get("config_groups") or {}).values():
            layout, weights = group.get("format") or options.get("format"), group.get("weights") or {}
            if layout not in _FORMATS:
                raise CannotPackError(f"the format {layout}; supported are {' and '.join(_FORMATS)}")
            if weights.get("type", "int") != "int" or weights.get("num_bits") not in (4, 8):
                raise CannotPackError(f"weights of the type {weights.get('type')} with {weights.get('num_bits')} bits")
            if group.get("input_activations") is not None:
                raise CannotPackError("quantised activations; supported are quantised weights alone")
            if weights.get("strategy") not in ("group", "channel", "tensor"):
                raise CannotPackError(f"scales for each {weights.get('strategy')}")
        for name in ("sparsity_config", "transform_config", "kv_cache_scheme"):
            if options.get(name):
                raise CannotPackError(f"a {name}")

    def form(self, shapes: Shapes, options: Options, ins: int) -> PackedFormat | None:
        if "weight_scale" not in shapes:
            return None
        scale = shapes["weight_scale"]
        bits = shapes["weight_packed"][1] * 32 // ins if "weight_packed" in shapes else 8
        return format_of(ins, bits, scale[1] if len(scale) == 2 else 1, permuted="weight_g_idx" in shapes)

    def pack(self, tensors: Mapping[str, torch.Tensor], form: PackedFormat, options: Options) -> PackedLayer:
        packed, zeros = tensors.get("weight_packed"), tensors.get("weight_zero_point")
        half = 1 << form.bits - 1
        codes = tensors["weight"].view(torch.uint8) ^ 128 if packed is None else unpack_words(packed, form.bits)
        scales = tensors["weight_scale"].reshape(-1, form.ins // _group(tensors, form)).expand(len(codes), -1)
        if zeros is None:
            zeros = torch.full(scales.shape, half)
        elif zeros.dtype == torch.int32:
            zeros = unpack_words(zeros.T, form.bits)[:, : len(codes)].T
        else:
            zeros = zeros.int().reshape(-1, scales.shape[1]).expand(len(codes), -1) + half
        return pack_layer(codes, scales, zeros, form, tensors.get("weight_g_idx"))


def _group(tensors: Mapping[str, torch.Tensor], form: PackedFormat) -> int:
    """Return how many inputs share a scale in the checkpoint. Groups of the packed format may be smaller."""
    scale = tensors["weight_scale"]
    return form.ins // (scale.shape[1] if scale.dim() == 2 else 1)
