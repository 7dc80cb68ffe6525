"""Storage of random low-bit rows, and lists of a batch over it."""

from __future__ import annotations

from typing import Any

import torch

from offload_rt.kernels.low_bit import BLOCK, KEY_BITS, Layout, mixing, quantise_rows
from offload_rt.kernels.pointer_table import PointerTable


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


def ragged_lists(layout: Layout, group: int, device: torch.device) -> tuple[Any, ...]:
    """What `low_bit_lists.join_tail` takes, of three sequences of two heads: one whose candidates end within a block,
    one without candidates, and one all of whose candidates were selected."""
    d, spans = layout.head_dim, ((5, 600), (4, 4), (60, 70))
    storages = PointerTable.of([stored_rows(layout, 2, tokens).to(device) for tokens in (620, 6, 130)])
    starts, stops = (torch.tensor(each, dtype=torch.int32).repeat_interleave(2) for each in zip(*spans, strict=True))
    chosen = torch.randint(0, 600, (6, 90))
    chosen[:2, :70] = torch.stack([torch.randperm(595)[:70] + 5 for _ in range(2)]).sort(1).values
    chosen[4:, :10] = torch.arange(60, 70)
    counts = torch.tensor([70, 70, 0, 0, 10, 10], dtype=torch.int32)
    q, out, lse = torch.randn(6, group, d) * d**-0.5, torch.randn(6, group, d), torch.randn(6, group)
    starts, stops, chosen, counts, q, out, lse = (x.to(device) for x in (starts, stops, chosen, counts, q, out, lse))
    mean, mixed = torch.randn(2, d).to(device), mixing(d).float().to(device)
    return q, mean, mixed, layout, storages, starts, stops, chosen, counts, 640, out, lse
