"""In-memory cache for KV entries on disk, shared by all sequences.

The cache is set-associative: the id of an entry determines a set of `WAYS` slots, and only these slots are searched.
The eviction policy is LRFU (Lee et al. 2001). Each use of an entry adds 1 to its score, and each decode step multiplies
all scores by `DECAY`. When a set is full, its entry with the lowest score is evicted.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...utils import native_libraries
from .row_copy import address, copy_rows

DECAY = 0.9  # factor by which scores decrease per step; measured for `transfer.working_set`

# Number of slots per set. With 8 slots, there are 10 % more misses. With 32 slots, there are 3 % fewer misses, but each
# lookup searches twice as many slots. This was measured for Qwen 2.5 0.5B with 16,000 tokens, with attention to 5 % of
# the tokens and with 20 % of the KV in memory.
WAYS = 16

SLOT_BYTES = 16  # metadata per slot: owner, score, last use

# When the weight of one use exceeds this value, all scores are scaled down, so that their sums stay far below the
# float32 maximum. A score only becomes zero if its entry was last used 400 or more steps ago.
MOST_WEIGHT = 1e18

MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads consecutive ids evenly over the sets (Knuth, 6.4)

AT_A_TIME = 4096  # number of ids per lookup if there is no C code, to limit the temporary memory
SCANNED = 1 << 20  # number of slots that `RowCache.remove_groups` reads at once, to limit the temporary memory

Ids = NDArray[np.int64]


class _Arrays(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("owner", "score", "last", "rows")),
        *((name, ctypes.c_int64) for name in ("size", "sets", "ways")),
    ]


class RowCache:
    """A set-associative cache of rows with `width` elements. Each row is a KV entry with a non-negative id.

    `slots` is rounded down to a whole number of sets. The ids passed in one call must be distinct. Not thread-safe.
    """

    def __init__(self, slots: int, width: int, storage: torch.dtype) -> None:
        assert slots >= 1
        self._ways = min(WAYS, slots)
        self._sets = slots // self._ways
        self.slots = slots = self._sets * self._ways
        memory = mmap.mmap(-1, max(1, slots * width * storage.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Adjacent slots contain unrelated entries, so that with small pages, each access would be a TLB miss.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.rows = torch.frombuffer(memory, dtype=storage).view(slots, width)
        """Cached rows `[slots, width]`. The operating system allocates memory pages on first use."""
        self._owner = np.zeros(slots, np.int64)  # `[sets * ways]`: id + 1 of the row in each slot; 0 for an empty slot
        self._score, self._last = np.zeros(slots, np.float32), np.zeros(slots, np.uint32)
        self.used = 0
        self._now, self._weight = 0, 1.0
        pointers = [*(address(each) for each in (self._owner, self._score, self._last)), self.rows.data_ptr()]
        self._arrays = _Arrays(*pointers, width * storage.itemsize, self._sets, self._ways)

    @property
    def occupied(self) -> Ids:
        return np.flatnonzero(self._owner)

    def owners(self, slots: Ids) -> Ids:
        return self._owner[slots] - 1

    def advance(self, steps: float) -> None:
        """Let all scores decay by `steps` decode steps. One layer of a step counts as a fraction of a step."""
        self._now = (self._now + 1) & 0xFFFFFFFF
        # Instead of decreasing all scores, give later uses a larger weight. The ranking stays the same.
        self._weight *= DECAY**-steps
        if self._weight > MOST_WEIGHT:
            self._score /= np.float32(self._weight)
            self._weight = 1.0

    def lookup(self, ids: Ids, out: torch.Tensor, into: Ids) -> tuple[Ids, Ids]:
        """Copy those of the rows `ids` that are cached to `out`, and increase their scores.

        Args:
            ids: Ids of the rows, int64 `[n]`.
            out: Contiguous output `[m, width]`.
            into: Index in `out` for each row, int64 `[n]`.

        Returns:
            The `ids` and `into` of the rows that are not cached.
        """
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
        count = library.lookup(
            self._arrays, self._weight, self._now, *lists, out.data_ptr(), out.shape[0], address(missing)
        )
        assert count >= 0, "no such row"
        return missing[0, :count], missing[1, :count]

    def insert(self, ids: Ids, rows: torch.Tensor, at: Ids) -> None:
        """Insert rows that are not cached yet.

        If all slots of a row's set have been used since the last `advance`, the row is skipped.

        Args:
            ids: Ids of the rows, int64 `[n]`.
            rows: Contiguous source `[m, width]`.
            at: Index of each row in `rows`, int64 `[n]`.
        """
        assert rows.is_contiguous() and rows.shape[1] == self.rows.shape[1] and len(ids) == len(at)
        if not len(ids):
            return
        if (library := _library()) is None:
            self.used += self._insert(ids, rows, at)
            return
        ids, at = np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(at, np.int64)
        lists = (len(ids), address(ids), address(at))
        fresh = library.insert(self._arrays, self._weight, self._now, *lists, rows.data_ptr(), rows.shape[0])
        assert fresh >= 0, "no such row"
        self.used += fresh

    def remove_groups(self, groups: Sequence[int], size: int) -> None:
        """Remove all rows with an id in [g * size, (g + 1) * size), for each g in `groups`."""
        if 8 * len(groups) * size < self.slots:  # A lookup takes about as long as reading eight owners.
            for group in groups:
                self.remove(range(group * size, (group + 1) * size))
            return
        removed = np.asarray(groups)
        for first in range(0, self.slots, SCANNED):
            owners = self._owner[first : first + SCANNED]
            gone = (owners > 0) & np.isin((owners - 1) // size, removed)
            owners[gone] = 0
            self.used -= int(gone.sum())

    def remove(self, ids: range) -> None:
        if (library := _library()) is not None:
            self.used -= library.drop(self._arrays, ids.start, ids.stop, ids.step)
            return
        slots = self._find(np.arange(ids.start, ids.stop, ids.step))
        self._owner[slots[slots >= 0]] = 0
        self.used -= int((slots >= 0).sum())

    def _slots_of(self, ids: Ids) -> Ids:
        """Return the slots that may store each id, `[n, ways]`."""
        mixed = ids.astype(np.uint64) * np.uint64(MIX) >> np.uint64(32)
        sets = (mixed * np.uint64(self._sets) >> np.uint64(32)).astype(np.int64)
        return sets[:, None] * self._ways + np.arange(self._ways)

    def _find(self, ids: Ids) -> Ids:
        found = np.full(len(ids), -1)
        for first in range(0, len(ids), AT_A_TIME):
            own = slice(first, first + AT_A_TIME)
            slots = self._slots_of(ids[own])
            row, way = np.nonzero(self._owner[slots] == ids[own, None] + 1)
            found[own][row] = slots[row, way]
        return found

    def _insert(self, ids: Ids, rows: torch.Tensor, at: Ids) -> int:
        """Insert rows with numpy and torch instead of C code. Return how many empty slots were filled."""
        fresh = 0
        while len(ids):
            # Insert at most one row per set in each pass.
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
        occupied = self.occupied
        owners = self.owners(occupied)
        assert len(occupied) == self.used == len(np.unique(owners))
        assert np.array_equal(self._slots_of(owners)[:, 0], occupied // self._ways * self._ways)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = native_libraries.load("row_cache")
    if library is not None:
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        own: list[Any] = [ctypes.POINTER(_Arrays), ctypes.c_float, ctypes.c_uint32]
        library.insert.argtypes = [*own, number, pointer, pointer, pointer, number]
        library.lookup.argtypes = [*own, number, pointer, pointer, pointer, number, pointer]
        library.drop.argtypes = [own[0], number, number, number]
        for code in (library.lookup, library.insert, library.drop):
            code.restype = number
    return library
