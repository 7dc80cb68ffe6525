"""A small file arena whose KV entries are not aligned."""

from __future__ import annotations

from pathlib import Path

import torch

from offload_rt.kv_cache.disk.direct_file import DirectFile
from offload_rt.kv_cache.disk.file_arena import FileArena
from offload_rt.kv_cache.layout import ArenaLayout

LAYOUT = ArenaLayout(layers=2, kv_heads=2, head_dim=17, itemsize=4, slab_blocks=3, slabs=2)
"""Layout whose KV entry size is not a multiple of any block size, so that extents are padded to disk blocks."""

WIDTH = 2 * LAYOUT.head_dim


def arena(folder: Path, limit: int = 92_600) -> FileArena:
    """Create an arena. The default `limit`, in bytes, is enough to cache 16 KV entries and one written block."""
    made = FileArena(LAYOUT, torch.float32, DirectFile(folder), limit)
    while made.active < LAYOUT.slabs:
        made.activate()
    return made
