"""Who gives when a full pool is shared: the longest sequence of a batch gives first (DESIGN section 7)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from ..core import CHUNK
from ..pool.pool import HostPool
from ..select.base import Policy
from ..transfer.link import Link
from .sequence import Sequence


def make_room(batch: Seq[Sequence], pool: HostPool, link: Link, policy: Policy) -> None:
    """Before a step: each sequence that needs another chunk, and finds none free, gets one from the longest of the
    batch, as long as that one stays at least as long. Where nobody gives, a sequence overwrites its own slots."""
    for sequence in batch:
        if not sequence.slots.grows or sequence.position < sequence.blocks.capacity:
            continue
        if not pool.free_chunks + pool.idle_chunks:
            longest = max(batch, key=lambda other: len(other.blocks.chunks))
            if len(longest.blocks.chunks) > len(sequence.blocks.chunks) + 1:
                _give(longest, pool, link, policy)
        if pool.free_chunks + pool.idle_chunks:
            pool.reserve(sequence.blocks, sequence.position + 1)


def _give(sequence: Sequence, pool: HostPool, link: Link, policy: Policy) -> None:
    """The sequence's last chunk goes back to the pool, and of every layer the tokens that matter least; nothing happens
    where it cannot."""
    blocks = sequence.blocks
    moves = sequence.slots.give(blocks)
    if moves is None:
        return
    for layer, pairs in enumerate(moves):
        for slot, target in pairs:
            link.move(blocks, layer, slot, target)
            if layer not in policy.dense_layers:
                sequence.state.on_moved(layer, slot, target)
    link.close(blocks)  # resident rows lie elsewhere now
    pool.truncate(blocks, blocks.capacity - CHUNK)
    link.open(blocks, policy.sinks, policy.recent)
