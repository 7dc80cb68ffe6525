"""Reference decode step over plain lists of KV, to check a bounded pool and its windows."""

from __future__ import annotations

import torch

from offload_rt.models.adapter import ModelAdapter

Kept = list[list[tuple[int, torch.Tensor, torch.Tensor]]]
"""KV left in each layer: (position, k `[Hkv, d]`, v `[Hkv, d]`)."""


def plain_step(adapter: ModelAdapter, tokens: list[int], position: int, kept: Kept) -> torch.Tensor:
    """Append `tokens` at `position` to `kept` and return the logits `[V]` of the last one.

    Each token attends to itself and to the earlier KV of `kept`, in sliding-window layers only inside the window.
    """
    geometry, at = adapter.geometry, torch.arange(position, position + len(tokens))
    x = adapter.embed(torch.tensor(tokens), at)
    for layer in range(geometry.layers):
        q, k, v = adapter.qkv(layer, adapter.attention_input(layer, x), at)
        kept[layer] += [(position + i, k[:, i], v[:, i]) for i in range(len(tokens))]
        window = geometry.windows[layer]
        keys, values = (torch.stack([row[i] for row in kept[layer]], 1) for i in (1, 2))
        keys, values = (x.repeat_interleave(geometry.group, 0) for x in (keys, values))
        ago = at[:, None] - torch.tensor([row[0] for row in kept[layer]])
        shown = at[:, None] % window + 1 if geometry.chunked and window else window or ago.max() + 1
        seen = (ago >= 0) & (ago < shown)
        scores = q @ keys.transpose(1, 2) * geometry.scales[layer]
        if geometry.softcap is not None:
            scores = geometry.softcap * torch.tanh(scores / geometry.softcap)
        scores, sinks = scores.masked_fill(~seen, -torch.inf), adapter.sinks[layer]
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, len(at), 1)), -1)
        weights = torch.softmax(scores, -1)[..., : len(kept[layer])]
        x = adapter.mlp(layer, adapter.after_attention(layer, x, (weights @ values).transpose(0, 1).flatten(1)))
    return adapter.logits(x)[-1]
