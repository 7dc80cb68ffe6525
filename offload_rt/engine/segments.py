"""How many tokens of a prompt go through the layers together, where its rows lie on disk."""

from __future__ import annotations

from ..kv_cache.pool import HostPool
from ..models.adapter import ModelAdapter
from ..policies.base import Policy

SEGMENT_BYTES = {"cpu": 32 << 20, "device": 512 << 20}
"""Of hidden states, queries and outputs of a segment: more is fewer passes over what is there already, and memory."""


def segment_tokens(pool: HostPool, policy: Policy, adapter: ModelAdapter, slice_tokens: int) -> int | None:
    """Whole slices of a prompt beyond memory, whose hidden states, queries and outputs would not fit either; None where
    all of it goes through together: in memory; under a policy that learns from queries, which has to see all keys with
    them; and with sliding layers, of which only the last rows are kept."""
    geometry = adapter.geometry
    if pool.file is None or policy.wants_queries or geometry.sliding:
        return None
    size = adapter.dtype.itemsize
    token = geometry.hidden * size + geometry.heads * geometry.head_dim * (size + 4)
    most = SEGMENT_BYTES["cpu" if adapter.device.type == "cpu" else "device"] // token
    return max(1, most // slice_tokens) * slice_tokens
