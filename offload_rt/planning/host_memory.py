"""Division of the host memory between the KV cache and snapshots of recurrent state (hybrid models)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import EngineConfig
from ..core import ModelGeometry
from ..errors import MemoryLimitError
from ..kv_cache.state_pool import slot_bytes
from ..kv_cache.system_memory import available_memory
from ..utils.units import format_size

SNAPSHOT_DIVISOR = 8
"""Snapshots get the host memory divided by this number, unless the configuration sets `snapshot_memory`."""

MAX_SNAPSHOTS = 1 << 14  # Small states would allow many more. 16 Ki snapshots are enough for a thousand texts.


@dataclass(frozen=True)
class HostMemory:
    """Division of the host memory, in bytes.

    Attributes:
        kv: Memory for the KV cache.
        snapshots: Memory for snapshots of recurrent state.
        snapshot_slots: Number of snapshots that fit. 0 if the model has no recurrent state or prefixes are not shared.
    """

    kv: int
    snapshots: int = 0
    snapshot_slots: int = 0


def divide_host_memory(config: EngineConfig, geometry: ModelGeometry, dtype: torch.dtype) -> HostMemory:
    """Return the division of the host memory. Raises MemoryLimitError if snapshots would get all of it."""
    host = available_memory() // 2 if config.host_memory is None else config.host_memory
    if not (geometry.states and config.enable_prefix_caching and config.kv_cache_dtype == "auto"):
        return HostMemory(host)
    limit = host // SNAPSHOT_DIVISOR if config.snapshot_memory is None else config.snapshot_memory
    if limit >= host:
        raise MemoryLimitError(
            f"snapshot_memory={format_size(limit)} must be less than host_memory={format_size(host)}, of which it is a "
            "part: lower snapshot_memory"
        )
    size = slot_bytes(geometry, dtype)
    slots = min(limit // size, MAX_SNAPSHOTS)
    return HostMemory(host - slots * size, slots * size, slots)
