"""Rows of a file that were used lately and often, in memory: fixed slots for any rows of any sequence.

What leaves first is what scores least: a use adds 1, and a step multiplies by `DECAY` (LRFU of Lee et al. 2001, the
rule of the working set on a device). Scores are brought up to date when they are used or compared, so that a look-up
costs what it looks up and not what there is; when no slot is free, a sixteenth of them is given up at once.
"""

from __future__ import annotations

import mmap

import numpy as np
import torch
from numpy.typing import NDArray

from ..disk.row_copy import copy_rows

DECAY = 0.9
"""Of a row's score with each step (`transfer.working_set`, where it was measured)."""

INDEX_BYTES = 4
"""For every row that there may be on disk: the slot it is in."""

SLOT_BYTES = 16
"""For every slot, besides its row: whose it is, its score and when that was."""

Ids = NDArray[np.int64]


class RowCache:
    """`slots` slots for rows of `width` elements, of the rows 0 .. `rows` - 1. Every call looks up, enters or forgets
    many rows at once, none of them twice; one thread at a time."""

    def __init__(self, slots: int, rows: int, width: int, storage: torch.dtype) -> None:
        assert slots >= 1 <= rows < 1 << 62
        self.slots = slots
        memory = mmap.mmap(-1, max(1, slots * width * storage.itemsize))
        self.rows = torch.frombuffer(memory, dtype=storage).view(slots, width)
        """`[slots, width]`; memory is taken as slots are first used."""
        self._index = np.frombuffer(mmap.mmap(-1, rows * INDEX_BYTES), np.int32)
        self._owner = np.full(slots, -1, np.int64)
        self._score, self._last = np.zeros(slots, np.float32), np.zeros(slots, np.float32)
        self._free = np.arange(slots - 1, -1, -1, dtype=np.int32)
        self._free_count = slots
        self._now = 0.0

    @property
    def used(self) -> int:
        """How many slots have rows."""
        return self.slots - self._free_count

    @property
    def held(self) -> Ids:
        """The slots that have rows, rising."""
        return np.flatnonzero(self._owner >= 0)

    def owners(self, slots: Ids) -> Ids:
        """Which rows these slots have."""
        return self._owner[slots]

    def pass_time(self, steps: float) -> None:
        """So many steps have gone by."""
        self._now += steps

    def look_up(self, ids: Ids) -> NDArray[np.int32]:
        """The slots of rows int64 `[n]`, negative where a row is not here; those that are here have been used."""
        slots: NDArray[np.int32] = self._index[ids] - 1
        used = slots[slots >= 0]
        self._score[used] = self._faded(used) + 1
        self._last[used] = self._now
        return slots

    def enter(self, ids: Ids, rows: torch.Tensor, at: Ids) -> None:
        """Rows `at` int64 `[n]` of rows `[m, width]`, which were not here: as many of them, from the first on, as slots
        that were not used just now can take."""
        slots = self._take(len(ids))
        ids = ids[: len(slots)]
        copy_rows(rows, at[: len(slots)] * rows.shape[1] * rows.itemsize, self.rows, slots.astype(np.int64))
        self._index[ids] = slots + 1
        self._owner[slots], self._score[slots], self._last[slots] = ids, 1, self._now

    def forget(self, ids: range) -> None:
        """The rows `ids` are others from now on."""
        index = self._index[ids.start : ids.stop : ids.step]
        slots = index[index > 0] - 1
        if len(slots):
            self._give_up(slots)

    def _faded(self, slots: NDArray[np.int32]) -> NDArray[np.float32]:
        faded: NDArray[np.float32] = self._score[slots] * DECAY ** (self._now - self._last[slots])
        return faded

    def _take(self, count: int) -> NDArray[np.int32]:
        if self._free_count < count:
            self._evict(max(count - self._free_count, self.slots // 16))
        taken = self._free[max(0, self._free_count - count) : self._free_count][::-1].copy()
        self._free_count -= len(taken)
        return taken

    def _evict(self, count: int) -> None:
        """Gives up those `count` slots that score least, but none that was used just now."""
        held = np.flatnonzero((self._owner >= 0) & (self._last < self._now)).astype(np.int32)
        if count < len(held):
            held = held[np.argpartition(self._faded(held), count)[:count]]
        self._give_up(held)

    def _give_up(self, slots: NDArray[np.int32]) -> None:
        self._index[self._owner[slots]] = 0
        self._owner[slots] = -1
        self._free[self._free_count : self._free_count + len(slots)] = slots
        self._free_count += len(slots)

    def check_integrity(self) -> None:
        """Asserts that slots and index agree, and that every slot is either free or somebody's."""
        held = self.held
        assert np.array_equal(self._index[self._owner[held]] - 1, held)
        free = np.sort(self._free[: self._free_count])
        assert np.array_equal(np.union1d(free, held), np.arange(self.slots)) and len(free) + len(held) == self.slots
