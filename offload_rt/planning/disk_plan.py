"""Disk space and host memory of a KV cache on disk, computed from shapes only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config import EngineConfig
from ..kv_cache.disk.disk_tier import disk_limit
from ..kv_cache.disk.file_layout import FileLayout, HostShares
from ..kv_cache.kv_format import make_kv_format
from ..kv_cache.machine import available_memory
from ..models.shape import ModelShape


@dataclass(frozen=True)
class DiskPlan:
    """`limit`: maximum bytes of KV on the disk. `shares`: division of the host memory."""

    limit: int
    shares: HostShares


def disk_plan(config: EngineConfig, shape: ModelShape) -> DiskPlan | None:
    """Return the plan for `config`, or None without `config.disk`.

    Raises MemoryLimitError if a limit is too large or too small.
    """
    if config.disk is None:
        return None
    host = config.host_memory or available_memory() // 2
    format = make_kv_format(config.kv_cache_dtype, shape.dtype, shape.geometry.head_dim)
    limit = disk_limit(config.disk, config.disk_limit, host)
    layout = FileLayout.fit(limit, replace(shape.geometry, head_dim=format.width), format)
    return DiskPlan(limit, HostShares.of(host, layout))
