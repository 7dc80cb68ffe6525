"""The prefix cache of a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core import BLOCK_SIZE, BlockTable
from .block_allocator import BlockAllocator
from .layer_groups import LayerGroups
from .prefix_tree import PrefixTree
from .snapshot_table import SnapshotTable
from .window_blocks import WindowBlocks


class PrefixCache:
    """Keeps published blocks after their sequence has ended, so that later sequences with the same prefix can use them.

    A published block can have window blocks (KV of sliding-window layers) and a snapshot of the recurrent state, which
    are freed together with the block. A sequence can continue after a block if the window blocks that its next token
    attends to are cached. In models with recurrent state, the block must also have a snapshot.

    Args:
        blocks: Allocator of the published blocks. The cache owns one reference to each of them.
        snapshots: Number of slots for snapshots, or None if the model has no recurrent state.
    """

    def __init__(
        self, blocks: BlockAllocator, window_blocks: BlockAllocator, groups: LayerGroups, snapshots: int | None = None
    ) -> None:
        self._blocks, self._groups = blocks, groups
        self.tree = PrefixTree()
        self.windows = WindowBlocks(window_blocks, groups)
        self.snapshots = None if snapshots is None else SnapshotTable(snapshots)

    def __len__(self) -> int:
        return len(self.tree)

    def __contains__(self, block: int) -> bool:
        return block in self.tree

    @property
    def idle_blocks(self) -> int:
        return self.tree.idle * self._groups.full + self.windows.idle

    def match(self, tokens: Sequence[int], *provenance_keys: str, floor: int = 0) -> BlockTable:
        """Return a block table with the longest cached prefix. For the arguments, see `HostPool.match`."""
        blocks = self.tree.match(tokens, *provenance_keys, usable=lambda path: self._usable(path, floor))
        self._blocks.incref(blocks)
        if self.snapshots is not None:
            self.snapshots.touch(blocks[-1:])
        return BlockTable(blocks, len(blocks) * BLOCK_SIZE, self.windows.take(blocks, floor), floor)

    def _usable(self, path: Sequence[int], floor: int) -> int:
        """Return how many leading blocks of `path` a new sequence can reuse."""
        count = self.windows.usable(path, floor)
        if self.snapshots is None:
            return count
        while count != (usable := self.snapshots.usable(path[:count])):
            count = self.windows.usable(path[:usable], floor)
        return count

    def insert(self, blocks: BlockTable, full: int, tokens: Sequence[int], provenance_key: str) -> dict[int, int]:
        """Publish the first `full` blocks of a sequence under a KV provenance key.

        Returns:
            Cached blocks with the same tokens and key, by block index. The caller must put them in place of the
            sequence's blocks, and drop the references to the replaced blocks. References to the cached blocks have
            already been added for the sequence.
        """
        fresh, instead = self.tree.insert(tokens, blocks.ids[:full], provenance_key, self._has_one_user)
        self._blocks.incref(fresh)
        self._blocks.incref(instead.values())
        return instead

    def keep_windows(self, blocks: BlockTable, start: int, full: int, lost: set[int]) -> None:
        """Cache the window blocks of the published blocks [start, full) of a sequence.

        `lost` contains the window blocks whose write to disk has failed. Published blocks that have such a window block
        are skipped.
        """
        for i in range(start, full):
            if blocks.ids[i] in self.tree and lost.isdisjoint(blocks.windows[i]):
                self.windows.keep(blocks.ids[i], blocks.windows[i])

    def release(self, blocks: Sequence[int]) -> None:
        """Mark the published blocks among `blocks` as idle if no sequence references them."""
        self.tree.release(filter(self._has_one_user, blocks))

    def evict(self, count: int) -> bool:
        gone = self.tree.evict(count)
        self._forget(gone)
        return bool(gone)

    def remove(self, block: int) -> None:
        self._forget(self.tree.remove(block))

    def _forget(self, blocks: Sequence[int]) -> None:
        self.windows.forget(blocks)
        if self.snapshots is not None:
            self.snapshots.forget(blocks)
        self._blocks.decref(blocks)

    def _has_one_user(self, block: int) -> bool:
        return self._blocks.refs(block) == 1

    def check_integrity(self, refs: Callable[[int], int]) -> None:
        self.tree.check_integrity(refs)
        self.windows.check_integrity(self.tree.__contains__)
        if self.snapshots is not None:
            self.snapshots.check_integrity(self.tree.blocks)
