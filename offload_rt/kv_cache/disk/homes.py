"""Homes: files of a store that hold the KV of single blocks in place of the pool's own file."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch

from ...core import CHUNK
from .block_file import BlockFile
from .direct_file import DirectFile
from .file_layout import FileLayout
from .file_table import place as file_place
from .requests import Offsets

SPARE_FILES = 512  # open files left to the rest of the process


def ignore(layer: int, block: memoryview) -> None:
    """Do nothing."""


@dataclass(eq=False)
class Home:
    """A file that holds the KV of one block. Each layer is written once, as a whole.

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

    def at(self, place: int) -> int:
        """Return the byte where the layer at `place` begins."""
        return self.offset + place * self.layer_bytes


@dataclass(eq=False)
class _Entry:
    """A home, the number of its file in the file table, and the layers that were assigned to it."""

    home: Home
    number: int
    places: set[int] = field(default_factory=set)


class Homes:
    """Maps blocks to their homes and KV entries to positions in them.

    All calls except `offsets` need the arena's lock. Reads must happen inside `with homes:`. A home that its block
    leaves stays open until such reads have ended, because they use its file number, which a later file may reuse.
    Pending writes (`WriteBehind`) also keep it open. Open files count against the process limit, which is raised to
    its maximum. At the limit, further blocks get no home.
    """

    def __init__(self, file: DirectFile, layout: FileLayout) -> None:
        self._files, self._layout = file.files, layout
        self._of: dict[int, _Entry] = {}
        # Position of each block's KV, as a place in the file table; -1 if the block has no home.
        self._base = np.full(layout.arena.chunks, -1, np.int64)
        self._left: list[_Entry] = []
        self._reading = 0
        self._mutex = threading.Lock()
        self._most: int | None = None

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._of

    def __len__(self) -> int:
        return len(self._of)

    def get(self, chunk: int) -> Home | None:
        """Return the home of a block, or None."""
        entry = self._of.get(chunk)
        return None if entry is None else entry.home

    def room(self) -> bool:
        """Return whether one more file can be opened."""
        if self._most is None:
            self._most = most_files() - SPARE_FILES
        return len(self._of) + len(self._left) < self._most

    def enter(self, chunk: int, home: Home, places: Sequence[int] = ()) -> None:
        """Assign `home` to a block without KV. The layers at `places` are already stored there."""
        assert chunk not in self._of and home.layer_bytes == self._layout.layer
        with self._mutex:
            number = self._files.add(home.file.handle, direct=home.file.direct)
        self._of[chunk] = _Entry(home, number, set(places))
        self._base[chunk] = file_place(number, home.offset)

    def leave(self, chunk: int) -> None:
        """Detach a block from its home, if it has one."""
        if (entry := self._of.pop(chunk, None)) is not None:
            self._base[chunk] = -1
            with self._mutex:
                self._left.append(entry)
            self._forget_left()

    def takes(self, chunk: int, place: int) -> bool:
        """Return whether a block has no home, or one without the layer at `place`."""
        return (entry := self._of.get(chunk)) is None or place not in entry.places

    def places(self, chunk: int) -> set[int]:
        """Return the layers that were assigned to the home of a block."""
        return self._of[chunk].places

    def give(self, chunk: int, place: int) -> Home:
        """Assign the layer at `place` to the home of a block. Return the home."""
        assert self.takes(chunk, place)
        entry = self._of[chunk]
        entry.places.add(place)
        return entry.home

    # ------------------------------------------------------------------------------------------------------- reading

    def __enter__(self) -> None:
        """Begin a read. Positions in homes stay valid until it ends, even if blocks leave them."""
        with self._mutex:
            self._reading += 1

    def __exit__(self, *exception: object) -> None:
        """End a read."""
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
                self._files.remove(entry.number)
            self._left.clear()

    def layers(self, chunks: range, place: int) -> dict[int, int]:
        """Return the places of the layer at `place` in homes, by index in `chunks`. Omits blocks without a home."""
        if not self._of:
            return {}
        base = self._base[chunks.start : chunks.stop]
        there = np.flatnonzero(base >= 0)
        return dict(zip(there.tolist(), (base[there] + place * self._layout.layer).tolist(), strict=True))

    def bases(self, ids: Offsets) -> Offsets | None:
        """Return the place of the home of each KV entry (`FileLayout.ids`), or -1; None if no block has a home."""
        return self._base[ids // self._layout.chunk_pairs] if self._of else None

    def offsets(self, ids: Offsets, bases: Offsets | None) -> Offsets:
        """Return the places of KV entries, given the result of `bases`. Needs no lock."""
        found = self._layout.offsets(ids)
        if bases is not None:
            places, rows = np.divmod(ids % self._layout.chunk_pairs, self._layout.arena.kv_heads * CHUNK)
            there = bases + places * self._layout.layer + rows * self._layout.pair_bytes
            np.copyto(found, there, where=bases >= 0)
        return found

    def check_integrity(self) -> None:
        """Assert that blocks, files and places are consistent."""
        assert set(np.flatnonzero(self._base >= 0).tolist()) == self._of.keys()
        numbers = [entry.number for entry in (*self._of.values(), *self._left)]
        assert len(set(numbers)) == len(numbers) and 0 not in numbers
        for chunk, entry in self._of.items():
            assert self._base[chunk] == file_place(entry.number, entry.home.offset)
            assert self._files.handles[entry.number] == entry.home.file.handle


def most_files() -> int:
    """Raise the limit of open files to its maximum and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft if soft != resource.RLIM_INFINITY else 1 << 20
