"""Recurrent state of a session or a stored prompt (hybrid models), in host memory and on disk."""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq

from ..core import BLOCK_SIZE
from ..engine.snapshot_keeper import SnapshotKeeper
from ..kv_cache.snapshot_table import needed_places
from ..model_runner.sequence import Sequence
from ..storage.block_store import NamedBlock
from .context import SessionContext

DISK_SLACK = 1024
"""Tokens that may be computed again after a restart, in addition to twice the length of an edit.

Fewer would need more snapshots, each of which takes as much space as hundreds of tokens.
"""


class SessionStates:
    """The snapshots of one session. Decides which snapshots are stored on disk, and from which one a turn continues."""

    def __init__(self, context: SessionContext, snapshots: SnapshotKeeper) -> None:
        assert context.states is not None
        self._context, self._blocks, self._snapshots = context, context.states, snapshots

    def needed(self, names: Seq[NamedBlock], sequence: Sequence | None, start: int) -> list[NamedBlock]:
        """Return the names of the snapshots that the session must have on disk to continue after a restart.

        A snapshot is the state of the recurrent layers after a block. Snapshots that exist neither in host memory nor
        on disk are left out.

        Args:
            names: Names of the blocks of all computed tokens.
            sequence: The sequence with these blocks, or None.
            start: Number of tokens before the last turn. The last snapshot up to this position is returned too, because
                the turn may be repeated.
        """
        states = {(name.index + 1) * BLOCK_SIZE: name.state() for name in names if name.count == BLOCK_SIZE}
        known = [
            place
            for place, name in states.items()
            if self._snapshots.find(sequence, place) is not None or name.key in self._context.storage
        ]
        needed = needed_places(sum(name.count for name in names), known, DISK_SLACK)
        again = max((place for place in known if place <= start), default=None)
        if again is not None and again not in needed:
            needed.insert(1, again)
        return [states[place] for place in needed]

    def save(self, sequence: Sequence, names: Seq[NamedBlock], *, claim: bool) -> list[NamedBlock]:
        """Queue snapshots in host memory for writing. Return the names of the snapshots that were queued.

        For `claim`, see `Saver.begin`.
        """
        slots = [self._snapshots.find(sequence, (name.index + 1) * BLOCK_SIZE) for name in names]
        each = zip(names, slots, strict=True)
        tokens = sequence.position
        return [name for name, slot in each if slot is not None and self._blocks.save(name, slot, tokens, claim=claim)]

    def last(self, names: Seq[NamedBlock], start: int, stop: int, damaged: Container[bytes]) -> int:
        """Return the number of tokens before the last snapshot on disk, if it is between `start` and `stop`.

        Return `start` if there is none.

        Args:
            names: Names of the blocks of the first tokens.
            start: Number of tokens before a snapshot in host memory.
            stop: Maximum number of tokens.
            damaged: Keys of damaged blocks.
        """
        for name in reversed(names[start // BLOCK_SIZE : stop // BLOCK_SIZE]):
            key = name.state().key
            if key in self._context.storage and key not in damaged:
                return (name.index + 1) * BLOCK_SIZE
        return start

    def take(self) -> int | None:
        """Reserve a slot for `load` and return it. Return None if all slots are in use."""
        return self._snapshots.take()

    def load(self, name: NamedBlock, slot: int) -> bool:
        """Read a snapshot from disk into `slot`. If the snapshot is damaged, free the slot and return False."""
        if loaded := self._blocks.load(name, slot):
            return loaded
        self.release(slot)
        return False

    def release(self, slot: int) -> None:
        """Free a slot that `take` returned."""
        self._snapshots.give_back(slot)
