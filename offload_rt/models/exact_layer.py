"""Pieces of one decoder layer with exact causal attention over a text, slice by slice: what prefill, calibration and
teacher forcing have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ..config import Source
from ..core import KVPart
from ..kernels.causal import attend_causal
from .adapter import ModelAdapter


def slices_of(count: int, size: int) -> list[slice]:
    """Neighbouring slices of at most `size` that cover [0, count), in order."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def keys_and_values(
    adapter: ModelAdapter, layer: int, inputs: Iterable[torch.Tensor], positions: Iterable[torch.Tensor]
) -> Iterator[KVPart]:
    """Yields k and v `[Hkv, m, d]` of each slice, from its attention inputs `[m, D]` and positions `[m]`."""
    for attention_input, at in zip(inputs, positions, strict=True):
        yield KVPart(*adapter.key_value(layer, attention_input, at))


def attend_layer(adapter: ModelAdapter, layer: int, q: torch.Tensor, kv: KVPart, position: int) -> torch.Tensor:
    """Exact attention `[H, m, d]` of the last m of n tokens in a layer, with queries q `[H, m, d]` and rows kv
    `[Hkv, n, d]`; the first query's token is at `position`."""
    geometry, window, sinks = adapter.geometry, adapter.geometry.windows[layer], adapter.sinks(layer)
    scale, cap = geometry.scales[layer], geometry.softcap
    if window is None or not geometry.chunked:
        return attend_causal(q, kv.k, kv.v, scale, window, cap, sinks)
    outs, at, before = [], 0, kv.k.shape[1] - q.shape[1]
    while at < q.shape[1]:  # chunk by chunk, each of which sees nothing of the others
        inside = (position + at) % window
        stop = min(q.shape[1], at + window - inside)
        seen = slice(max(0, before + at - inside), before + stop)
        outs.append(attend_causal(q[:, at:stop], kv.k[:, seen], kv.v[:, seen], scale, None, cap, sinks))
        at = stop
    return torch.cat(outs, dim=1)


def residual_after_attention(
    adapter: ModelAdapter,
    layer: int,
    hidden: torch.Tensor,
    q: torch.Tensor,
    kv: KVPart,
    seen: int,
    position: int | None = None,
) -> torch.Tensor:
    """Returns the residual stream `[m, D]` behind a layer's attention, for the tokens [seen - m, seen) of a text.

    hidden `[m, D]`: the layer's input; q `[H, m, d]`: the tokens' queries; kv: K and V `[Hkv, n, d]` of the text, of
    which those of the first `seen` tokens are attended to; position: the first query's, where the rows do not begin at
    the first token.
    """
    part = KVPart(kv.k[:, :seen], kv.v[:, :seen])
    attended = attend_layer(adapter, layer, q, part, seen - q.shape[1] if position is None else position)
    return adapter.after_attention(layer, hidden, attended.transpose(0, 1).flatten(1))


def guessed_input(
    adapter: ModelAdapter,
    layer: int,
    source: Source,
    hidden: torch.Tensor,
    attention_input: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    """Returns the attention input `[T, D]` that layer `layer` is guessed to have, before any correction, from what the
    layer before it knows (InfiniGen §4.3): its input `hidden`, its own `attention_input`, or the `residual` stream
    behind its attention, each `[T, D]`."""
    if source == "attention_input":
        return attention_input
    return adapter.attention_input(layer, hidden if source == "normed_input" else residual)
