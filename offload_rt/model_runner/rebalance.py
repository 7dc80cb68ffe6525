"""Rebalance a full pool between sequences that evict in place: the longest one shrinks first."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from ..core import BLOCK_SIZE
from ..kv_cache.pool import HostPool
from ..policies.base import Policy
from ..transfer.base import KVStorage
from .sequence import Sequence


def rebalance(batch: Seq[Sequence], pool: HostPool, storage: KVStorage, policy: Policy) -> None:
    """Move blocks from the longest sequence of the batch to sequences that need a block when no block is free.

    The longest sequence stays at least as long as the others. A sequence that gets no block overwrites its own tokens.
    """
    for sequence in batch:
        if not sequence.slots.grows or sequence.position < sequence.blocks.capacity:
            continue
        if not pool.grows:
            longest = max(batch, key=lambda other: len(other.blocks.ids))
            if len(longest.blocks.ids) > len(sequence.blocks.ids) + 1:
                _shrink(longest, pool, storage, policy)
        if pool.grows:
            pool.reserve(sequence.blocks, sequence.position + 1)


def _shrink(sequence: Sequence, pool: HostPool, storage: KVStorage, policy: Policy) -> None:
    """Free the last block of a sequence and evict its least important tokens, if that is possible."""
    blocks = sequence.blocks
    moves = sequence.slots.shrink(blocks)
    if moves is None:
        return
    for layer, pairs in enumerate(moves):
        for slot, target in pairs:
            storage.move(blocks, layer, slot, target)
            if layer not in policy.dense_layers:
                sequence.state.on_moved(layer, slot, target)
    storage.close(blocks)  # resident KV has moved to other slots
    pool.shrink(blocks, blocks.capacity - BLOCK_SIZE)
    storage.open(blocks, policy.sinks, policy.recent)
