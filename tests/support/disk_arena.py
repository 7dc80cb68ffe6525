"""A small arena in a file, whose rows are no whole number of anything."""

from __future__ import annotations

from pathlib import Path

import torch

from offload_rt.kv_cache.disk.direct_file import DirectFile
from offload_rt.kv_cache.disk.file_arena import FileArena
from offload_rt.kv_cache.layout import ArenaLayout

LAYOUT = ArenaLayout(layers=2, kv_heads=2, head_dim=17, itemsize=4, slab_chunks=3, slabs=2)
"""Rows that are no whole number of anything, and pieces that are padded to blocks."""

WIDTH = 2 * LAYOUT.head_dim


def arena(folder: Path, limit: int = 100_800) -> FileArena:
    """With all slabs ready; the limit is room for 16 rows that stay, and one chunk that is filled."""
    made = FileArena(LAYOUT, torch.float32, DirectFile(folder), limit)
    while made.active < LAYOUT.slabs:
        made.activate()
    return made
