"""Small pools, and KV whose values identify their sequence, layer, head, token and dimension."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload_rt.core import BLOCK_SIZE, BlockTable, KVPart, ModelGeometry
from offload_rt.kv_cache.pool import HostPool


def geometry(layers: int = 2, kv_heads: int = 2, head_dim: int = 4) -> ModelGeometry:
    return ModelGeometry(
        layers=layers,
        hidden=16,
        heads=2 * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=10,
        scales=(1.0,) * layers,
        windows=(None,) * layers,
        max_positions=1 << 20,
        absolute_positions=False,
        default_alpha=5.0,
    )


BLOCK_BYTES = geometry().kv_bytes(BLOCK_SIZE, torch.float32)


def make_pool(blocks: int, slab_blocks: int = 4) -> HostPool:
    return HostPool(geometry(), torch.float32, blocks * BLOCK_BYTES, slab_tokens=slab_blocks * BLOCK_SIZE)


def peak_of(pool: HostPool) -> Callable[[], int]:
    """Record the largest `bytes_used` of the pool from now on. Return a function that returns it."""
    allocator, peak = pool._memory.allocator, pool.bytes_used
    take_run = allocator._take_run

    def record(start: int, count: int) -> list[int]:
        nonlocal peak
        taken = take_run(start, count)
        peak = max(peak, pool.bytes_used)
        return taken

    allocator._take_run = record  # type: ignore[method-assign]
    return lambda: peak


def kv(tokens: range, layer: int, sequence: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V `[Hkv, n, d]` that are distinct for every (sequence, layer, head, token, dimension)."""
    k = torch.arange(8, dtype=torch.float32).view(2, 1, 4) / 8
    k = k + torch.arange(tokens.start, tokens.stop).view(1, -1, 1) + 10_000 * layer + 100_000 * sequence
    return k, -k - 0.5


def append(pool: HostPool, blocks: BlockTable, count: int, sequence: int = 0) -> None:
    tokens = range(blocks.length, blocks.length + count)
    pool.reserve(blocks, tokens.stop)
    for layer in range(2):
        pool.write(blocks, layer, tokens.start, *kv(tokens, layer, sequence))
    pool.commit(blocks, tokens.stop)


def read(parts: list[KVPart]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([part.k for part in parts], 1), torch.cat([part.v for part in parts], 1)
