"""Provides free blocks of the arena."""

from __future__ import annotations

from ..errors import PoolFullError
from .arena import Arena
from .block_allocator import BlockAllocator
from .disk.file_arena import FileArena
from .prefix_cache import PrefixCache
from .system_memory import pool_full


class MemoryBlocks:
    """Provides free blocks of the arena for a pool, by activating slabs and evicting cached blocks.

    Args:
        evicts_tree: Whether evicting blocks from the prefix tree frees memory. False if these blocks are only ids.
        limit_bytes: Limit of the pool in bytes, used in error messages.
    """

    def __init__(
        self,
        arena: Arena | FileArena,
        allocator: BlockAllocator,
        cached: PrefixCache,
        *,
        evicts_tree: bool,
        limit_bytes: int,
    ) -> None:
        self.allocator = allocator
        self._arena, self._cached, self._evicts_tree, self._limit_bytes = arena, cached, evicts_tree, limit_bytes

    @property
    def count(self) -> int:
        return self._arena.layout.blocks

    @property
    def free(self) -> int:
        return self.count - self.allocator.used

    @property
    def available(self) -> int:
        """Number of blocks that are free or can be freed by eviction."""
        return self.free + self._cached.idle_blocks

    def check(self, count: int) -> None:
        if (missing := count - self.available) > 0:
            raise self.full_error(count, missing)

    def provide(self, count: int, run: int) -> None:
        """Ensure that `count` blocks are free, with `run` of them contiguous if possible.

        If fewer blocks are available, raise PoolFullError without evicting any block.
        """
        self.check(count)
        while (missing := count - self.free) > 0:
            if not (self._evicts_tree and self._cached.evict(missing)):
                self._cached.windows.evict(missing)
        self.activate(count, run)

    def activate(self, count: int, run: int) -> None:
        """Activate slabs until `count` blocks are free, `run` of them contiguous, or until no slab is left."""
        blocks = self.allocator
        while self._arena.active < self._arena.layout.slabs and (blocks.free < count or blocks.largest_run < run):
            try:
                self._arena.activate()
            except PoolFullError:
                if blocks.free < count:
                    raise
                return
            blocks.add_slab()

    def full_error(self, count: int, missing: int) -> PoolFullError:
        capacity, disk = (self.count, self._arena.layout.block_bytes), isinstance(self._arena, FileArena)
        return pool_full(count, missing, self.available, capacity, self._limit_bytes, disk=disk)

    def check_integrity(self) -> None:
        self.allocator.check_integrity()
        assert self._arena.active == self.allocator.slabs
        assert self.allocator.used <= self.count
