"""Chunks of a pool on disk whose rows lie in files of a store, one each, instead of in the pool's own file."""

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

SPARE_FILES = 512
"""Open files that are left to the rest of the process."""


def ignore(layer: int, block: memoryview) -> None:
    """Takes note of nothing."""


@dataclass(eq=False)
class Home:
    """A file in which the rows of one chunk lie, or will: its layers from byte `offset` on, each of them written once
    and whole (`FileLayout.layer` bytes). written: is told of each layer that the disk took, with its bytes, on the
    thread that wrote it."""

    file: BlockFile
    offset: int
    layer_bytes: int
    written: Callable[[int, memoryview], None] = ignore

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Writes one layer's block where it belongs. Raises OSError."""
        self.file.write(offset, data)
        self.written((offset - self.offset) // self.layer_bytes, data.numpy().data)

    def at(self, place: int) -> int:
        """Where the block of the layer at `place` begins in the file."""
        return self.offset + place * self.layer_bytes


@dataclass(eq=False)
class _Entry:
    """A home, its file's number among those that are read, and the places of the layers that were given to it."""

    home: Home
    number: int
    places: set[int] = field(default_factory=set)


class Homes:
    """Which chunks have a home, and where their rows are there.

    All calls but `offsets` come under the arena's lock. Who reads does so within `with homes:`: a home that its chunk
    leaves stays open until nothing is read any more that was asked for while it was the chunk's, since who reads has
    its places, and a file that comes later has its number. What is on its way there holds it too (`WriteBehind`). Files
    that are open count against the process's limit, which is raised as far as it can be; beyond it chunks have no home.
    """

    def __init__(self, file: DirectFile, layout: FileLayout) -> None:
        self._files, self._layout = file.files, layout
        self._of: dict[int, _Entry] = {}
        self._base = np.full(layout.arena.chunks, -1, np.int64)
        """Where the rows of a chunk begin, as a place of the file table; -1 where it has no home."""
        self._left: list[_Entry] = []
        self._reading = 0
        self._mutex = threading.Lock()
        self._most: int | None = None

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._of

    def __len__(self) -> int:
        return len(self._of)

    def get(self, chunk: int) -> Home | None:
        """The home of a chunk."""
        entry = self._of.get(chunk)
        return None if entry is None else entry.home

    def room(self) -> bool:
        """Whether one more file may be open."""
        if self._most is None:
            self._most = most_files() - SPARE_FILES
        return len(self._of) + len(self._left) < self._most

    def enter(self, chunk: int, home: Home, places: Sequence[int] = ()) -> None:
        """Rows of a chunk that has none yet go to `home` from now on; those of the layers at `places` are there."""
        assert chunk not in self._of and home.layer_bytes == self._layout.layer
        with self._mutex:
            number = self._files.add(home.file.handle, direct=home.file.direct)
        self._of[chunk] = _Entry(home, number, set(places))
        self._base[chunk] = file_place(number, home.offset)

    def leave(self, chunk: int) -> None:
        """The chunk, if it has one, has no home any more."""
        if (entry := self._of.pop(chunk, None)) is not None:
            self._base[chunk] = -1
            with self._mutex:
                self._left.append(entry)
            self._forget_left()

    def takes(self, chunk: int, place: int) -> bool:
        """Whether a chunk has no home, or one that has nothing of the layer at `place` yet."""
        return (entry := self._of.get(chunk)) is None or place not in entry.places

    def places(self, chunk: int) -> set[int]:
        """The places of the layers that its home was given."""
        return self._of[chunk].places

    def give(self, chunk: int, place: int) -> Home:
        """The home of a chunk, which is now given the layer at `place`."""
        assert self.takes(chunk, place)
        entry = self._of[chunk]
        entry.places.add(place)
        return entry.home

    # ------------------------------------------------------------------------------------------------------- reading

    def __enter__(self) -> None:
        """Begins to read: until the end of it places of homes stay what they are, also of those that are left."""
        with self._mutex:
            self._reading += 1

    def __exit__(self, *exception: object) -> None:
        """Ends it."""
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
        """Which of `chunks` have homes, counted from the first, and where the layer at `place` begins there, as a place
        of the file table."""
        if not self._of:
            return {}
        base = self._base[chunks.start : chunks.stop]
        there = np.flatnonzero(base >= 0)
        return dict(zip(there.tolist(), (base[there] + place * self._layout.layer).tolist(), strict=True))

    def bases(self, ids: Offsets) -> Offsets | None:
        """Where the homes of the chunks of rows (`FileLayout.ids`) begin, as places of the file table, -1 where there
        is none; None where no chunk has one."""
        return self._base[ids // self._layout.chunk_pairs] if self._of else None

    def offsets(self, ids: Offsets, bases: Offsets | None) -> Offsets:
        """Where rows begin, as places of the file table, from what `bases` gave; needs no lock."""
        found = self._layout.offsets(ids)
        if bases is not None:
            places, rows = np.divmod(ids % self._layout.chunk_pairs, self._layout.arena.kv_heads * CHUNK)
            there = bases + places * self._layout.layer + rows * self._layout.pair_bytes
            np.copyto(found, there, where=bases >= 0)
        return found

    def check_integrity(self) -> None:
        """Asserts that chunks, files and places agree."""
        assert set(np.flatnonzero(self._base >= 0).tolist()) == self._of.keys()
        numbers = [entry.number for entry in (*self._of.values(), *self._left)]
        assert len(set(numbers)) == len(numbers) and 0 not in numbers
        for chunk, entry in self._of.items():
            assert self._base[chunk] == file_place(entry.number, entry.home.offset)
            assert self._files.handles[entry.number] == entry.home.file.handle


def most_files() -> int:
    """How many files this process may have open, once its limit is raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft if soft != resource.RLIM_INFINITY else 1 << 20
