"""Importer of 4-bit and 8-bit GPTQ checkpoints of AutoGPTQ and GPTQModel.

Each layer has four tensors: qweight, int32 `[in * bits / 32, out]`, with the codes of consecutive inputs in a word;
scales `[groups, out]`; qzeros, int32 `[groups, out * bits / 32]`; and g_idx, the group of each input. Weights are
`scale * (code - zero)`. In `checkpoint_format` "gptq", qzeros has the zeros minus 1 (AutoGPTQ,
auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...kernels.packed_format import PackedFormat
from ..packed_checkpoint import CannotPackError
from .base import Importer, Options, PackedLayer, Shapes, format_of, pack_layer, unpack_words


class GPTQ(Importer):
    """Importer of GPTQ checkpoints."""

    method = "gptq"
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def check(self, options: Options) -> None:
        layout = options.get("checkpoint_format") or options.get("format") or "gptq"
        if layout not in ("gptq", "gptq_v2") or options.get("is_marlin_format"):
            raise CannotPackError(
                f"the layout {layout if layout != 'gptq' else 'marlin'}; supported are gptq and gptq_v2"
            )

    def form(self, shapes: Shapes, options: Options, ins: int) -> PackedFormat | None:
        if "qweight" not in shapes:
            return None
        bits = shapes["qweight"][0] * 32 // ins
        return format_of(ins, bits, shapes["scales"][0], permuted=bool(options.get("desc_act")))

    def pack(self, tensors: Mapping[str, torch.Tensor], form: PackedFormat, options: Options) -> PackedLayer:
        layout = options.get("checkpoint_format") or options.get("format") or "gptq"
        zeros = unpack_words(tensors["qzeros"], form.bits).T.int() + (1 if layout == "gptq" else 0)
        codes = unpack_words(tensors["qweight"].T, form.bits)
        return pack_layer(codes, tensors["scales"].T, zeros, form, tensors.get("g_idx"))
