"""Rows of a file that were used lately and often, in memory: fixed slots for any rows of any sequence.

What leaves first is what scores least: a use adds 1, and a step multiplies by `DECAY` (LRFU of Lee et al. 2001, the
rule of the working set on a device). Instead of all scores falling with a step, what a use adds rises, which orders
them alike: a look-up costs what it looks up and not what there is. When no slot is free, a sixteenth of them is given
up at once.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..disk.row_copy import address, copy_rows
from ..native_code import load_library

SOURCE = Path(__file__).with_name("row_cache.c")

DECAY = 0.9
"""Of a row's score with each step (`transfer.working_set`, where it was measured)."""

INDEX_BYTES = 4
"""For every row that there may be on disk: the slot it is in."""

SLOT_BYTES = 20
"""For every slot, besides its row: whose it is, its score and when that was, and its place among free ones."""

MOST_WEIGHT = 1e18
"""Of a use, before all scores are brought down: sums of it are far below what float32 holds, and what is brought down
to nothing was used last 400 steps ago."""

Ids = NDArray[np.int64]


class _Arrays(ctypes.Structure):
    """`struct cache` of row_cache.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("index", "owner", "score", "last", "rows")),
        *((name, ctypes.c_int64) for name in ("size", "entries")),
    ]


class RowCache:
    """`slots` slots for rows of `width` elements, of the rows 0 .. `rows` - 1. Every call takes, enters or forgets many
    rows at once, none of them twice; one thread at a time."""

    def __init__(self, slots: int, rows: int, width: int, storage: torch.dtype) -> None:
        assert slots >= 1 <= rows < 1 << 62
        self.slots = slots
        memory = mmap.mmap(-1, max(1, slots * width * storage.itemsize))
        self.rows = torch.frombuffer(memory, dtype=storage).view(slots, width)
        """`[slots, width]`; memory is taken as slots are first used."""
        self._index = np.frombuffer(mmap.mmap(-1, rows * INDEX_BYTES), np.int32)
        self._owner = np.full(slots, -1, np.int64)
        self._score, self._last = np.zeros(slots, np.float32), np.zeros(slots, np.uint32)
        self._free = np.arange(slots - 1, -1, -1, dtype=np.int32)
        self._free_count = slots
        self._now, self._weight = 0, 1.0
        arrays = (self._index, self._owner, self._score, self._last)
        pointers = [*(address(each) for each in arrays), self.rows.data_ptr()]
        self._arrays = _Arrays(*pointers, width * storage.itemsize, rows)

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
        self._now = (self._now + 1) & 0xFFFFFFFF
        self._weight *= DECAY**-steps
        if self._weight > MOST_WEIGHT:
            self._score /= np.float32(self._weight)
            self._weight = 1.0

    def take(self, ids: Ids, out: torch.Tensor, into: Ids) -> tuple[Ids, Ids]:
        """Those of the rows `ids` int64 `[n]` that are here have been used, and go to the rows `into` int64 `[n]` of
        out `[m, width]`, in one piece. Returns the others, and where they are to go."""
        assert out.is_contiguous() and out.shape[1] == self.rows.shape[1] and len(ids) == len(into)
        if not len(ids):
            return ids, into
        if (library := _library()) is None:
            slots = self._index[ids] - 1
            used = slots[slots >= 0].astype(np.int64)
            self._score[used] += np.float32(self._weight)
            self._last[used] = self._now
            copy_rows(self.rows, used * self._arrays.size, out, into[slots >= 0])
            return ids[slots < 0], into[slots < 0]
        ids, into = np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(into, np.int64)
        missing = np.empty((2, len(ids)), np.int64)
        lists = (len(ids), address(ids), address(into), address(missing))
        count = library.take(self._arrays, self._weight, self._now, *lists, out.data_ptr(), out.shape[0])
        assert count >= 0, "no such row"
        return missing[0, :count], missing[1, :count]

    def enter(self, ids: Ids, rows: torch.Tensor, at: Ids) -> None:
        """Rows `at` int64 `[n]` of rows `[m, width]`, in one piece, which were not here: as many of them, from the
        first on, as slots that were not used just now can take."""
        assert rows.is_contiguous() and rows.shape[1] == self.rows.shape[1]
        slots = self._claim(len(ids))
        if not len(slots):
            return
        ids, at = np.ascontiguousarray(ids[: len(slots)], np.int64), np.ascontiguousarray(at[: len(slots)], np.int64)
        if (library := _library()) is None:
            copy_rows(rows, at * self._arrays.size, self.rows, slots.astype(np.int64))
            self._index[ids] = slots + 1
            self._owner[slots], self._score[slots], self._last[slots] = ids, self._weight, self._now
            return
        lists = (len(slots), address(ids), address(at), address(slots))
        done = library.enter(self._arrays, self._weight, self._now, *lists, rows.data_ptr(), rows.shape[0])
        assert done == 0, "no such row"

    def forget(self, ids: range) -> None:
        """The rows `ids` are others from now on."""
        index = self._index[ids.start : ids.stop : ids.step]
        slots = index[index > 0] - 1
        if len(slots):
            self._give_up(slots)

    def _claim(self, count: int) -> NDArray[np.int32]:
        if self._free_count < count:
            self._evict(max(count - self._free_count, self.slots // 16))
        taken = self._free[max(0, self._free_count - count) : self._free_count][::-1].copy()
        self._free_count -= len(taken)
        return taken

    def _evict(self, count: int) -> None:
        """Gives up those `count` slots that score least, but none that was used just now."""
        can = (self._owner >= 0) & (self._last != self._now)
        scores = self._score[can]
        if count >= len(scores):
            self._give_up(np.flatnonzero(can))
            return
        scores.partition(count - 1)
        most = scores[count - 1]
        less = np.flatnonzero(can & (self._score < most))
        self._give_up(np.concatenate((less, np.flatnonzero(can & (self._score == most))[: count - len(less)])))

    def _give_up(self, slots: NDArray[np.integer[Any]]) -> None:
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


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(SOURCE, ("-O2", "-std=gnu11"), "rows that stay are looked up by numpy")
    if library is not None:
        types: list[Any] = [ctypes.POINTER(_Arrays), ctypes.c_float, ctypes.c_uint32]
        for code in (library.take, library.enter):
            code.restype = ctypes.c_int64
            code.argtypes = [*types, ctypes.c_int64, *[ctypes.c_void_p] * 4, ctypes.c_int64]
    return library
