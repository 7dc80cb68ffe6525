"""Reference decode step that uses plain lists of KV, to check a bounded pool and sliding windows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload_rt.core import BLOCK_SIZE
from offload_rt.engine.runner import Runner
from offload_rt.models.adapter import ModelAdapter

LayerKV = list[list[tuple[int, torch.Tensor, torch.Tensor]]]
"""Remaining KV per layer: (position, k `[Hkv, d]`, v `[Hkv, d]`). Layers that use earlier layers' KV have none."""


def plain_step(adapter: ModelAdapter, tokens: list[int], position: int, kv: LayerKV) -> torch.Tensor:
    """Append the KV of `tokens` to `kv`. Return the logits `[V]` of the last token, with exact attention."""
    geometry, at = adapter.geometry, torch.arange(position, position + len(tokens))
    ids = torch.tensor(tokens)
    x = adapter.embed(ids, at)
    for layer in range(geometry.layers):
        attention_input, rows = adapter.attention_input(layer, x), kv[geometry.kv_layer(layer)]
        if geometry.kv_layer(layer) == layer:
            q, k, v = adapter.qkv(layer, attention_input, at)
            rows += [(position + i, k[:, i], v[:, i]) for i in range(len(tokens))]
        else:
            q = adapter.lone_query(layer, attention_input, at)
        window = geometry.windows[layer]
        keys, values = (torch.stack([row[i] for row in rows], 1) for i in (1, 2))
        keys, values = (rows.repeat_interleave(geometry.heads // len(rows), 0) for rows in (keys, values))
        ago = at[:, None] - torch.tensor([row[0] for row in rows])
        shown = at[:, None] % window + 1 if geometry.chunked and window else window or ago.max() + 1
        seen = (ago >= 0) & (ago < shown)
        scores = q @ keys.transpose(1, 2) * geometry.scales[layer]
        if geometry.softcap is not None:
            scores = geometry.softcap * torch.tanh(scores / geometry.softcap)
        scores, sinks = scores.masked_fill(~seen, -torch.inf), adapter.sinks[layer]
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, len(at), 1)), -1)
        weights = torch.softmax(scores, -1)[..., : len(rows)]
        residual = adapter.after_attention(layer, x, (weights @ values).transpose(0, 1).flatten(1))
        x = adapter.mlp(layer, residual, ids)
    return adapter.logits(x)[-1]


def assert_evicts_oldest(
    runner: Runner, tokens: list[int], prefilled: int, assert_near: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """Check decoding in a pool of two blocks: full-attention layers evict their oldest KV, sliding layers do not."""
    geometry = runner.adapter.geometry
    kv: LayerKV = [[] for _ in range(geometry.layers)]
    plain_step(runner.adapter, tokens[:prefilled], 0, kv)
    sequence = runner.new_sequence(tokens[:prefilled], prefilled)
    sequence.tokens += tokens[prefilled:]
    runner.prefill(sequence, prefilled)
    for position, token in enumerate(tokens[prefilled:], start=prefilled):
        for layer, window in zip(kv, geometry.windows, strict=True):
            if window is None and len(layer) == 2 * BLOCK_SIZE:
                layer.pop(0)
        assert_near(runner.decode([sequence])[0], plain_step(runner.adapter, [token], position, kv))
    runner.check_integrity()
    runner.free(sequence)
    assert runner.pool.sequence_bytes == 0
