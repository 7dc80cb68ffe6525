"""Storage of random low-bit rows."""

from __future__ import annotations

import torch

from offload_rt.kernels.low_bit import BLOCK, KEY_BITS, Layout, quantise_rows


def stored_rows(layout: Layout, heads: int, tokens: int) -> torch.Tensor:
    """Storage of random rows, everything behind them garbage."""
    storage = torch.randint(0, 256, (heads, -(-tokens // BLOCK) + 1, layout.block_bytes), dtype=torch.uint8)
    slots = torch.arange(tokens)
    halves = ((layout.keys(storage), KEY_BITS), (layout.values(storage), layout.value_bits))
    for parts, bits in halves:
        rows = quantise_rows(torch.randn(heads, tokens, layout.head_dim), bits)
        for part, data in zip(parts, rows, strict=True):
            part[:, slots // BLOCK, slots % BLOCK] = data
    return storage
