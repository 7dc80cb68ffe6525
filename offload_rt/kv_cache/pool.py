"""The KV cache in host memory: allocates, shares and frees blocks for the block tables of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..config import KVFormatName
from ..core import BLOCK_SIZE, BlockTable, ModelGeometry
from ..errors import PoolFullError
from .arena import Arena
from .block_allocator import BlockAllocator
from .disk.disk_tier import DiskTier, open_file_arena
from .disk.file_arena import FileArena
from .kv_format import make_kv_format
from .layer_groups import LayerGroups
from .layout import SLAB_TOKENS, ArenaLayout
from .machine import memory_limit, pool_full
from .prefix_tree import PrefixTree
from .process_lock import ProcessLock
from .stored_rows import StoredRows, blocks_for
from .window_blocks import WindowBlocks

MOST_TOKENS = 1 << 24  # maximum size without `limit_bytes`: 16 Mi tokens, more than a batch of the longest contexts

# If all layers use sliding windows, blocks of group 0 store no KV and are only ids. The pool then adds `NAMES` ids at a
# time. When there are `MOST_NAMES` ids (4 Mi tokens), it evicts blocks from the prefix tree before it adds ids.
NAMES, MOST_NAMES = 1 << 10, 1 << 16


class HostPool(StoredRows):
    """The KV cache of all sequences, in blocks of 64 tokens, with a fixed limit in bytes.

    Each sequence has a `BlockTable`. `reserve` allocates slots that only this sequence may write, `write` fills them
    layer by layer, and `commit` marks tokens as complete in all layers. `runs` returns KV. `row_base` returns its
    location. Blocks are reference-counted. If the last block of a sequence is partly filled and shared, `reserve`
    copies it before the sequence writes to it. Full blocks are not written again, except by token eviction, which first
    makes a block exclusive (`claim`).

    `publish` adds full blocks to the prefix tree. They stay there after their sequence ends, so that a later sequence
    with the same prefix can reuse them. If memory is needed, blocks that only the tree uses are evicted first, in
    least-recently-used order from the leaves.

    Layers with sliding windows store their KV in separate blocks (`layer_groups.py`). `slide` allocates the blocks
    inside a sequence's windows and frees the others. Window blocks of published blocks are cached while memory is
    available (`window_blocks.py`).

    Concurrency: the pool uses no streams and never waits. If several threads use it, they must hold `lock`. `release`,
    `truncate`, `reserve`, `slide`, `publish` and `claim` may free, copy or exchange blocks. Before calling one of them,
    the caller must wait for all asynchronous transfers that use these blocks. Alternatively, an event on the write-back
    stream may order these transfers before the next write to the blocks. `runs` may return the KV of one layer before
    the other layers are written. Forks and the prefix tree use only tokens below `blocks.length`.

    Args:
        geometry: Dimensions of the model.
        dtype: Data type of the model's KV.
        limit_bytes: Limit on host memory in bytes. None means half of the available memory.
        kv_cache_dtype: Storage format (`kv_format.py`).
        pin: Page-lock each slab for CUDA when it is first needed.
        slab_tokens: Number of tokens per slab. Memory is allocated in slabs.
        disk: Options for storing the KV in a file. `limit_bytes` then limits the part in host memory. None stores all
            KV in host memory.

    Raises:
        MemoryLimitError: `limit_bytes` exceeds the system memory or is smaller than one block.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        dtype: torch.dtype,
        limit_bytes: int | None,
        *,
        kv_cache_dtype: KVFormatName = "auto",
        pin: bool = False,
        slab_tokens: int = SLAB_TOKENS,
        disk: DiskTier | None = None,
    ) -> None:
        format = make_kv_format(kv_cache_dtype, dtype, geometry.head_dim)
        stored = replace(geometry, head_dim=format.width)
        limit = memory_limit(limit_bytes, at_most=stored.kv_bytes(MOST_TOKENS, format.storage))
        if disk is None:
            layout = ArenaLayout.fit(stored, format.storage, limit, slab_tokens)
            arena: Arena | FileArena = Arena(layout, format.storage, pin=pin)
        else:
            arena = open_file_arena(disk, stored, format, limit, slab_tokens)
        self.limit_bytes = limit if disk is None else arena.layout.blocks * arena.layout.block_bytes
        super().__init__(arena, LayerGroups.of(geometry), format)
        self.bytes_peak = 0
        self.pins = pin and disk is None
        """Whether the slabs are page-locked."""
        self._held = BlockAllocator(self.layout.slab_blocks, *(() if self.file is None else (self.file.discard,)))
        # Blocks of group 0. They have memory in the arena, unless all layers use sliding windows.
        self._blocks = self._held if self.groups.full else BlockAllocator(NAMES)
        self._tree = PrefixTree()
        self.lock = ProcessLock()
        self._windows = WindowBlocks(self._held, self.groups)
        self._claimed: set[int] = set()

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    @property
    def block_count(self) -> int:
        return self.layout.blocks

    @property
    def free_blocks(self) -> int:
        return self.block_count - self._held.used

    @property
    def idle_blocks(self) -> int:
        """Number of blocks that only the prefix tree references. They count as used, but can be evicted."""
        return self._tree.idle * self.groups.full + self._windows.idle

    @property
    def grows(self) -> bool:
        """Whether one sequence can grow by 64 tokens."""
        return self.free_blocks + self.idle_blocks >= self.groups.blocks_at_once

    @property
    def bytes_used(self) -> int:
        """Size in bytes of all referenced blocks, at most `limit_bytes`. Each shared block counts once."""
        return self._held.used * self.block_bytes

    @property
    def bytes_held(self) -> int:
        """Size in bytes of all blocks in block tables. Each shared block counts once."""
        return (self._held.used - self.idle_blocks) * self.block_bytes

    def bytes_of(self, blocks: BlockTable) -> int:
        return (self.groups.full * len(blocks.ids) + self.groups.sliding * len(blocks.windows)) * self.block_bytes

    def bytes_for(self, tokens: int) -> int:
        """Return the maximum size in bytes of the KV of a sequence of `tokens` tokens."""
        return self.groups.blocks(tokens) * self.block_bytes

    def prepare(self, tokens: int) -> None:
        """Activate slabs for up to `tokens` additional tokens, without reserving blocks.

        Call it when a sequence is admitted, with the length of its prompt and of the output. Decoding then never pauses
        to page-lock memory. A pool on disk allocates space on demand, so the call has no effect.
        """
        if self.file is None:
            self._activate(self.groups.blocks(tokens), run=0)

    def check_fits(self, tokens: int) -> None:
        """Raise PoolFullError if a sequence of `tokens` tokens would not even fit in an empty pool."""
        if (count := self.groups.blocks(tokens)) > self.block_count:
            raise self._full(count, count - self.block_count)

    def check_spare(self, blocks: int) -> None:
        """Raise PoolFullError if there is no space for `blocks` times 64 additional tokens."""
        self._check_free(blocks * self.groups.blocks_at_once)

    def check_grows(self, blocks: BlockTable, tokens: int, spare: int) -> None:
        """Raise PoolFullError if `blocks` cannot grow to `tokens` tokens with space left for `spare` times 64 more."""
        more = self.groups.blocks(tokens) - self.bytes_of(blocks) // self.block_bytes
        self._check_free(max(0, more) + spare * self.groups.blocks_at_once)

    def _check_free(self, count: int) -> None:
        if (missing := count - self.free_blocks - self.idle_blocks) > 0:
            raise self._full(count, missing)

    def new_block_table(self, tokens: int, floor: int = 0) -> BlockTable:
        """Create a block table of length 0 with slots for `tokens` tokens in full-attention layers.

        The blocks are contiguous if a free run is long enough. Sliding-window layers do not see tokens before `floor`.
        Raises PoolFullError.
        """
        count = blocks_for(tokens)
        self._provide(count)
        blocks = BlockTable(self._blocks.best_fit(count), floor=floor)
        self._record_peak()
        return blocks

    def reserve(self, blocks: BlockTable, tokens: int) -> None:
        """Allocate slots for `tokens` tokens in total.

        Make all blocks from `blocks.length` on exclusive to the block table. If the last block is shared and partly
        filled, its filled slots are copied to a new block. If the pool is full, PoolFullError is raised and the block
        table is unchanged.
        """
        rewritten = range(blocks.length // BLOCK_SIZE, len(blocks.ids))
        shared = [i for i in rewritten if self._blocks.refs(blocks.ids[i]) > 1]
        count = len(shared) + max(0, blocks_for(tokens) - len(blocks.ids))
        if count == 0:
            return
        self._provide(count)
        fresh = self._blocks.extend(blocks.ids[-1], count) if blocks.ids and not shared else []
        fresh += self._blocks.roomy(count - len(fresh))
        for i, block in zip(shared, fresh, strict=False):
            if self.groups.full:
                self._arena.copy(blocks.ids[i], block, max(0, blocks.length - i * BLOCK_SIZE))
            self._drop([blocks.ids[i]])
            blocks.ids[i] = block
        blocks.ids += fresh[len(shared) :]
        self._record_peak()

    def slides(self, blocks: BlockTable, start: int, stop: int, *, whole: bool = False) -> bool:
        """Return whether `slide` with these arguments would change the block table.

        If so, the caller must write all appended tokens to the pool before it calls `slide`.
        """
        return self.groups.sliding > 0 and self._shown(blocks, start, stop, whole) != blocks.windows.keys()

    def slide(self, blocks: BlockTable, start: int, stop: int, *, whole: bool = False, behind: int = 0) -> None:
        """Move the sliding windows of a sequence so that tokens [start, stop) can be computed.

        Keeps blocks of earlier tokens that the tokens [start, stop) can see. Allocates blocks for new tokens that later
        tokens can see. Frees all other window blocks. A shared, partly filled block is copied, as in `reserve`. The
        call has no effect for a model without sliding-window layers.

        Args:
            blocks: The block table of the sequence.
            start: First token to compute.
            stop: End of the tokens to compute.
            whole: Also allocate blocks for the next complete window, so that the sequence can continue if the pool is
                full later.
            behind: Number of new tokens before the window of `stop` that also get slots, if there are enough free
                blocks.

        Raises:
            PoolFullError: The pool is full. The block table is unchanged.
        """
        if not self.groups.sliding:
            return
        shown, at, filled = self._shown(blocks, start, stop, whole), *divmod(start, BLOCK_SIZE)
        first = max(start, self.groups.first_seen(stop, blocks.floor))
        earlier = range(max(start, first - behind) // BLOCK_SIZE, first // BLOCK_SIZE)
        if (len(shown - blocks.windows.keys()) + len(earlier)) * self.groups.sliding <= self.free_blocks:
            shown.update(earlier)
        shared = at in shown and at in blocks.windows and self._held.refs(blocks.windows[at][0]) > 1
        fresh = sorted(place for place in shown if place not in blocks.windows or (place == at and shared))
        if not fresh and shown == blocks.windows.keys():
            return
        gone = sorted(blocks.windows.keys() - shown)
        alone = [place for place in gone if self._held.refs(blocks.windows[place][0]) == 1]
        self._provide_held((len(fresh) - len(alone)) * self.groups.sliding)
        for place in gone:
            self._windows.release(blocks.windows.pop(place))
        self._give_windows(blocks, fresh, filled)
        self._record_peak()

    def _shown(self, blocks: BlockTable, start: int, stop: int, whole: bool) -> set[int]:
        """Return the indices of the window blocks that the block table would have after `slide`."""
        before = range(self.groups.first_seen(start, blocks.floor) // BLOCK_SIZE, blocks_for(start))
        first = self.groups.first_seen(stop, blocks.floor)
        ahead = self.groups.first_seen(stop - 1, blocks.floor) // BLOCK_SIZE + self.groups.window_blocks if whole else 0
        return {*before, *range(max(start, first) // BLOCK_SIZE, max(blocks_for(stop), ahead))}

    def _give_windows(self, blocks: BlockTable, places: Sequence[int], filled: int) -> None:
        """Allocate window blocks with the indices `places`, contiguous within each layer group.

        If there already is a shared block at an index, its first `filled` slots are copied to the new block.
        """
        self._activate(len(places) * self.groups.sliding, run=len(places))
        columns = [self._held.best_fit(len(places)) for _ in range(self.groups.sliding)]
        for place, window in zip(places, zip(*columns, strict=True), strict=True):
            if (old := blocks.windows.get(place)) is not None:
                for source, target in zip(old, window, strict=True):
                    self._arena.copy(source, target, filled)
                self._windows.release(old)
            blocks.windows[place] = window

    def write(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write KV (see `StoredRows.write`) into blocks that are exclusive to this block table."""
        places = range(start // BLOCK_SIZE, blocks_for(start + k.shape[1]))
        held = self.blocks_of(blocks, self.groups.group[layer], places)
        assert all(self._held.refs(block) == 1 for block in held), "write to a shared block: reserve first"
        super().write(blocks, layer, start, k, v)

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Move KV (see `StoredRows.move`) into a block that is exclusive to this block table."""
        assert self._held.refs(blocks.ids[target // BLOCK_SIZE]) == 1, "write to a shared block: claim first"
        super().move(blocks, layer, source, target)

    def commit(self, blocks: BlockTable, length: int) -> None:
        """Mark the tokens [blocks.length, length) as complete in all layers."""
        assert blocks.length <= length <= blocks.capacity
        blocks.length = length

    def rewind(self, blocks: BlockTable, length: int) -> None:
        """Mark the tokens [length, blocks.length) as incomplete: drafts were rejected, or tokens will be recomputed."""
        assert length <= blocks.length
        blocks.length = length

    def fork(self, blocks: BlockTable) -> BlockTable:
        """Return a new block table that shares all blocks with tokens below `blocks.length`."""
        shared = blocks.ids[: blocks_for(blocks.length)]
        self._blocks.incref(shared)
        for window in blocks.windows.values():
            self._held.incref(window)
        return BlockTable(list(shared), blocks.length, dict(blocks.windows), blocks.floor)

    def match(self, tokens: Sequence[int], *provenance_keys: str, floor: int = 0) -> BlockTable:
        """Return a block table with the longest published prefix of `tokens`, in full blocks.

        At least one token is left to compute. `length` of the result is the number of cached tokens.

        Args:
            tokens: Token ids of the prompt.
            *provenance_keys: Accepted KV provenance keys. For each block, the first key that matches is used.
            floor: First token that sliding-window layers may see. A prefix is only used if all tokens from `floor` on
                that its next token sees have cached window blocks.
        """
        self._unkey_lost()
        blocks = self._tree.match(tokens, *provenance_keys, usable=lambda path: self._windows.usable(path, floor))
        self._blocks.incref(blocks)
        return BlockTable(blocks, len(blocks) * BLOCK_SIZE, self._windows.take(blocks, floor), floor)

    def known_tokens(self, tokens: Sequence[int], *provenance_keys: str) -> int:
        return self._tree.known_tokens(tokens, *provenance_keys)

    def publish(self, blocks: BlockTable, tokens: Sequence[int], provenance_key: str) -> list[int]:
        """Insert the full blocks below `blocks.length` into the prefix tree.

        If another sequence has published the same tokens with the same provenance, the block table is changed to use
        the published block, so that the KV is stored once.

        Args:
            blocks: The block table of the sequence.
            tokens: All tokens of the sequence, from its start.
            provenance_key: KV provenance key. Blocks that are already published keep their own key.

        Returns:
            Indices of the exchanged blocks in the block table. Their KV is in other slots now.
        """
        lost, full = self._unkey_lost(), blocks.length // BLOCK_SIZE
        if barred := self._claimed | lost if self.groups.full else self._claimed:
            full = next((i for i in range(full) if blocks.ids[i] in barred), full)
        assert len(tokens) >= full * BLOCK_SIZE, "publish needs the tokens of every full block"
        fresh, instead = self._tree.insert(tokens, blocks.ids[:full], provenance_key, self._alone)
        self._blocks.incref(fresh)
        self._blocks.incref(instead.values())
        for i, block in instead.items():
            self._drop([blocks.ids[i]])
            blocks.ids[i] = block
        # Only window blocks after the last gap are published: a block before a gap may be incomplete.
        if self.groups.sliding:
            for i in range(self.window_start(blocks, blocks.length) // BLOCK_SIZE, full):
                if blocks.ids[i] in self._tree and lost.isdisjoint(blocks.windows[i]):
                    self._windows.keep(blocks.ids[i], blocks.windows[i])
        return list(instead)

    def drop_prefixes(self) -> bool:
        """Free the published blocks that no sequence uses. Return whether no published block is left."""
        self._forget(self._tree.evict(len(self._tree)))
        return not len(self._tree)

    def claim(self, blocks: BlockTable, index: int) -> bool:
        """Make the block at `index` exclusive to the block table, so that its slots may be overwritten.

        The block and its descendants are removed from the prefix tree. The block is never published again.

        Returns:
            False, without any change, if another sequence uses the block.
        """
        block = blocks.ids[index]
        if block in self._tree and self._blocks.refs(block) == 2:
            self._forget(self._tree.unkey(block))
        if self._blocks.refs(block) > 1:
            return False
        self._claimed.add(block)
        return True

    def truncate(self, blocks: BlockTable, length: int) -> None:
        """Drop the tokens from `length` on. Free the blocks that contain only dropped tokens."""
        assert 0 <= length <= blocks.length
        self.shrink(blocks, length)
        for place in [place for place in blocks.windows if place >= blocks_for(length)]:
            self._windows.release(blocks.windows.pop(place))

    def shrink(self, blocks: BlockTable, length: int) -> None:
        """Free the slots of full-attention layers from `length` on. Their tokens were moved to other slots."""
        blocks.length = length
        held = blocks_for(length)
        self._drop(blocks.ids[held:])
        del blocks.ids[held:]

    def release(self, blocks: BlockTable) -> None:
        """Free all blocks and empty the block table. A second call has no effect."""
        self.truncate(blocks, 0)

    def check_integrity(self) -> None:
        if self.file is not None:
            self.file.check_integrity()
        self._blocks.check_integrity()
        self._held.check_integrity()
        self._tree.check_integrity(self._blocks.refs)
        self._windows.check_integrity(self._tree.__contains__)
        assert all(self._blocks.refs(block) > 0 and block not in self._tree for block in self._claimed)
        assert self._arena.active == self._held.slabs
        assert self.bytes_used <= self.bytes_peak <= self.block_count * self.block_bytes <= self.limit_bytes

    def _provide(self, count: int) -> None:
        """Make sure that `count` blocks of group 0 are free, contiguous if possible.

        Evict blocks and activate slabs as needed.

        Raises:
            PoolFullError: If the pool is full.
        """
        if self.groups.full:
            self._provide_held(count)
            self._activate(count, run=min(count, self.layout.slab_blocks))
        elif (missing := count - self._blocks.free) > 0:
            if self._blocks.slabs * NAMES >= MOST_NAMES:
                self._forget(self._tree.evict(missing))
            while self._blocks.free < count:
                self._blocks.add_slab()

    def _provide_held(self, count: int) -> None:
        """Evict idle blocks until `count` blocks are free.

        Raises:
            PoolFullError: If there are too few idle blocks. No block is evicted then.
        """
        self._check_free(count)
        while (missing := count - self.free_blocks) > 0:
            gone = self._tree.evict(missing) if self.groups.full else []
            self._forget(gone)
            if not gone:
                self._windows.evict(missing)

    def _forget(self, blocks: Sequence[int]) -> None:
        """Drop the prefix tree's references to `blocks`, which were removed from it, and to their window blocks."""
        self._windows.forget(blocks)
        self._blocks.decref(blocks)

    def _unkey_lost(self) -> set[int]:
        """Remove blocks that could not be written to disk, and their descendants, from the prefix tree.

        Return all removed blocks.
        """
        if lost := self.lost:
            self._windows.forget_lost(lost)
        for block in lost if self.groups.full else ():
            if block in self._tree:
                self._forget(self._tree.unkey(block))
        return lost

    def _activate(self, count: int, run: int) -> None:
        """Activate slabs until `count` blocks are free, `run` of them contiguous, or no slab is left."""
        while self._arena.active < self.layout.slabs and (self._held.free < count or self._held.largest_run < run):
            try:
                self._arena.activate()
            except PoolFullError:
                if self._held.free < count:
                    raise
                return
            self._held.add_slab()

    def _alone(self, block: int) -> bool:
        return self._blocks.refs(block) == 1

    def _drop(self, blocks: Sequence[int]) -> None:
        self._claimed.difference_update(self._blocks.decref(blocks))
        self._tree.release(filter(self._alone, blocks))

    def _record_peak(self) -> None:
        self.bytes_peak = max(self.bytes_peak, self.bytes_used)

    def _full(self, count: int, missing: int) -> PoolFullError:
        room, free = (self.block_count, self.block_bytes), self.free_blocks + self.idle_blocks
        return pool_full(count, missing, free, room, self.limit_bytes, disk=self.file is not None)
