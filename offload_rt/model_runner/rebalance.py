"""Rebalancing a full pool between the sequences of a batch, where they evict in place: the longest shrinks first."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from ..core import CHUNK
from ..kv_cache.pool import HostPool
from ..policies.base import Policy
from ..transfer.link import KVStorage
from .sequence import Sequence


def rebalance(batch: Seq[Sequence], pool: HostPool, storage: KVStorage, policy: Policy) -> None:
    """Before a step, gives each sequence that needs another chunk, and finds none free, one of the longest sequence of
    the batch, as long as that one stays at least as long. A sequence that gets none overwrites its own slots."""
    for sequence in batch:
        if not sequence.slots.grows or sequence.position < sequence.blocks.capacity:
            continue
        if not pool.grows:
            longest = max(batch, key=lambda other: len(other.blocks.chunks))
            if len(longest.blocks.chunks) > len(sequence.blocks.chunks) + 1:
                _shrink(longest, pool, storage, policy)
        if pool.grows:
            pool.reserve(sequence.blocks, sequence.position + 1)


def _shrink(sequence: Sequence, pool: HostPool, storage: KVStorage, policy: Policy) -> None:
    """Gives the sequence's last chunk back to the pool and evicts the tokens of every layer that matter least; does
    nothing where the slot table refuses."""
    blocks = sequence.blocks
    moves = sequence.slots.shrink(blocks)
    if moves is None:
        return
    for layer, pairs in enumerate(moves):
        for slot, target in pairs:
            storage.move(blocks, layer, slot, target)
            if layer not in policy.dense_layers:
                sequence.state.on_moved(layer, slot, target)
    storage.close(blocks)  # resident rows lie elsewhere now
    pool.shrink(blocks, blocks.capacity - CHUNK)
    storage.open(blocks, policy.sinks, policy.recent)
