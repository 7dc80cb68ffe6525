"""Random packed weights in every variant of `PackedFormat`."""

from __future__ import annotations

import torch

from offload_rt.kernels.packed_format import BLOCK, PackedFormat

FORMATS = [
    *(PackedFormat(192, bits, 32, True) for bits in (4, 5, 8)),
    *(PackedFormat(1088, bits, 64, False, 1 << bits - 1) for bits in (4, 5, 8)),
    PackedFormat(128, 6, 16, True),
    PackedFormat(1152, 6, 16, False, 32),
    PackedFormat(2304, 4, 128, False, 8),
    PackedFormat(192, 8, 32, has_zeros=True, exponent=-9),
    PackedFormat(2304, 4, 128, has_zeros=True),
    *(PackedFormat(2304, bits, 32, True, has_factors=True) for bits in (4, 5)),
    PackedFormat(512, 6, 16, False, 32, has_factors=True, exponent=3),
]


def random_rows(form: PackedFormat, outs: int) -> tuple[torch.Tensor, torch.Tensor]:
    groups = form.ins // form.group
    codes = torch.randint(1 << form.bits, (outs, form.ins), dtype=torch.uint8)
    kinds = 2 if form.has_minima else 1
    if form.has_factors:
        whole = torch.randint(-128, 128, (kinds, outs, groups), dtype=torch.int8)
        factors = torch.randn(kinds, outs, form.ins // BLOCK).half()
        parts = [*whole, *factors]
        numbers = whole.double() * factors.double().repeat_interleave(BLOCK // form.group, -1)
    else:
        numbers = torch.randn(kinds, outs, groups).half()
        parts, numbers = [*numbers], numbers.double()
    zeros = torch.full((outs, groups), form.offset, dtype=torch.uint8)
    if form.has_zeros:
        parts.append(zeros.random_(1 << form.bits))
    scales, minima = numbers[0], numbers[1] if form.has_minima else -zeros.double() * numbers[0]
    weights = codes.double().view(outs, groups, -1) * scales[..., None] + minima[..., None]
    return form.pack(codes, *parts), weights.flatten(1) * 2.0**form.exponent
