"""Redistribution of blocks between sequences that evict tokens in a full pool: the longest sequence shrinks."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from ..core import BLOCK_SIZE
from ..kv_cache.pool import HostPool
from ..policies.base import Policy
from ..transfer.base import KVStorage
from .sequence import Sequence


def rebalance(batch: Seq[Sequence], pool: HostPool, storage: KVStorage, policy: Policy) -> None:
    """Move blocks from the longest sequence of the batch to sequences that need one, if the pool has no free block.

    A sequence is only shrunk while it is at least as long as all others. A sequence that gets no block overwrites its
    own tokens.
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
    """Evict the least important tokens of a sequence and free its last block, if possible."""
    blocks = sequence.blocks
    moves = sequence.slots.shrink(blocks)
    if moves is None:
        return
    for layer, pairs in enumerate(moves):
        for slot, target in pairs:
            storage.move(blocks, layer, slot, target)
            if layer not in policy.dense_layers:
                sequence.state.on_moved(layer, slot, target)
    storage.close(blocks)  # resident KV entries have moved to other slots
    pool.shrink(blocks, blocks.capacity - BLOCK_SIZE)
    storage.open(blocks, policy.sinks, policy.recent)
