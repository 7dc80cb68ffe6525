"""Swap file for the KV blocks of preempted sequences. It has no name, and is deleted when the process ends."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from ..errors import StoreError
from ..kv_cache.disk.direct_file import unnamed_file
from ..kv_cache.prefix_tree import root_key
from .block_file import BlockWriter, StoredBlock
from .naming import NamedBlock


class SwapFile:
    """Stores KV blocks by key in an unnamed file. `Saver` can use it like a `DiskStore`.

    Blocks are never evicted. When no block is left, the file is truncated. Not thread-safe: flush the saver before
    calling other methods. Raises StoreError if the folder cannot be used.

    Args:
        folder: Any folder on the file system that should contain the file. The file is not visible in the folder.
        namespace: Text that identifies the model, the KV data type and the layout.
        slot_bytes: Number of bytes to reserve per block.
        limit: Maximum total size in bytes, or None for no limit.
    """

    def __init__(self, folder: Path, namespace: str, layers: int, slot_bytes: int, limit: int | None = None) -> None:
        self.layers, self.root, self.last_error = layers, root_key(namespace), ""
        self._slot_bytes, self._limit = slot_bytes, limit
        self._blocks: dict[bytes, StoredBlock] = {}
        self._pending = 0
        self._free: list[int] = []
        try:
            self.handle = unnamed_file(folder)
        except OSError as error:
            raise StoreError(
                f"cannot use the folder {str(folder)!r} for preempted requests: {error.strerror or error}; choose a "
                "writable folder on a disk with free space"
            ) from error

    @property
    def bytes_used(self) -> int:
        return (len(self._blocks) + self._pending) * self._slot_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def find(self, name: NamedBlock) -> StoredBlock | None:
        return self._blocks.get(name.key)

    def begin(
        self, name: NamedBlock, layer_bytes: int, cost: int = 0, *, for_prompt: bool = False
    ) -> BlockWriter | None:
        assert self.layers * layer_bytes <= self._slot_bytes
        key, count = name.key, name.count
        if key in self._blocks or (self._limit is not None and self.bytes_used + self._slot_bytes > self._limit):
            return None
        slot = self._free.pop() if self._free else self.bytes_used // self._slot_bytes
        offset, file = slot * self._slot_bytes, partial(os.dup, self.handle)
        self._pending += 1

        def finish(checksums: Sequence[int]) -> None:
            self._pending -= 1
            self._blocks[key] = StoredBlock(key, count, layer_bytes, checksums, offset, file, lambda: None)

        def give_up(error: OSError | None) -> None:
            if error is not None:
                self.last_error = f"cannot write preempted KV: {error.strerror or error}"
            self._pending -= 1
            self._release(slot)

        return BlockWriter(self.layers, layer_bytes, offset, file, finish, give_up)

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if (block := self._blocks.pop(key, None)) is not None:
                self._release(block.offset // self._slot_bytes)

    def _release(self, slot: int) -> None:
        self._free.append(slot)
        if not self.bytes_used:
            self._free.clear()
            os.ftruncate(self.handle, 0)

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1

    def check_integrity(self) -> None:
        slots = [block.offset // self._slot_bytes for block in self._blocks.values()] + self._free
        assert not self._pending and sorted(slots) == list(range(len(slots)))
        assert self._limit is None or self.bytes_used <= self._limit
