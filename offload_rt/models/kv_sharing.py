"""Attention layers that use the keys and values of an earlier layer (Gemma 4 E2B and E4B)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def uses_earlier_kv(attention: Any) -> bool:
    return bool(getattr(attention, "is_kv_shared_layer", False))


def kv_sources(attentions: Sequence[Any]) -> tuple[int, ...]:
    """Return, for each layer, the layer whose K and V it uses (`ModelGeometry.kv_from`).

    Return () if no layers share KV.

    A layer without K and V of its own uses those of the nearest earlier layer of its type (sliding or full attention)
    that has them.
    """
    if not any(map(uses_earlier_kv, attentions)):
        return ()
    last: dict[str, int] = {}
    sources = []
    for layer, attention in enumerate(attentions):
        if not uses_earlier_kv(attention):
            last[attention.layer_type] = layer
        sources.append(last[attention.layer_type])
    return tuple(sources)
