"""Exact conversion of quantised GGUF tensors to packed weights (`PackedFormat`).

In Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0, scales and minima are float16. In Q4_K, Q5_K and Q6_K, they are integers of 6 or 8
bits, and every 256 weights share a float16 factor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..kernels.packed_format import PackedFormat

Parts = tuple[torch.Tensor, ...]
"""Codes of n blocks, uint8 `[n, values]`, followed by their scales, minima and factors as in `PackedFormat.pack`."""


def _float16_at(blocks: torch.Tensor, offset: int) -> torch.Tensor:
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16)


def _nibbles(data: torch.Tensor, size: int) -> torch.Tensor:
    """Split groups of `size` bytes into 4-bit numbers: first the lower halves of all bytes, then the upper halves."""
    pairs = data.reshape(len(data), -1, 1, size)
    return torch.cat((pairs & 15, pairs >> 4), dim=2).flatten(1)


def _bits(data: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """Unpack numbers of `bits` bits from groups of `size` bytes.

    For each group, the result contains the lowest number of every byte, then the second-lowest of every byte, and so
    on.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (data.reshape(len(data), -1, 1, size) >> shifts & (1 << bits) - 1).flatten(1)


def _fifth_bits(data: torch.Tensor) -> torch.Tensor:
    return (data[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _q4(blocks: torch.Tensor) -> Parts:
    start = blocks.shape[1] - 16
    return _nibbles(blocks[:, start:], 16), *(_float16_at(blocks, at) for at in range(0, start, 2))


def _q5(blocks: torch.Tensor) -> Parts:
    """Convert Q5_0 or Q5_1 blocks.

    Their layout is that of Q4_0 or Q4_1, plus 4 bytes with the fifth bits before the codes.
    """
    start = blocks.shape[1] - 20
    codes, *parts = _q4(torch.cat((blocks[:, :start], blocks[:, start + 4 :]), dim=1))
    return codes | _fifth_bits(blocks[:, start : start + 4]) << 4, *parts


def _q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[:, 2:] ^ 128, _float16_at(blocks, 0)  # GGUF codes are signed. XOR with 128 adds 128.


def _sub_scales(blocks: torch.Tensor) -> Parts:
    """Return the 6-bit scales and minima (each `[n, 8]`) of Q4_K or Q5_K blocks, and the factors (each `[n, 1]`) of
    both.
    """
    low, high, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, both & 15 | low >> 2 & 48), dim=1)
    minima = torch.cat((high & 63, both >> 4 | high >> 2 & 48), dim=1)
    return scales, minima, _float16_at(blocks, 0), -_float16_at(blocks, 2)


def _q4_k(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 16:], 32), *_sub_scales(blocks)


def _q5_k(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 48:], 32) | _bits(blocks[:, 16:48], 1, 32) << 4, *_sub_scales(blocks)


def _q6_k(blocks: torch.Tensor) -> Parts:
    codes = _nibbles(blocks[:, :128], 64) | _bits(blocks[:, 128:192], 2, 32) << 4
    return codes, blocks[:, 192:208], _float16_at(blocks, 208)


_TYPES: dict[str, tuple[int, int, int, int | None, Callable[[torch.Tensor], Parts]]] = {
    "Q4_0": (18, 4, 32, 8, _q4),
    "Q4_1": (20, 4, 32, None, _q4),
    "Q5_0": (22, 5, 32, 16, _q5),
    "Q5_1": (24, 5, 32, None, _q5),
    "Q8_0": (34, 8, 32, 128, _q8_0),
    "Q4_K": (144, 4, 32, None, _q4_k),
    "Q5_K": (176, 5, 32, None, _q5_k),
    "Q6_K": (210, 6, 16, 32, _q6_k),
}
"""Supported GGUF types: (block size in bytes, bits per code, group size, offset, conversion function).

If a type has an offset, its weights are scale * (code - offset). Otherwise, it stores a minimum per group.
"""

_WEIGHTS_AT_ONCE = 1 << 22  # limits the memory of intermediate results


def can_pack(kind: str) -> bool:
    return kind in _TYPES


def packed_format(kind: str, ins: int) -> PackedFormat | None:
    """Return the packed format for a weight of GGUF type `kind` with `ins` inputs, or None if it is not supported."""
    if not can_pack(kind):
        return None
    _, bits, group, offset, _ = _TYPES[kind]
    if not PackedFormat.fits(ins, bits, group):
        return None
    return PackedFormat(ins, bits, group, offset is None, offset or 0, has_factors=kind.endswith("_K"))


def packed_rows(data: torch.Tensor, kind: str, form: PackedFormat) -> torch.Tensor | None:
    """Convert a GGUF tensor (uint8 `[out, bytes]`) to packed rows. Return None if a scale is infinite or NaN."""
    size, *_, convert = _TYPES[kind]
    packed = torch.empty(len(data), form.row_bytes, dtype=torch.uint8)
    step = max(1, _WEIGHTS_AT_ONCE // form.ins)
    for start in range(0, len(data), step):
        rows = data[start : start + step]
        codes, *parts = (part.reshape(len(rows), -1) for part in convert(rows.reshape(-1, size)))
        if not all(part.isfinite().all() for part in parts):
            return None
        packed[start : start + step] = form.pack(codes, *parts)
    return packed
