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
        if not sequence.slots.grows or sequence.position < sequence.lease.capacity:
            continue
        if not pool.free_chunks + pool.idle_chunks:
            longest = max(batch, key=lambda other: len(other.lease.chunks))
            if len(longest.lease.chunks) > len(sequence.lease.chunks) + 1:
                _give(longest, pool, link, policy)
        if pool.free_chunks + pool.idle_chunks:
            pool.reserve(sequence.lease, sequence.position + 1)


def _give(sequence: Sequence, pool: HostPool, link: Link, policy: Policy) -> None:
    """The sequence's last chunk goes back to the pool, and of every layer the tokens that matter least; nothing happens
    where it cannot."""
    lease = sequence.lease
    moves = sequence.slots.give(lease)
    if moves is None:
        return
    for layer, pairs in enumerate(moves):
        for slot, target in pairs:
            link.move(lease, layer, slot, target)
            if layer not in policy.dense_layers:
                sequence.state.on_moved(layer, slot, target)
    link.close(lease)  # resident rows lie elsewhere now
    pool.truncate(lease, lease.capacity - CHUNK)
    link.open(lease, policy.sinks, policy.recent)
