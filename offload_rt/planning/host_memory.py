"""Division of the host memory between the KV cache and, in hybrid models, snapshots of recurrent state."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from ..config import EngineConfig
from ..core import ModelGeometry
from ..errors import MemoryLimitError
from ..kv_cache.state_pool import slot_bytes
from ..kv_cache.system_memory import available_memory
from ..models.source import find_source, hub_of
from ..models.stored_tensors import readable_tensors
from ..utils.units import format_size

SNAPSHOT_DIVISOR = 8
"""Snapshots get the host memory divided by this number if the configuration does not set `snapshot_memory`."""

MAX_SNAPSHOTS = 1 << 14  # Enough for a thousand texts. If states are small, many more would fit.

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class HostMemory:
    """Division of the host memory, in bytes.

    Attributes:
        kv: Memory for the KV cache.
        snapshots: Memory for snapshots of recurrent state.
        snapshot_slots: Number of snapshots. 0 if the model has no recurrent state or prefix caching is off.
    """

    kv: int
    snapshots: int = 0
    snapshot_slots: int = 0


def divide_host_memory(config: EngineConfig, geometry: ModelGeometry, dtype: torch.dtype) -> HostMemory:
    """Return the division of the host memory. Raises MemoryLimitError if no KV cache would remain."""
    host = available_memory() // 2 if config.host_memory is None else config.host_memory
    if not (geometry.states and config.enable_prefix_caching and config.kv_cache_dtype == "auto"):
        return HostMemory(host)
    limit = host // SNAPSHOT_DIVISOR if config.snapshot_memory is None else config.snapshot_memory
    if limit >= host:
        raise MemoryLimitError(
            f"snapshot_memory={format_size(limit)} must be less than host_memory={format_size(host)}, which includes "
            "it: lower snapshot_memory"
        )
    size = slot_bytes(geometry, dtype)
    slots = min(limit // size, MAX_SNAPSHOTS)
    return HostMemory(host - slots * size, slots * size, slots)


def check_conversion(model: str | os.PathLike[str], dtype: torch.dtype, config: EngineConfig) -> None:
    """Raise MemoryLimitError if the host memory is too small to convert the weights to `dtype` before quantisation.

    Weights that are already stored in `dtype` need no memory: they are mapped from their files and quantised one by
    one. All other weights are converted at the same time.
    """
    source = find_source(model, hub_of(config))
    if source.folder is None or source.gguf is not None or config.quantize not in ("int4", "int8"):
        return
    stored = [tensor for tensor in readable_tensors(source) if _FLOATS.get(tensor.kind, dtype) != dtype]
    needed, free = sum(math.prod(tensor.shape) for tensor in stored) * dtype.itemsize, available_memory()
    if needed > free:
        own = str(_FLOATS[stored[0].kind]).removeprefix("torch.")
        raise MemoryLimitError(
            f"quantize={config.quantize!r} first converts the {own} weights of {source} to "
            f"{str(dtype).removeprefix('torch.')}, which takes {format_size(needed)} of host memory, and "
            f"{format_size(free)} are available: pass dtype={own!r}, which needs no conversion"
        )
