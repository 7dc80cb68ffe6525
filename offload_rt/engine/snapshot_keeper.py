"""Take snapshots of recurrent state, publish them with their blocks, and restore them."""

from __future__ import annotations

from ..core import BLOCK_SIZE
from ..kv_cache.pool import HostPool
from ..kv_cache.snapshot_table import needed_places
from ..model_runner.sequence import Sequence
from ..model_runner.state_capture import StateCapture
from ..models.recurrent import StateSlots


class SnapshotKeeper:
    """Snapshots of the sequences of one runner. They are shared with all runners of the pool.

    A sequence takes snapshots where `needed_places` puts them, and where its text parts from an earlier one, because
    other texts may part there too. They are published with the blocks before them.

    Args:
        slots: Recurrent state of the runner's sequences on the device.
        pool: The pool with the prefix cache and the memory of the snapshots.
    """

    def __init__(self, slots: StateSlots, pool: HostPool) -> None:
        assert pool.cached.snapshots is not None and pool.states is not None
        self._slots, self._states, self._table, self._cached = slots, pool.states, pool.cached.snapshots, pool.cached

    def note_parting(self, sequence: Sequence, cached: int) -> None:
        """Record that the KV of the first `cached` tokens was in the prefix cache when the sequence began."""
        sequence.parted_at = min(cached, len(sequence.tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
        sequence.trace.recomputed_tokens = max(0, sequence.parted_at - sequence.position)

    def restore(self, sequence: Sequence, snapshot: int | None = None) -> None:
        """Copy a snapshot to the slot of a new sequence on the device.

        None means the snapshot at the end of its cached blocks.
        """
        if snapshot is None:
            snapshot = self.find(sequence, sequence.position)
        assert snapshot is not None
        for layer, seen in self._slots.seen.items():
            self._states.restore(snapshot, layer, *self._slots.of_layer(layer, sequence.state_slot))
            seen[sequence.state_slot] = sequence.position

    def find(self, sequence: Sequence | None, place: int) -> int | None:
        """Return the slot of the snapshot behind the first `place` tokens of a sequence, a multiple of 64, or None."""
        if sequence is None or not 0 < place <= sequence.blocks.length:
            return None
        assert place % BLOCK_SIZE == 0
        return sequence.snapshots.get(place, self._table.of(sequence.blocks.ids[place // BLOCK_SIZE - 1]))

    def take(self) -> int | None:
        """Return a slot for a snapshot that is read from disk, or None if all slots are in use."""
        return self._table.take()

    def copy(self, sequence: Sequence) -> int | None:
        """Return a slot with the current state of a sequence, or None if all slots are in use."""
        if (slot := self._table.take()) is not None:
            self._save(sequence, slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Free a slot that `take` or `copy` returned."""
        self._table.release(slot)

    def capture(self, sequence: Sequence, stop: int) -> StateCapture | None:
        """Reserve snapshots for a prefill of tokens [position, stop). Return what takes them, or None.

        If there are few slots, the end of the text comes first.
        """
        start, path = sequence.position, self._path(sequence)
        for place in [place for place in sequence.snapshots if place > start]:  # of a prefill that was given up
            self._table.release(sequence.snapshots.pop(place))
        ahead = range(start // BLOCK_SIZE * BLOCK_SIZE + BLOCK_SIZE, stop + 1, BLOCK_SIZE)
        wanted = [place for place in needed_places(stop, [*self._table.places(path), *ahead]) if place > start]
        if start < sequence.parted_at < stop and sequence.parted_at not in wanted:
            wanted.insert(1, sequence.parted_at)
        self._touch(path, stop)  # before others are evicted
        for place in wanted:
            self._take(sequence, place)
        targets = {place: slot for place, slot in sequence.snapshots.items() if start < place <= stop}
        return StateCapture(self._slots, sequence.state_slot, self._states, targets) if targets else None

    def after_step(self, sequence: Sequence) -> None:
        """Take a snapshot after a decode step that filled a block. Free those that are no longer needed."""
        place = sequence.position
        if place % BLOCK_SIZE or place != sequence.blocks.length:
            return
        needed = needed_places(place, {*self._table.places(self._path(sequence)), *sequence.snapshots, place})
        for other in sequence.snapshots.keys() - needed:
            self._table.release(sequence.snapshots.pop(other))
        if self._take(sequence, place):
            self._save(sequence, sequence.snapshots[place])

    def publish(self, sequence: Sequence) -> None:
        """Keep the snapshots that belong to the published blocks of a sequence."""
        path = self._path(sequence)
        for place in [place for place in sequence.snapshots if place <= sequence.blocks.length]:
            slot, block = sequence.snapshots.pop(place), path[place // BLOCK_SIZE - 1]
            if block in self._cached:
                self._table.keep(block, slot)
            else:
                self._table.release(slot)
        self._touch(path, sequence.blocks.length)

    def release(self, sequence: Sequence) -> None:
        """Free the snapshots of a sequence that were not published."""
        while sequence.snapshots:
            self._table.release(sequence.snapshots.popitem()[1])

    def _path(self, sequence: Sequence) -> list[int]:
        return sequence.blocks.ids[: sequence.blocks.length // BLOCK_SIZE]

    def _touch(self, path: list[int], tokens: int) -> None:
        """Mark the snapshots that a text of `tokens` tokens needs as used, its last one most recently."""
        needed = needed_places(tokens, self._table.places(path))
        self._table.touch(path[place // BLOCK_SIZE - 1] for place in reversed(needed))

    def _save(self, sequence: Sequence, slot: int) -> None:
        for layer in self._slots.seen:
            self._states.save(slot, layer, *self._slots.of_layer(layer, sequence.state_slot))

    def _take(self, sequence: Sequence, place: int) -> bool:
        """Reserve a snapshot. Return False if all slots are pending."""
        if place not in sequence.snapshots and (slot := self._table.take()) is not None:
            sequence.snapshots[place] = slot
        return place in sequence.snapshots
