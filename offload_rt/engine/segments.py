"""Segment length of prompts with KV on disk."""

from __future__ import annotations

from ..kv_cache.pool import HostPool
from ..models.adapter import ModelAdapter
from ..policies.base import Policy

# Hidden states, queries and outputs of a segment. Larger segments read earlier KV less often and need more memory.
SEGMENT_BYTES = {"cpu": 32 << 20, "device": 512 << 20}


def segment_tokens(pool: HostPool, policy: Policy, adapter: ModelAdapter, slice_tokens: int) -> int | None:
    """Return the number of prompt tokens that pass through all layers together; None for the whole prompt.

    The whole prompt is used for KV in memory, for policies that learn from queries (they need all keys at once), and
    for models with sliding layers (only the last KV of these is kept).
    """
    geometry = adapter.geometry
    if pool.file is None or policy.wants_queries or geometry.sliding:
        return None
    size = adapter.dtype.itemsize
    token = geometry.hidden * size + geometry.heads * geometry.head_dim * (size + 4)
    most = SEGMENT_BYTES["cpu" if adapter.device.type == "cpu" else "device"] // token
    return max(1, most // slice_tokens) * slice_tokens
