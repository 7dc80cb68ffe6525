"""Create random low-bit KV, and the arguments for a batch that uses it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from offload_rt.kernels.low_bit import KEY_BITS, Layout, mixing, quantise_rows
from offload_rt.kernels.low_bit_sequence import LowBitQuery, NativeQuery
from offload_rt.kernels.pages import BLOCK, PAGE_BLOCKS, PAGE_TOKENS, Pages, PageTable, page_table


def approximate_only(
    query: LowBitQuery | NativeQuery, skip: torch.Tensor, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output `[Hkv, G, d]` and logsumexp `[Hkv, G]` for approximate KV, without changing the basis."""
    q = query.q if isinstance(query, LowBitQuery) else query.inputs[0]
    nothing, identity = (torch.zeros_like(q), torch.full(q.shape[:2], -math.inf)), torch.eye(q.shape[2])
    return query.merge(nothing, skip, (identity, identity), softcap)


def table_of(pages: Sequence[Pages]) -> PageTable:
    most = max(len(sequence.tensors) for sequence in pages)
    return PageTable(tuple(pages), page_table(pages, most).to(pages[0].tensors[0].device))


def random_pages(layout: Layout, heads: int, tokens: int, device: str | torch.device = "cpu") -> Pages:
    """Return pages of random low-bit KV in the second of two layers. The first layer contains garbage."""
    count = -(-tokens // PAGE_TOKENS)
    tensors = torch.randint(0, 256, (count, 2, heads, PAGE_BLOCKS, layout.block_bytes), dtype=torch.uint8)
    blocks, slots = tensors[:, 1].transpose(0, 1).flatten(1, 2).clone(), torch.arange(tokens)
    for parts, bits in ((layout.keys(blocks), KEY_BITS), (layout.values(blocks), layout.value_bits)):
        rows = quantise_rows(torch.randn(heads, tokens, layout.head_dim), bits)
        for part, data in zip(parts, rows, strict=True):
            part[:, slots // BLOCK, slots % BLOCK] = data
    tensors[:, 1] = blocks.unflatten(1, (count, PAGE_BLOCKS)).transpose(0, 1)
    return Pages.of([tensors[i].clone().to(device) for i in reversed(range(count))][::-1], 1)


def concatenated_pages(pages: Pages) -> torch.Tensor:
    return torch.cat([tensor[pages.layer] for tensor in pages.tensors], 1)


def cloned_pages(pages: Pages) -> Pages:
    return Pages.of([tensor.clone() for tensor in pages.tensors], pages.layer)


def ragged_lists(layout: Layout, group: int, device: torch.device) -> tuple[Any, ...]:
    """Return arguments for `low_bit_lists.merge_approximate`, for three sequences with two KV heads.

    The first sequence's candidates end in the middle of a block, the second has no candidates, and for the third all
    candidates are selected.
    """
    d, spans = layout.head_dim, ((5, 600), (4, 4), (60, 70))
    table = table_of([random_pages(layout, 2, tokens, device) for tokens in (620, 6, 130)])
    starts, stops = (torch.tensor(each, dtype=torch.int32).repeat_interleave(2) for each in zip(*spans, strict=True))
    chosen = torch.randint(0, 600, (6, 90))
    chosen[:2, :70] = torch.stack([torch.randperm(595)[:70] + 5 for _ in range(2)]).sort(1).values
    chosen[4:, :10] = torch.arange(60, 70)
    counts = torch.tensor([70, 70, 0, 0, 10, 10], dtype=torch.int32)
    q, out, lse = torch.randn(6, group, d) * d**-0.5, torch.randn(6, group, d), torch.randn(6, group)
    starts, stops, chosen, counts, q, out, lse = (x.to(device) for x in (starts, stops, chosen, counts, q, out, lse))
    mean, mixed = torch.randn(2, d).to(device), mixing(d).float().to(device)
    return q, mean, mixed, layout, table, starts, stops, chosen, counts, 640, out, lse
