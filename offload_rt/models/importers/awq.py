"""AWQ checkpoints of AutoAWQ in its GEMM layout, with 4 bits.

Each layer has qweight, int32 `[in, out / 8]`, with outputs 0, 2, 4, 6, 1, 3, 5, 7 of each 8 in a word, qzeros, int32
`[groups, out / 8]`, in the same order, and scales `[groups, out]`. Weights are `(code - zero) * scale` (AutoAWQ,
awq/utils/packing_utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...kernels.packed_format import PackedFormat
from ..packed_checkpoint import CannotPackError
from .base import Importer, Options, PackedLayer, Shapes, format_of, pack_layer, unpack_words

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of 8 consecutive outputs is in a word."""


class AWQ(Importer):
    """Importer of AWQ."""

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
    """Return the codes in words `[n, out / 8]`: uint8 `[out, n]`."""
    codes = unpack_words(words, 4).view(len(words), -1, 8)
    return codes[..., list(_PLACES)].flatten(1).T.contiguous()
