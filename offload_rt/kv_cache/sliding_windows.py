"""Blocks of sliding-window layers."""

from __future__ import annotations

from collections.abc import Sequence

from ..core import BLOCK_SIZE, BlockTable
from .arena import Arena
from .disk.file_arena import FileArena
from .layer_groups import LayerGroups
from .memory_blocks import MemoryBlocks
from .window_blocks import WindowBlocks


class SlidingWindows:
    """Allocates window blocks for the next tokens of a sequence, and frees window blocks that are no longer needed."""

    def __init__(
        self, arena: Arena | FileArena, memory: MemoryBlocks, windows: WindowBlocks, groups: LayerGroups
    ) -> None:
        self._arena, self._memory, self._windows, self._groups = arena, memory, windows, groups

    def slides(self, blocks: BlockTable, start: int, stop: int, *, next_window: bool = False) -> bool:
        """Return whether `slide` would change the block table. If so, write pending appends before calling `slide`."""
        if not self._groups.sliding:
            return False
        return self._groups.window_indices(start, stop, blocks.floor, next_window=next_window) != blocks.windows.keys()

    def slide(
        self, blocks: BlockTable, start: int, stop: int, *, next_window: bool = False, before_window: int = 0
    ) -> None:
        """Move the sliding windows of a sequence so that tokens [start, stop) can be computed.

        Window blocks that these tokens attend to are kept. New blocks are allocated for those of the new tokens that
        later tokens will attend to. All other window blocks are freed. A partly filled block that is shared is copied.

        Args:
            next_window: Whether to also allocate blocks for the next complete window, in case the pool is full later.
            before_window: Number of new tokens before the window of `stop` that should also get slots if enough blocks
                are free.

        Raises:
            PoolFullError: The pool is full. The block table is unchanged.
        """
        if not self._groups.sliding:
            return
        wanted = self._groups.window_indices(start, stop, blocks.floor, next_window=next_window)
        at, filled = divmod(start, BLOCK_SIZE)
        first = max(start, self._groups.first_seen(stop, blocks.floor))
        earlier = range(max(start, first - before_window) // BLOCK_SIZE, first // BLOCK_SIZE)
        if (len(wanted - blocks.windows.keys()) + len(earlier)) * self._groups.sliding <= self._memory.free:
            wanted.update(earlier)
        shared = at in wanted and at in blocks.windows and self._memory.allocator.refs(blocks.windows[at][0]) > 1
        fresh = sorted(index for index in wanted if index not in blocks.windows or (index == at and shared))
        if not fresh and wanted == blocks.windows.keys():
            return
        gone = sorted(blocks.windows.keys() - wanted)
        # Window blocks that no other sequence uses become free or idle, so the new blocks can take their place.
        available = sum(self._windows.has_one_user(blocks.windows[index]) for index in gone)
        self._memory.check((len(fresh) - available) * self._groups.sliding)
        for index in gone:
            self._windows.release(blocks.windows.pop(index))
        self._memory.provide(len(fresh) * self._groups.sliding, run=len(fresh))
        self._allocate_windows(blocks, fresh, filled)

    def _allocate_windows(self, blocks: BlockTable, indices: Sequence[int], filled: int) -> None:
        """Allocate window blocks for the block indices `indices`, contiguous within each layer group.

        A shared block is replaced with a copy of its first `filled` slots.
        """
        columns = [self._memory.allocator.best_fit(len(indices)) for _ in range(self._groups.sliding)]
        for index, window in zip(indices, zip(*columns, strict=True), strict=True):
            if (old := blocks.windows.get(index)) is not None:
                for source, target in zip(old, window, strict=True):
                    self._arena.copy(source, target, filled)
                self._windows.release(old)
            blocks.windows[index] = window
