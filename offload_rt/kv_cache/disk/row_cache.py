"""Rows of a file that were used lately and often, in memory: slots for any rows of any sequence.

What leaves first is what scores least: a use adds 1, and a step multiplies by `DECAY` (LRFU of Lee et al. 2001, the
rule of the working set on a device). Instead of all scores falling with a step, what a use adds rises, which orders
them alike: a look-up costs what it looks up and not what there is.

A row may be in any of the `WAYS` slots of its set, which its number says: what is in memory is found by looking there,
and nothing is kept for rows that are not, of which a disk has any number. Which row leaves is decided among those.
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

from ...utils.native_code import load_library
from .row_copy import address, copy_rows

SOURCE = Path(__file__).with_name("row_cache.c")

DECAY = 0.9
"""Of a row's score with each step (`transfer.working_set`, where it was measured)."""

WAYS = 16
"""Slots of a set. With 8 a tenth more rows are missing, with 32 one in thirty fewer (Qwen 2.5 0.5B behind 16,000
tokens, 5 % attended, a fifth of the rows in memory), and twice as much is looked through."""

SLOT_BYTES = 16
"""For every slot, besides its row: whose it is, its score and when that was."""

MOST_WEIGHT = 1e18
"""Of a use, before all scores are brought down: sums of it are far below what float32 holds, and what is brought down
to nothing was used last 400 steps ago."""

MIX = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: numbers that follow each other, times this, come evenly to all sets (Knuth, 6.4)."""

AT_A_TIME = 4096
"""Rows that are looked for at once without compiled code: what that takes besides is small."""

Ids = NDArray[np.int64]


class _Arrays(ctypes.Structure):
    """`struct cache` of row_cache.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("owner", "score", "last", "rows")),
        *((name, ctypes.c_int64) for name in ("size", "sets", "ways")),
    ]


class RowCache:
    """At most `slots` slots, whole sets, for rows of `width` elements with any numbers from 0 on. Every call takes,
    enters or forgets many rows at once, none of them twice; one thread at a time."""

    def __init__(self, slots: int, width: int, storage: torch.dtype) -> None:
        assert slots >= 1
        self._ways = min(WAYS, slots)
        self._sets = slots // self._ways
        self.slots = slots = self._sets * self._ways
        memory = mmap.mmap(-1, max(1, slots * width * storage.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # neighbours in it are anybody's: with small pages each is a miss of its own
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.rows = torch.frombuffer(memory, dtype=storage).view(slots, width)
        """`[slots, width]`; memory is taken as slots are first used, which is soon anywhere."""
        self._owner = np.zeros(slots, np.int64)
        """Of a slot, `[sets * ways]` as all of these: its row, and 1; 0."""
        self._score, self._last = np.zeros(slots, np.float32), np.zeros(slots, np.uint32)
        self.used = 0
        """How many slots have rows."""
        self._now, self._weight = 0, 1.0
        pointers = [*(address(each) for each in (self._owner, self._score, self._last)), self.rows.data_ptr()]
        self._arrays = _Arrays(*pointers, width * storage.itemsize, self._sets, self._ways)

    @property
    def held(self) -> Ids:
        """The slots that have rows, rising."""
        return np.flatnonzero(self._owner)

    def owners(self, slots: Ids) -> Ids:
        """Which rows these slots have."""
        return self._owner[slots] - 1

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
            slots = self._find(ids)
            used = slots[slots >= 0]
            self._score[used] += np.float32(self._weight)
            self._last[used] = self._now
            copy_rows(self.rows, used * self._arrays.size, out, into[slots >= 0])
            return ids[slots < 0], into[slots < 0]
        ids, into = np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(into, np.int64)
        missing = np.empty((2, len(ids)), np.int64)
        lists = (len(ids), address(ids), address(into))
        count = library.take(
            self._arrays, self._weight, self._now, *lists, out.data_ptr(), out.shape[0], address(missing)
        )
        assert count >= 0, "no such row"
        return missing[0, :count], missing[1, :count]

    def enter(self, ids: Ids, rows: torch.Tensor, at: Ids) -> None:
        """Rows `at` int64 `[n]` of rows `[m, width]`, in one piece, which were not here: those that find a slot in
        their set that was not used just now."""
        assert rows.is_contiguous() and rows.shape[1] == self.rows.shape[1] and len(ids) == len(at)
        if not len(ids):
            return
        if (library := _library()) is None:
            self.used += self._enter(ids, rows, at)
            return
        ids, at = np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(at, np.int64)
        lists = (len(ids), address(ids), address(at))
        fresh = library.enter(self._arrays, self._weight, self._now, *lists, rows.data_ptr(), rows.shape[0])
        assert fresh >= 0, "no such row"
        self.used += fresh

    def forget(self, ids: range) -> None:
        """The rows `ids` are others from now on."""
        if (library := _library()) is not None:
            self.used -= library.forget(self._arrays, ids.start, ids.stop, ids.step)
            return
        slots = self._find(np.arange(ids.start, ids.stop, ids.step))
        self._owner[slots[slots >= 0]] = 0
        self.used -= int((slots >= 0).sum())

    def _slots_of(self, ids: Ids) -> Ids:
        """`[n, ways]`: the slots that rows may be in."""
        mixed = ids.astype(np.uint64) * np.uint64(MIX) >> np.uint64(32)
        sets = (mixed * np.uint64(self._sets) >> np.uint64(32)).astype(np.int64)
        return sets[:, None] * self._ways + np.arange(self._ways)

    def _find(self, ids: Ids) -> Ids:
        """The slots of rows, -1 for those that are not here."""
        found = np.full(len(ids), -1)
        for first in range(0, len(ids), AT_A_TIME):
            own = slice(first, first + AT_A_TIME)
            slots = self._slots_of(ids[own])
            row, way = np.nonzero(self._owner[slots] == ids[own, None] + 1)
            found[own][row] = slots[row, way]
        return found

    def _enter(self, ids: Ids, rows: torch.Tensor, at: Ids) -> int:
        """`enter` without compiled code: of each set one row at a time. Returns how many slots were free."""
        fresh = 0
        while len(ids):
            _, turn = np.unique(self._slots_of(ids)[:, 0], return_index=True)
            slots = self._slots_of(ids[turn])
            scores = np.where(self._last[slots] == self._now, np.inf, self._score[slots])
            scores[self._owner[slots] == 0] = -1
            way = scores.argmin(1)
            can = np.isfinite(scores[np.arange(len(turn)), way])
            taken, own = slots[can, way[can]], turn[can]
            fresh += int((self._owner[taken] == 0).sum())
            copy_rows(rows, at[own] * self._arrays.size, self.rows, taken)
            self._owner[taken], self._score[taken], self._last[taken] = ids[own] + 1, self._weight, self._now
            ids, at = np.delete(ids, turn), np.delete(at, turn)
        return fresh

    def check_integrity(self) -> None:
        """Asserts that every row is in its set, and once."""
        held = self.held
        owners = self.owners(held)
        assert len(held) == self.used == len(np.unique(owners))
        assert np.array_equal(self._slots_of(owners)[:, 0], held // self._ways * self._ways)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(SOURCE, ("-O3", "-std=gnu11"), "rows that stay are looked up by numpy")
    if library is not None:
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        own: list[Any] = [ctypes.POINTER(_Arrays), ctypes.c_float, ctypes.c_uint32]
        library.enter.argtypes = [*own, number, pointer, pointer, pointer, number]
        library.take.argtypes = [*own, number, pointer, pointer, pointer, number, pointer]
        library.forget.argtypes = [own[0], number, number, number]
        for code in (library.take, library.enter, library.forget):
            code.restype = number
    return library
