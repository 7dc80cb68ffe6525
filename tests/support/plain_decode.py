"""A decode step over plain lists of rows, one list a layer: what a bounded pool and its windows are compared with."""

from __future__ import annotations

import torch

from offload_rt.models.adapter import ModelAdapter

Kept = list[list[tuple[int, torch.Tensor, torch.Tensor]]]
"""Of each layer the rows that are left: (position, k `[Hkv, d]`, v `[Hkv, d]`)."""


def plain_step(adapter: ModelAdapter, token: int, position: int, kept: Kept) -> torch.Tensor:
    """Logits `[V]` of one token that attends to the (position, k, v) lists of each layer, of a sliding layer those in
    its window, and to itself."""
    geometry, at = adapter.geometry, torch.tensor([position])
    x = adapter.embed(torch.tensor([token]), at)
    for layer in range(geometry.layers):
        q, k, v = adapter.qkv(layer, adapter.attention_input(layer, x), at)
        kept[layer].append((position, k[:, 0], v[:, 0]))
        window = geometry.windows[layer]
        seen = [row for row in kept[layer] if window is None or position - row[0] < window]
        keys, values = (torch.stack([row[i] for row in seen], 1) for i in (1, 2))
        keys, values = (x.repeat_interleave(geometry.group, 0) for x in (keys, values))
        weights = torch.softmax(q @ keys.transpose(1, 2) * geometry.scales[layer], -1)
        x = adapter.mlp(layer, adapter.after_attention(layer, x, (weights @ values).transpose(0, 1).flatten(1)))
    return adapter.logits(x)[0]
