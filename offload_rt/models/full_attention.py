"""Full causal attention, one layer at a time, for prefill, calibration, verification and teacher forcing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ..core import KVPart
from ..kernels.causal import attend_causal
from .adapter import ModelAdapter


def slices_of(count: int, size: int) -> list[slice]:
    """Split [0, count) into consecutive slices of at most `size` elements."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def keys_and_values(
    adapter: ModelAdapter, layer: int, inputs: Iterable[torch.Tensor], positions: Iterable[torch.Tensor]
) -> Iterator[KVPart]:
    """Yield k and v, each `[Hkv, m, d]`, for each slice of m tokens.

    For each slice, `inputs` yields the attention inputs `[m, D]`, and `positions` yields the positions `[m]`.
    """
    for attention_input, slice_positions in zip(inputs, positions, strict=True):
        yield KVPart(*adapter.key_value(layer, attention_input, slice_positions))


def query_and_kv(
    adapter: ModelAdapter, layer: int, inputs: torch.Tensor, positions: torch.Tensor, shared: dict[int, KVPart]
) -> tuple[torch.Tensor, KVPart]:
    """Return q `[H, T, d]` for attention inputs `[T, D]`, and the K and V `[Hkv, T, d]` that it attends to.

    `shared` stores, by layer, K and V that later layers reuse. Start with an empty dictionary and pass the same one for
    all layers.
    """
    if (source := adapter.geometry.kv_layer(layer)) != layer:
        return adapter.lone_query(layer, inputs, positions), shared[source]
    q, k, v = adapter.qkv(layer, inputs, positions)
    kv = KVPart(k, v)
    if layer in adapter.geometry.shared_kv:
        shared[layer] = kv
    return q, kv


def attend_layer(adapter: ModelAdapter, layer: int, q: torch.Tensor, kv: KVPart, position: int) -> torch.Tensor:
    """Return exact causal attention `[H, m, d]` of the last m of n tokens, for their queries q `[H, m, d]`.

    `kv` contains K and V of all n tokens. `position` is the position of the first query.
    """
    geometry, window, sinks = adapter.geometry, adapter.geometry.windows[layer], adapter.sinks[layer]
    scale, cap = geometry.scales[layer], geometry.softcap
    if window is None or not geometry.chunked:
        return attend_causal(q, kv.k, kv.v, scale, window, cap, sinks)
    outs, start, past = [], 0, kv.k.shape[1] - q.shape[1]
    while start < q.shape[1]:  # chunked attention: a token does not see tokens of other chunks
        offset = (position + start) % window
        stop = min(q.shape[1], start + window - offset)
        keys = slice(max(0, past + start - offset), past + stop)
        outs.append(attend_causal(q[:, start:stop], kv.k[:, keys], kv.v[:, keys], scale, None, cap, sinks))
        start = stop
    return torch.cat(outs, dim=1)


def residual_after_attention(
    adapter: ModelAdapter,
    layer: int,
    hidden: torch.Tensor,
    q: torch.Tensor,
    kv: KVPart,
    stop: int,
    position: int | None = None,
) -> torch.Tensor:
    """Return the residual stream `[m, D]` after a layer's attention, for the last m of the first `stop` tokens.

    Args:
        hidden: The layer's input `[m, D]`.
        q: Queries of the m tokens, `[H, m, d]`.
        kv: K and V of n >= stop tokens, each `[Hkv, n, d]`.
        position: Position of the first query. Required if `kv` does not start at the first token of the sequence.
    """
    part = KVPart(kv.k[:, :stop], kv.v[:, :stop])
    attended = attend_layer(adapter, layer, q, part, stop - q.shape[1] if position is None else position)
    return adapter.after_attention(layer, hidden, attended.transpose(0, 1).flatten(1))
