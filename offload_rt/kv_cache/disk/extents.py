"""Extents: the location of the KV of each block on disk.

Every block has an extent in the pool's own file. A file of a session store can replace it, so that KV of a session is
written once and read in place. In both, one layer of a block is `[Hkv, 64, 2 (K, V), width]`, padded to whole disk
blocks (`file_layout.py`).
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch

from .direct_file import BlockFile, DirectFile
from .file_layout import FileLayout
from .requests import Offsets, place

SPARE_FILES = 512  # open files left to the rest of the process


def ignore(layer: int, block: memoryview) -> None:
    """Default for `StoredExtent.written`."""


@dataclass(eq=False)
class StoredExtent:
    """A file of a store that holds the KV of one block. Each layer is written once, as a whole.

    Attributes:
        file: The open file.
        offset: Byte where the first layer begins.
        layer_bytes: Bytes per layer (`FileLayout.layer`).
        written: Called after each layer was written, with its index and bytes, on the writer thread.
    """

    file: BlockFile
    offset: int
    layer_bytes: int
    written: Callable[[int, memoryview], None] = ignore

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Write the data of one layer at `offset`. Raise OSError."""
        self.file.write(offset, data)
        self.written((offset - self.offset) // self.layer_bytes, data.numpy().data)


@dataclass(eq=False)
class _Entry:
    """A stored extent, its file number (`FileTable`), and the indices of the layers that it holds or will hold."""

    extent: StoredExtent
    number: int
    places: set[int] = field(default_factory=set)


class Extents:
    """Maps each block to its extent, and KV entries to positions in open files.

    All calls need the arena's lock. Reads must happen inside `with extents:`. If a block leaves its stored extent, the
    file stays open until all reads that started before have ended. These reads use its file number, and a new file
    could get the same number. Pending writes (`WriteBehind`) also keep the file open. Open files count against the
    process limit, which is raised to its maximum. At the limit, further blocks keep the extent in the pool's file.
    """

    def __init__(self, file: DirectFile, layout: FileLayout) -> None:
        self._file, self._layout = file, layout
        self._stored: dict[int, _Entry] = {}
        # Position of layer 0 of each block (`requests.place`), and the distance from one layer to the next.
        self._base = layout.base(np.arange(layout.arena.blocks, dtype=np.int64))
        self._step = np.full(layout.arena.blocks, layout.step, np.int64)
        self._left: list[_Entry] = []
        self._reading = 0
        self._mutex = threading.Lock()
        self._most: int | None = None

    def __contains__(self, block: int) -> bool:
        return block in self._stored

    def __len__(self) -> int:
        return len(self._stored)

    def get(self, block: int) -> StoredExtent | None:
        entry = self._stored.get(block)
        return None if entry is None else entry.extent

    def room(self) -> bool:
        """Return whether one more file can be opened."""
        if self._most is None:
            self._most = most_files() - SPARE_FILES
        return len(self._stored) + len(self._left) < self._most

    def enter(self, block: int, extent: StoredExtent, places: Sequence[int] = ()) -> None:
        """Move a block without KV to a stored extent, which already holds the layers at `places`."""
        assert block not in self._stored and extent.layer_bytes == self._layout.layer
        with self._mutex:
            number = self._file.files.add(extent.file.handle, direct=extent.file.direct)
        self._stored[block] = _Entry(extent, number, set(places))
        self._base[block], self._step[block] = place(number, extent.offset), extent.layer_bytes

    def leave(self, block: int) -> None:
        """Move a block back to the pool's file, without its KV."""
        if (entry := self._stored.pop(block, None)) is not None:
            self._base[block], self._step[block] = self._layout.base(block), self._layout.step
            with self._mutex:
                self._left.append(entry)
            self._forget_left()

    def takes(self, block: int, place: int) -> bool:
        """Return whether the layer at `place` may be written: once in a stored extent, always in the pool's file."""
        return (entry := self._stored.get(block)) is None or place not in entry.places

    def target(self, block: int, place: int) -> tuple[StoredExtent | DirectFile, int]:
        """Return the file and offset for writing the layer at `place`, and record the write."""
        if (entry := self._stored.get(block)) is None:
            return self._file, int(self.layers(block, place))
        assert place not in entry.places
        entry.places.add(place)
        return entry.extent, entry.extent.offset + place * entry.extent.layer_bytes

    def layers(self, blocks: Offsets | int, place: Offsets | int) -> Offsets:
        """Return where the layer at `place` of each block begins, as file number and byte offset (`requests.place`).

        The arguments are broadcast.
        """
        found: Offsets = self._base[blocks] + place * self._step[blocks]
        return found

    def entries(self, ids: Offsets, place: int) -> Offsets:
        """Return where KV entries (`FileLayout.ids`) of the layer at `place` begin (`requests.place`)."""
        rows = ids % self._layout.layer_pairs
        return self.layers(ids // self._layout.block_pairs, place) + rows * self._layout.pair_bytes

    # ------------------------------------------------------------------------------------------------------- reading

    def __enter__(self) -> None:
        """Begin a read. Positions stay valid until it ends, even if blocks leave their extents."""
        with self._mutex:
            self._reading += 1

    def __exit__(self, *exception: object) -> None:
        with self._mutex:
            self._reading -= 1
        self._forget_left()

    def _forget_left(self) -> None:
        if not self._left:
            return
        with self._mutex:
            if self._reading:
                return
            for entry in self._left:
                self._file.files.remove(entry.number)
            self._left.clear()

    def check_integrity(self) -> None:
        """Assert that blocks and files are consistent."""
        own = self._layout.base(np.arange(len(self._base), dtype=np.int64))
        assert set(np.flatnonzero(self._base != own).tolist()) == self._stored.keys()
        numbers = [entry.number for entry in (*self._stored.values(), *self._left)]
        assert len(set(numbers)) == len(numbers) and 0 not in numbers
        for block, entry in self._stored.items():
            assert self._base[block] == place(entry.number, entry.extent.offset)
            assert self._file.files.handles[entry.number] == entry.extent.file.handle


def most_files() -> int:
    """Raise the limit of open files to its maximum and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft if soft != resource.RLIM_INFINITY else 1 << 20
