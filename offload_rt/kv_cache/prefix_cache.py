"""The published blocks of a pool: the prefix tree, and what is cached beside its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core import BLOCK_SIZE, BlockTable
from .block_allocator import BlockAllocator
from .layer_groups import LayerGroups
from .prefix_tree import PrefixTree
from .snapshot_table import SnapshotTable
from .window_blocks import WindowBlocks


class PrefixCache:
    """Keeps full blocks after their sequence ends, so that sequences with the same prefix can reuse them.

    A block of the tree may have window blocks (KV of sliding layers) and a snapshot of recurrent state. A sequence can
    continue after a block if the windows at its end are complete and, in models with recurrent state, if it has a
    snapshot. Both leave with their block.

    Args:
        blocks: Allocator of the published blocks. The cache owns one reference on each.
        held: Allocator of the window blocks.
        groups: Layers with full attention and sliding windows.
        snapshots: Slots of the state pool, or None if the model has no recurrent state.
    """

    def __init__(
        self, blocks: BlockAllocator, held: BlockAllocator, groups: LayerGroups, snapshots: int | None = None
    ) -> None:
        self._blocks, self._groups = blocks, groups
        self.tree = PrefixTree()
        self.windows = WindowBlocks(held, groups)
        self.snapshots = None if snapshots is None else SnapshotTable(snapshots)

    def __len__(self) -> int:
        return len(self.tree)

    def __contains__(self, block: int) -> bool:
        return block in self.tree

    @property
    def idle_blocks(self) -> int:
        """Number of blocks with memory that only the cache holds."""
        return self.tree.idle * self._groups.full + self.windows.idle

    def match(self, tokens: Sequence[int], *provenance_keys: str, floor: int = 0) -> BlockTable:
        """Return a block table for the longest cached prefix (`HostPool.match`)."""
        blocks = self.tree.match(tokens, *provenance_keys, usable=lambda path: self._usable(path, floor))
        self._blocks.incref(blocks)
        if self.snapshots is not None:
            self.snapshots.touch(blocks[-1:])
        return BlockTable(blocks, len(blocks) * BLOCK_SIZE, self.windows.take(blocks, floor), floor)

    def _usable(self, path: Sequence[int], floor: int) -> int:
        """Return the length of the longest prefix of `path` after which a sequence can continue."""
        count = self.windows.usable(path, floor)
        if self.snapshots is None:
            return count
        while count != (usable := self.snapshots.usable(path[:count])):
            count = self.windows.usable(path[:usable], floor)
        return count

    def insert(self, blocks: BlockTable, full: int, tokens: Sequence[int], provenance_key: str) -> dict[int, int]:
        """Publish the first `full` blocks of a sequence. Return the blocks that replace its own, by index.

        The sequence gets a reference on each of them, and the caller drops those on its own blocks.
        """
        fresh, instead = self.tree.insert(tokens, blocks.ids[:full], provenance_key, self._alone)
        self._blocks.incref(fresh)
        self._blocks.incref(instead.values())
        return instead

    def keep_windows(self, blocks: BlockTable, start: int, full: int, lost: set[int]) -> None:
        """Cache the window blocks of the published blocks [start, full) of a sequence."""
        for i in range(start, full):
            if blocks.ids[i] in self.tree and lost.isdisjoint(blocks.windows[i]):
                self.windows.keep(blocks.ids[i], blocks.windows[i])

    def release(self, blocks: Sequence[int]) -> None:
        """Mark those of `blocks` that only the cache holds as idle."""
        self.tree.release(filter(self._alone, blocks))

    def evict(self, count: int) -> bool:
        """Evict up to `count` idle blocks. Return whether there were any."""
        gone = self.tree.evict(count)
        self._forget(gone)
        return bool(gone)

    def remove(self, block: int) -> None:
        """Remove a block and its descendants, because its content changes or is lost."""
        self._forget(self.tree.unkey(block))

    def _forget(self, blocks: Sequence[int]) -> None:
        """Release the references to `blocks`, which have left the tree, and to what is cached beside them."""
        self.windows.forget(blocks)
        if self.snapshots is not None:
            self.snapshots.forget(blocks)
        self._blocks.decref(blocks)

    def _alone(self, block: int) -> bool:
        return self._blocks.refs(block) == 1

    def check_integrity(self, refs: Callable[[int], int]) -> None:
        self.tree.check_integrity(refs)
        self.windows.check_integrity(self.tree.__contains__)
        if self.snapshots is not None:
            self.snapshots.check_integrity(self.tree.blocks)
