"""Importer of 4-bit AWQ checkpoints in the GEMM layout of AutoAWQ.

Each layer has three tensors. qweight, int32 `[in, out / 8]`, has eight codes in a word, in the order of outputs 0, 2,
4, 6, 1, 3, 5, 7. qzeros, int32 `[groups, out / 8]`, has the same order. scales is `[groups, out]`. Weights are `(code -
zero) * scale` (AutoAWQ, awq/utils/packing_utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...kernels.packed_format import PackedFormat
from ..packed_checkpoint import CannotPackError
from .base import Importer, Options, PackedLayer, Shapes, format_of, pack_layer, unpack_words

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of each of 8 consecutive outputs."""


class AWQ(Importer):
    """Importer of AWQ checkpoints."""

    method = "awq"
    parts = ("qweight", "qzeros", "scales")

    def check(self, options: Options) -> None:
        layout = str(options.get("version") or options.get("format") or "gemm").lower()
        if layout != "gemm":
            raise CannotPackError(f"the layout {layout}; supported is gemm")

    def form(self, shapes: Shapes, options: Options, ins: int) -> PackedFormat | None:
        if "qweight" not in shapes:
            return None
        bits = 32 * shapes["qweight"][1] // shapes["scales"][1]
        if bits != 4:
            raise CannotPackError(f"{bits} bits; supported are 4")
        return format_of(ins, bits, shapes["scales"][0], permuted=False)

    def pack(self, tensors: Mapping[str, torch.Tensor], form: PackedFormat, options: Options) -> PackedLayer:
        codes, zeros = (_outputs(tensors[name]) for name in ("qweight", "qzeros"))
        return pack_layer(codes, tensors["scales"].T, zeros, form, None)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """Unpack words `[n, out / 8]` to codes, uint8 `[out, n]`."""
    codes = unpack_words(words, 4).view(len(words), -1, 8)
    return codes[..., list(_PLACES)].flatten(1).T.contiguous()
