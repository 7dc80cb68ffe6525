"""Extents: the location of each block's KV on disk.

Every block has an extent in the pool's own file. A block of a session can instead use a *stored extent*, which lies in
a file of the session store, so that the KV is written only once. An extent contains all storage layers of the block
(see `layer_groups`). Each storage layer has the shape `[Hkv, 64, planes, width]` and is padded to whole disk blocks.
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
from .requests import Offsets, file_position

SPARE_FILES = 512  # number of file handles that the pool leaves for the rest of the process


def ignore(layer: int, block: memoryview) -> None:
    """Default of `StoredExtent.written`."""


@dataclass(eq=False)
class StoredExtent:
    """Location of a block's KV in a file of a session store. Each storage layer is written only once, as a whole."""

    file: BlockFile
    offset: int  # offset in bytes of the first storage layer
    layer_bytes: int
    # The writer thread calls this with the index and the bytes of each storage layer that it has written.
    written: Callable[[int, memoryview], None] = ignore

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Write one storage layer at byte `offset` of the file. Raises OSError."""
        self.file.write(offset, data)
        self.written((offset - self.offset) // self.layer_bytes, data.numpy().data)


@dataclass(eq=False)
class _OpenExtent:
    extent: StoredExtent
    number: int  # file number (`FileTable`)
    storage_layers: set[int] = field(default_factory=set)  # written or queued


class Extents:
    """Maps blocks to their extents, and KV entries to positions in open files.

    The caller must hold the arena's lock during all calls, and must read files only inside `with extents:`. If the
    process cannot open more files, further blocks stay in the pool's file.
    """

    def __init__(self, file: DirectFile, layout: FileLayout) -> None:
        self._file, self._layout = file, layout
        self._stored: dict[int, _OpenExtent] = {}
        # For each block, the file position (see `requests`) of storage layer 0, and the bytes between storage layers.
        self._base = layout.block_offset(np.arange(layout.arena.blocks, dtype=np.int64))
        self._step = np.full(layout.arena.blocks, layout.layer_stride, np.int64)
        # After its release, a file keeps its number until all earlier reads have ended. These reads use the number, and
        # a newly opened file could otherwise get the same number. Pending writes (`WriteBehind`) also keep a file open.
        self._released: list[_OpenExtent] = []
        self._reading = 0
        self._mutex = threading.Lock()
        self._most: int | None = None

    def __contains__(self, block: int) -> bool:
        return block in self._stored

    def __len__(self) -> int:
        return len(self._stored)

    def get(self, block: int) -> StoredExtent | None:
        opened = self._stored.get(block)
        return None if opened is None else opened.extent

    def can_open_file(self) -> bool:
        if self._most is None:
            self._most = most_files() - SPARE_FILES
        return len(self._stored) + len(self._released) < self._most

    def assign(self, block: int, extent: StoredExtent, storage_layers: Sequence[int] = ()) -> None:
        """Let `block`, which must not have KV yet, use a stored extent that already contains `storage_layers`."""
        assert block not in self._stored and extent.layer_bytes == self._layout.layer_bytes
        with self._mutex:
            number = self._file.files.add(extent.file.handle, direct=extent.file.direct)
        self._stored[block] = _OpenExtent(extent, number, set(storage_layers))
        self._base[block], self._step[block] = file_position(number, extent.offset), extent.layer_bytes

    def release(self, block: int) -> None:
        """Let a block use its extent in the pool's file again. No KV is copied."""
        if (opened := self._stored.pop(block, None)) is not None:
            self._base[block], self._step[block] = self._layout.block_offset(block), self._layout.layer_stride
            with self._mutex:
                self._released.append(opened)
            self._close_released()

    def accepts(self, block: int, storage_layer: int) -> bool:
        """Return whether a storage layer may be written. A layer in a stored extent may be written only once."""
        return (opened := self._stored.get(block)) is None or storage_layer not in opened.storage_layers

    def target(self, block: int, storage_layer: int) -> tuple[StoredExtent | DirectFile, int]:
        """Return the file and the byte offset to write a storage layer to. The layer counts as written from now on."""
        if (opened := self._stored.get(block)) is None:
            return self._file, int(self.layer_positions(block, storage_layer))
        assert storage_layer not in opened.storage_layers
        opened.storage_layers.add(storage_layer)
        return opened.extent, opened.extent.offset + storage_layer * opened.extent.layer_bytes

    def layer_positions(self, blocks: Offsets | int, storage_layer: Offsets | int) -> Offsets:
        """Return the file position of a storage layer in each of `blocks` (see `requests.file_position`)."""
        found: Offsets = self._base[blocks] + storage_layer * self._step[blocks]
        return found

    def entry_positions(self, ids: Offsets, storage_layer: int) -> Offsets:
        """Return the file positions of the KV entries with the ids `ids` (see `FileLayout.entry_ids`)."""
        rows = ids % self._layout.layer_entries
        return self.layer_positions(ids // self._layout.block_entries, storage_layer) + rows * self._layout.entry_bytes

    # ------------------------------------------------------------------------------------------------------- reading

    def __enter__(self) -> None:
        """Begin a read. File positions stay valid until the context exits, even if blocks leave their extents."""
        with self._mutex:
            self._reading += 1

    def __exit__(self, *exception: object) -> None:
        with self._mutex:
            self._reading -= 1
        self._close_released()

    def _close_released(self) -> None:
        if not self._released:
            return
        with self._mutex:
            if self._reading:
                return
            for opened in self._released:
                self._file.files.remove(opened.number)
            self._released.clear()

    def check_integrity(self) -> None:
        own = self._layout.block_offset(np.arange(len(self._base), dtype=np.int64))
        assert set(np.flatnonzero(self._base != own).tolist()) == self._stored.keys()
        numbers = [opened.number for opened in (*self._stored.values(), *self._released)]
        assert len(set(numbers)) == len(numbers) and 0 not in numbers
        for block, opened in self._stored.items():
            assert self._base[block] == file_position(opened.number, opened.extent.offset)
            assert self._file.files.handles[opened.number] == opened.extent.file.handle


def most_files() -> int:
    """Raise this process's limit on open files to the maximum, and return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return soft if soft != resource.RLIM_INFINITY else 1 << 20
