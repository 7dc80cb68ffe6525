"""Snapshots of recurrent state. Hybrid models need them to reuse cached prefixes."""

from __future__ import annotations

from ..core import BLOCK_SIZE
from ..errors import MemoryLimitError
from ..kv_cache.pool import HostPool
from ..kv_cache.snapshot_table import needed_positions
from ..model_runner.prefill import StateCapture
from ..model_runner.sequence import Sequence
from ..models.recurrent import StateSlots


class SnapshotKeeper:
    """Takes and restores snapshots of the recurrent state of sequences.

    A sequence takes snapshots at `needed_positions` and at the position where its text starts to differ from cached
    texts. The prefix tree caches snapshots together with the blocks, for all runners that use the pool.
    """

    def __init__(self, slots: StateSlots, pool: HostPool) -> None:
        assert pool.cached.snapshots is not None and pool.states is not None
        self._slots, self._states, self._table, self._cached = slots, pool.states, pool.cached.snapshots, pool.cached

    def note_shared_tokens(self, sequence: Sequence, cached: int) -> None:
        sequence.shared_tokens = min(cached, len(sequence.tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
        sequence.trace.recomputed_tokens = max(0, sequence.shared_tokens - sequence.position)

    def restore(self, sequence: Sequence, snapshot: int | None = None) -> None:
        """Copy a snapshot to the recurrent state of a new sequence. None means the snapshot after the cached blocks."""
        if snapshot is None:
            snapshot = self.find(sequence, sequence.position)
        assert snapshot is not None
        for layer, seen in self._slots.processed.items():
            self._states.restore(snapshot, layer, *self._slots.layer_state(layer, sequence.state_slot))
            seen[sequence.state_slot] = sequence.position

    def find(self, sequence: Sequence | None, position: int) -> int | None:
        """Return the slot of the snapshot after `position` tokens, or None. `position` is a multiple of 64."""
        if sequence is None or not 0 < position <= sequence.blocks.length:
            return None
        assert position % BLOCK_SIZE == 0
        return sequence.snapshots.get(position, self._table.slot_of(sequence.blocks.ids[position // BLOCK_SIZE - 1]))

    def take(self) -> int | None:
        """Reserve a slot and page-lock its memory. Return None if no slot is available."""
        if (slot := self._table.take()) is None:
            return None
        # Lock now, not in the first `save`: an error there would fail the step, or a slot without data could be
        # published.
        try:
            self._states.lock(slot)
        except BaseException as error:
            self._table.release(slot)
            if isinstance(error, MemoryLimitError):
                return None
            raise
        return slot

    def copy(self, sequence: Sequence) -> int | None:
        """Copy the current state of a sequence to a new slot. Return None if no slot is available."""
        if (slot := self.take()) is not None:
            try:
                self._save(sequence, slot)
            except BaseException:
                self._table.release(slot)  # the caller does not learn the slot, so it cannot free it
                raise
        return slot

    def give_back(self, slot: int) -> None:
        self._table.release(slot)

    def capture(self, sequence: Sequence, stop: int) -> StateCapture | None:
        """Return an object that takes snapshots during a prefill of the tokens [position, stop).

        Return None if no snapshot is needed or no slot is available.
        """
        start, path = sequence.position, self._path(sequence)
        # left by a cancelled prefill
        for position in [position for position in sequence.snapshots if position > start]:
            self._table.release(sequence.snapshots.pop(position))
        ahead = range(start // BLOCK_SIZE * BLOCK_SIZE + BLOCK_SIZE, stop + 1, BLOCK_SIZE)
        needed = needed_positions(stop, [*self._table.positions(path), *ahead])
        wanted = [position for position in needed if position > start]
        if start < sequence.shared_tokens < stop and sequence.shared_tokens not in wanted:
            wanted.insert(1, sequence.shared_tokens)  # other texts may also differ from this token on
        self._touch(path, stop)  # before other snapshots are evicted
        for position in wanted:  # start with the end of the text, because there may be few free slots
            self._reserve_at(sequence, position)
        targets = {position: slot for position, slot in sequence.snapshots.items() if start < position <= stop}
        return StateCapture(self._slots, sequence.state_slot, self._states, targets) if targets else None

    def after_step(self, sequence: Sequence) -> None:
        """If a decode step has filled a block, take a snapshot and free the snapshots that are no longer needed."""
        position = sequence.position
        if position % BLOCK_SIZE or position != sequence.blocks.length:
            return
        known = self._table.positions(self._path(sequence))
        needed = needed_positions(position, {*known, *sequence.snapshots, position})
        for other in sequence.snapshots.keys() - needed:
            self._table.release(sequence.snapshots.pop(other))
        if self._reserve_at(sequence, position):
            self._save(sequence, sequence.snapshots[position])

    def publish(self, sequence: Sequence) -> None:
        """Keep the snapshots of a sequence with its blocks in the prefix tree."""
        path = self._path(sequence)
        for position in [position for position in sequence.snapshots if position <= sequence.blocks.length]:
            slot, block = sequence.snapshots.pop(position), path[position // BLOCK_SIZE - 1]
            if block in self._cached:
                self._table.keep(block, slot)
            else:
                self._table.release(slot)
        self._touch(path, sequence.blocks.length)

    def release(self, sequence: Sequence) -> None:
        while sequence.snapshots:
            self._table.release(sequence.snapshots.popitem()[1])

    def _path(self, sequence: Sequence) -> list[int]:
        return sequence.blocks.ids[: sequence.blocks.length // BLOCK_SIZE]

    def _touch(self, path: list[int], tokens: int) -> None:
        needed = needed_positions(tokens, self._table.positions(path))
        # mark the last one as the most recently used
        self._table.touch(path[position // BLOCK_SIZE - 1] for position in reversed(needed))

    def _save(self, sequence: Sequence, slot: int) -> None:
        for layer in self._slots.processed:
            self._states.save(slot, layer, *self._slots.layer_state(layer, sequence.state_slot))

    def _reserve_at(self, sequence: Sequence, position: int) -> bool:
        if position not in sequence.snapshots and (slot := self.take()) is not None:
            sequence.snapshots[position] = slot
        return position in sequence.snapshots
