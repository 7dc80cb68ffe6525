"""Asynchronous writes to files."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import DiskError
from .direct_file import BlockFile
from .extents import StoredExtent


class ExtentWrite(NamedTuple):
    target: BlockFile | StoredExtent
    offset: int
    data: torch.Tensor


class WriteBehind:
    """Writer thread of a KV pool on disk. Writes run in the order of the calls to `add`.

    A key is a pair (block, storage layer). Before a thread reads KV from a file, it must call `wait` with the keys of
    that KV.

    Args:
        folder: Folder of the pool, used in error messages.
        limit: Maximum number of bytes in pending writes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._waiting: Counter[tuple[int, int]] = Counter()
        self._bytes = 0
        self._lost: dict[tuple[int, int], str] = {}
        self._unwanted: set[tuple[int, int]] = set()  # keys with pending writes whose content has been discarded
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload-rt row writer")
        weakref.finalize(self, self._thread.shutdown, wait=False)

    def add(self, keys: Sequence[tuple[int, int]], pieces: Sequence[ExtentWrite]) -> None:
        """Queue the writes `pieces`, which contain the KV of `keys`.

        If pending writes would exceed `limit` bytes, first wait until earlier writes have ended.
        """
        size = sum(len(piece.data) for piece in pieces)
        with self._changed:
            self._changed.wait_for(lambda: self._bytes == 0 or self._bytes + size <= self._limit)
            self._waiting.update(keys)
            self._unwanted.difference_update(keys)
            self._bytes += size
        self._thread.submit(self._write, keys, pieces, size)

    def wait(self, keys: Sequence[tuple[int, int]]) -> None:
        """Wait until the KV of `keys` has been written. Raise DiskError if a write failed."""
        with self._changed:
            if self._waiting:
                self._changed.wait_for(lambda: not any(key in self._waiting for key in keys))
            if self._lost and (why := next((self._lost[key] for key in keys if key in self._lost), None)):
                raise DiskError(f"cannot write KV to {str(self._folder)!r}: {why}; the KV of this request is lost")

    def wait_layer(self, storage_layer: int, blocks: NDArray[np.int64]) -> None:
        with self._changed:
            quiet = not self._waiting and not self._lost
        if not quiet:
            self.wait([(block, storage_layer) for block in np.unique(blocks).tolist()])

    @property
    def lost(self) -> set[int]:
        with self._changed:
            return {block for block, _ in self._lost}

    def forget_errors(self, blocks: Sequence[int]) -> None:
        """Ignore errors from past and pending writes of freed blocks."""
        gone = set(blocks)
        with self._changed:
            self._lost = {key: why for key, why in self._lost.items() if key[0] not in gone}
            self._unwanted.update(key for key in self._waiting if key[0] in gone)

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def _write(self, keys: Sequence[tuple[int, int]], pieces: Sequence[ExtentWrite], size: int) -> None:
        why = self._written(pieces)
        with self._changed:
            self._bytes -= size
            self._waiting -= Counter(keys)
            for key in keys:
                self._lost.pop(key, None)
            if why:
                self._lost.update((key, why) for key in keys if key not in self._unwanted)
            self._unwanted &= self._waiting.keys()
            self._changed.notify_all()

    def _written(self, pieces: Sequence[ExtentWrite]) -> str:
        try:
            for piece in pieces:
                piece.target.write(piece.offset, piece.data)
        except OSError as error:
            return error.strerror or str(error)
        except Exception as error:  # If this ended the writer thread, threads that wait for a key would never continue.
            return f"{type(error).__name__}: {error}"
        return ""
