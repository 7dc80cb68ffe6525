"""Slots in device memory for blocks of open sequences."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from heapq import heappop, heappush

from ..core import BLOCK_SIZE


class DeviceBlocks:
    """Assigns slots in device memory to pool blocks (`DeviceCopies`). Sequences are identified by integers.

    When an open sequence starts to use a block, the block gets a slot if one is free. It loses the slot when the pool
    frees the block. Complete copies that no open sequence uses any more stay until their slots are needed: the least
    recently used sequence loses its copies first, from its last block to its first. Blocks of open sequences are not
    evicted, because each step reads all of them. Blocks that did not get a slot are read from host memory.

    Every write to the pool also goes to the copy, so the copy of a new block is complete from the start. The copy of an
    older block is incomplete until `loaded` has been called for each layer.

    Not thread-safe. Callers must hold the pool's lock.
    """

    def __init__(self, slots: int, layers: Collection[int]) -> None:
        self.slots, self._layers = slots, frozenset(layers)
        self._free = list(range(slots))
        self._slot: dict[int, int] = {}
        self._unused: dict[int, None] = {}  # blocks with a slot and without users, least recently used first
        self._missing: dict[int, set[int]] = {}  # for each block with an incomplete copy, the layers that are missing
        self._users: dict[int, set[int]] = {}
        self._tables: dict[int, list[int]] = {}
        self._versions: dict[int, int] = {}
        self._numbers = itertools.count()
        self._outdated: set[int] = set()  # sequences whose tables contain a block that the pool has freed

    def update(self, sequence: int, ids: Sequence[int], length: int) -> bool:
        """Set the blocks of a sequence to `ids`. The KV of its first `length` tokens must be in the pool.

        Return whether any block got a slot. Another block may have used the slot before.
        """
        known = self._tables.get(sequence)
        if known == ids and sequence not in self._outdated:
            return False
        kept = set(ids)
        for block in reversed(known or []):
            if block not in kept:
                self._release(block, sequence)
        for block in ids:  # before slots are assigned, so that the sequence's own copies are not evicted
            self._unused.pop(block, None)
        assigned = False
        for index, block in enumerate(ids):
            users = self._users.setdefault(block, set())
            if sequence not in users:
                new = not users and index * BLOCK_SIZE >= length
                users.add(sequence)
                assigned |= self._assign(block, new)
        self._tables[sequence] = list(ids)
        self._outdated.discard(sequence)
        self._versions[sequence] = next(self._numbers)
        return assigned

    def close(self, sequence: int) -> None:
        for block in reversed(self._tables.pop(sequence, [])):
            self._release(block, sequence)
        self._versions.pop(sequence, None)
        self._outdated.discard(sequence)

    def freed(self, blocks: Sequence[int]) -> None:
        """Remove the given blocks, which the pool has freed and may assign to other sequences."""
        for block in blocks:
            self._outdated.update(self._users.get(block, ()))
            self._forget(block)

    def slot(self, block: int) -> int:
        """Return the slot to which new KV of a block is written, or -1 if the block has no slot."""
        return self._slot.get(block, -1)

    def readable_slot(self, block: int, layer: int) -> int:
        """Return the slot of a block, or -1 if the block has no copy or its copy lacks `layer`."""
        return -1 if layer in self._missing.get(block, ()) else self.slot(block)

    def complete_slots(self, sequence: int) -> list[int]:
        """Return the slot of each block of a sequence, or -1 for blocks that have no complete copy."""
        return [-1 if block in self._missing else self.slot(block) for block in self._tables[sequence]]

    def version(self, sequence: int) -> int:
        """Return a number that changes whenever the sequence's `complete_slots` change. Numbers are never reused."""
        return self._versions[sequence]

    def missing_slot(self, block: int, layer: int) -> int:
        """Return the slot of a block if `layer` must still be loaded into it, and -1 otherwise."""
        return self.slot(block) if layer in self._missing.get(block, ()) else -1

    def incomplete(self, sequence: int) -> bool:
        return bool(self._missing) and any(block in self._missing for block in self._tables[sequence])

    def loaded(self, block: int, layer: int) -> None:
        missing = self._missing[block]
        missing.remove(layer)
        if not missing:
            del self._missing[block]
            self._changed(block)

    def check_integrity(self) -> None:
        assert sorted([*self._free, *self._slot.values()]) == list(range(self.slots))
        assert self._missing.keys() <= self._slot.keys() & self._users.keys()
        assert self._unused.keys() == self._slot.keys() - self._users.keys()
        assert all(self._missing.values()) and all(self._users.values())
        assert self._tables.keys() == self._versions.keys() >= self._outdated
        for sequence, ids in self._tables.items():
            unknown = [block for block in ids if sequence not in self._users.get(block, ())]
            assert not unknown or sequence in self._outdated
        for block, users in self._users.items():
            assert all(block in self._tables[sequence] for sequence in users)

    def _assign(self, block: int, new: bool) -> bool:
        if block in self._slot:
            return False
        if not self._free:
            if not self._unused:
                return False
            self._forget(next(iter(self._unused)))
        self._slot[block] = heappop(self._free)  # the lowest free slot, so that adjacent blocks are copied together
        if new:
            self._changed(block)
        else:
            self._missing[block] = set(self._layers)
        return True

    def _release(self, block: int, sequence: int) -> None:
        users = self._users.get(block, set())
        users.discard(sequence)
        if users:
            return
        if block in self._missing:
            self._forget(block)
            return
        self._users.pop(block, None)
        if block in self._slot:
            self._unused[block] = None

    def _forget(self, block: int) -> None:
        self._changed(block)
        self._users.pop(block, None)
        self._missing.pop(block, None)
        self._unused.pop(block, None)
        if (slot := self._slot.pop(block, None)) is not None:
            heappush(self._free, slot)

    def _changed(self, block: int) -> None:
        for sequence in self._users.get(block, ()):
            self._versions[sequence] = next(self._numbers)
