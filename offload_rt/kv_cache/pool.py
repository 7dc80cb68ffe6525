"""The KV cache in host memory: allocates, shares and frees blocks for the block tables of sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..config import KVFormatName
from ..core import BLOCK_SIZE, BlockTable, KVPart, ModelGeometry
from ..errors import PoolFullError
from .arena import Arena
from .block_allocator import BlockAllocator
from .disk.file_arena import FileArena
from .disk.file_layout import DiskTier
from .kv_format import make_kv_formats, stored_geometry
from .layer_groups import LayerGroups
from .layout import SLAB_TOKENS, ArenaLayout
from .prefix_cache import PrefixCache
from .process_lock import ProcessLock
from .state_pool import StatePool
from .stored_rows import StoredRows, blocks_for
from .system_memory import memory_limit, pool_full

MOST_TOKENS = 1 << 24  # maximum size without `limit_bytes`: 16 Mi tokens, more than a batch of the longest contexts

# If all layers use sliding windows, blocks of group 0 store no KV and are only ids. The pool then adds `IDS_AT_ONCE`
# ids at a time. When there are `MOST_IDS` ids (4 Mi tokens), it evicts blocks from the prefix tree before it adds ids.
IDS_AT_ONCE, MOST_IDS = 1 << 10, 1 << 16


class HostPool(StoredRows):
    """The KV cache of all sequences, in blocks of 64 tokens, with a fixed limit in bytes.

    Each sequence has a `BlockTable`. `reserve` allocates slots that only this sequence may write, `write` fills them
    layer by layer, and `commit` marks tokens as complete in all layers. `StoredRows` has the methods that read KV.
    Blocks are reference-counted. If the last block of a sequence is partly filled and shared, `reserve` copies it
    before the sequence writes to it. Full blocks are not written again, except by token eviction, which first makes a
    block exclusive (`make_exclusive`).

    `publish` adds full blocks to the prefix tree. They stay there after their sequence ends, so that a later sequence
    with the same prefix can reuse them. If no block is free, the pool activates the next slab of the arena, or evicts
    blocks that only the tree uses, in least-recently-used order from the leaves.

    Layers with sliding windows store their KV in separate blocks (`layer_groups.py`). `slide` allocates the blocks
    inside a sequence's windows and frees the others. Window blocks of published blocks are cached while memory is
    available (`window_blocks.py`).

    Concurrency: several threads that use the pool must hold `lock`. `release`, `truncate`, `reserve`, `slide`,
    `publish` and `make_exclusive` may free, copy or exchange blocks. Before calling one of them, the caller must wait
    for all asynchronous transfers that use these blocks, or order the transfers before the next write to the blocks
    with an event on the write-back stream. Forks and the prefix tree use only tokens below `blocks.length`.

    Args:
        limit_bytes: Limit on host memory in bytes. None means half of the available memory.
        kv_cache_dtype: Storage format (`kv_format.py`).
        pin: Page-lock each slab for CUDA when it is first needed.
        slab_tokens: Number of tokens per slab. Memory is allocated in slabs.
        disk: Options for storing the KV in a file. `limit_bytes` then limits the part in host memory. None stores all
            KV in host memory.
        states: Memory for snapshots of recurrent state (hybrid models). None means that there are no snapshots.

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
        states: StatePool | None = None,
    ) -> None:
        formats = make_kv_formats(kv_cache_dtype, dtype, geometry)
        format, stored = formats[0], stored_geometry(geometry, formats)
        limit = memory_limit(limit_bytes, at_most=stored.kv_bytes(MOST_TOKENS, format.storage))
        if disk is None:
            layout = ArenaLayout.fit(stored, format.storage, limit, slab_tokens)
            arena: Arena | FileArena = Arena(layout, format.storage, pin=pin)
        else:
            arena = FileArena.create(disk, stored, format, limit, slab_tokens)
        self.limit_bytes = limit if disk is None else arena.layout.blocks * arena.layout.block_bytes
        super().__init__(arena, LayerGroups.from_geometry(geometry), formats)
        self.bytes_peak = 0
        self.pins = pin and disk is None
        # Functions that are called with freed blocks, before they can be allocated again.
        self.on_free: list[Callable[[Sequence[int]], None]] = [] if self.file is None else [self.file.discard]
        self._memory_blocks = BlockAllocator(self.layout.slab_blocks, self._report_free)
        # Ids of group 0. They have memory in the arena, unless all layers use sliding windows.
        self._blocks = self._memory_blocks if self.groups.full else BlockAllocator(IDS_AT_ONCE)
        self.states = states
        slots = None if not geometry.states else 0 if states is None else states.slots
        self.cached = PrefixCache(self._blocks, self._memory_blocks, self.groups, slots)
        self.lock = ProcessLock()
        self._exclusive: set[int] = set()

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    @property
    def block_count(self) -> int:
        return self.layout.blocks

    @property
    def free_blocks(self) -> int:
        return self.block_count - self._memory_blocks.used

    @property
    def idle_blocks(self) -> int:
        """Number of blocks that only the prefix tree references. They count as used, but can be evicted."""
        return self.cached.idle_blocks

    @property
    def reuses_prefixes(self) -> bool:
        """Whether sequences can start from a cached prefix. Hybrid models need memory for snapshots."""
        return self.cached.snapshots is None or self.cached.snapshots.slots > 0

    @property
    def grows(self) -> bool:
        """Whether there is space for another 64 tokens of one sequence, including space that eviction would free."""
        return self.free_blocks + self.idle_blocks >= self.groups.blocks_at_once

    @property
    def bytes_used(self) -> int:
        """Size in bytes of all blocks that sequences or the prefix cache use. Shared blocks count once."""
        return self._memory_blocks.used * self.block_bytes

    @property
    def sequence_bytes(self) -> int:
        """Size in bytes of all blocks that sequences use. Shared blocks count once."""
        return (self._memory_blocks.used - self.idle_blocks) * self.block_bytes

    def bytes_of(self, blocks: BlockTable) -> int:
        return (self.groups.full * len(blocks.ids) + self.groups.sliding * len(blocks.windows)) * self.block_bytes

    def bytes_for(self, tokens: int) -> int:
        """Return the largest size in bytes that a sequence of `tokens` tokens can take."""
        return self.groups.blocks(tokens) * self.block_bytes

    def prepare(self, tokens: int) -> None:
        """Activate slabs for up to `tokens` additional tokens, without reserving blocks.

        Call it when a sequence is admitted, so that decoding never pauses to page-lock memory. The call has no effect
        for a pool on disk.
        """
        if self.file is None:
            self._activate(self.groups.blocks(tokens), run=0)

    def check_fits(self, tokens: int) -> None:
        """Raise PoolFullError if `tokens` tokens do not fit even in an empty pool."""
        if (count := self.groups.blocks(tokens)) > self.block_count:
            raise self._full(count, count - self.block_count)

    def check_spare(self, blocks: int) -> None:
        """Raise PoolFullError unless there is space for `blocks` times 64 more tokens."""
        self._check_free(blocks * self.groups.blocks_at_once)

    def check_grows(self, blocks: BlockTable, tokens: int, spare: int) -> None:
        """Raise PoolFullError unless there is space for `tokens` tokens of the sequence and `spare` times 64 more."""
        more = self.groups.blocks(tokens) - self.bytes_of(blocks) // self.block_bytes
        self._check_free(max(0, more) + spare * self.groups.blocks_at_once)

    def _check_free(self, count: int) -> None:
        if (missing := count - self.free_blocks - self.idle_blocks) > 0:
            raise self._full(count, missing)

    # ------------------------------------------------------------------------------------------- blocks of sequences

    def new_block_table(self, tokens: int, floor: int = 0) -> BlockTable:
        """Create an empty block table with slots for `tokens` tokens in full-attention layers, contiguous if possible.

        Sliding-window layers do not see tokens before `floor`. Raises PoolFullError.
        """
        count = blocks_for(tokens)
        self._provide(count)
        blocks = BlockTable(self._blocks.best_fit(count), floor=floor)
        self._record_peak()
        return blocks

    def reserve(self, blocks: BlockTable, tokens: int) -> None:
        """Allocate token slots for `tokens` tokens in total, and make all blocks from `blocks.length` on exclusive.

        If the last block is shared and partly filled, its filled slots are copied to a new block. If the pool is full,
        PoolFullError is raised and the block table is unchanged.
        """
        rewritten = range(blocks.length // BLOCK_SIZE, len(blocks.ids))
        shared = [i for i in rewritten if self._blocks.refs(blocks.ids[i]) > 1]
        count = len(shared) + max(0, blocks_for(tokens) - len(blocks.ids))
        if count == 0:
            return
        self._provide(count)
        fresh = self._blocks.extend(blocks.ids[-1], count) if blocks.ids and not shared else []
        fresh += self._blocks.worst_fit(count - len(fresh))
        for i, block in zip(shared, fresh, strict=False):
            if self.groups.full:
                self._arena.copy(blocks.ids[i], block, max(0, blocks.length - i * BLOCK_SIZE))
            self._drop([blocks.ids[i]])
            blocks.ids[i] = block
        blocks.ids += fresh[len(shared) :]
        self._record_peak()

    def slides(self, blocks: BlockTable, start: int, stop: int, *, next_window: bool = False) -> bool:
        """Return whether `slide` would change the block table.

        If so, KV that is still being appended must be copied to the pool before `slide`.
        """
        if not self.groups.sliding:
            return False
        return self.groups.window_indices(start, stop, blocks.floor, next_window=next_window) != blocks.windows.keys()

    def slide(
        self, blocks: BlockTable, start: int, stop: int, *, next_window: bool = False, before_window: int = 0
    ) -> None:
        """Move the sliding windows of a sequence so that tokens [start, stop) can be computed.

        Keeps blocks of earlier tokens that the tokens [start, stop) attend to. Allocates blocks for new tokens that
        later tokens attend to. Frees all other window blocks. A shared, partly filled block is copied, as in `reserve`.

        Args:
            next_window: Also allocate blocks for the next complete window, so that the sequence can continue if the
                pool is full later.
            before_window: Number of new tokens before the window of `stop` that also get slots, if there are enough
                free blocks.

        Raises:
            PoolFullError: The pool is full. The block table is unchanged.
        """
        if not self.groups.sliding:
            return
        wanted = self.groups.window_indices(start, stop, blocks.floor, next_window=next_window)
        at, filled = divmod(start, BLOCK_SIZE)
        first = max(start, self.groups.first_seen(stop, blocks.floor))
        earlier = range(max(start, first - before_window) // BLOCK_SIZE, first // BLOCK_SIZE)
        if (len(wanted - blocks.windows.keys()) + len(earlier)) * self.groups.sliding <= self.free_blocks:
            wanted.update(earlier)
        shared = at in wanted and at in blocks.windows and self._memory_blocks.refs(blocks.windows[at][0]) > 1
        fresh = sorted(index for index in wanted if index not in blocks.windows or (index == at and shared))
        if not fresh and wanted == blocks.windows.keys():
            return
        gone = sorted(blocks.windows.keys() - wanted)
        # Window blocks that no other sequence uses become free or idle, so that the new blocks can replace them.
        available = sum(self.cached.windows.has_one_user(blocks.windows[index]) for index in gone)
        self._check_free((len(fresh) - available) * self.groups.sliding)
        for index in gone:
            self.cached.windows.release(blocks.windows.pop(index))
        self._provide_memory_blocks(len(fresh) * self.groups.sliding)
        self._allocate_windows(blocks, fresh, filled)
        self._record_peak()

    def _allocate_windows(self, blocks: BlockTable, indices: Sequence[int], filled: int) -> None:
        """Allocate window blocks for the block indices `indices`, contiguous within each layer group.

        A shared block is replaced by a copy of its first `filled` slots.
        """
        self._activate(len(indices) * self.groups.sliding, run=len(indices))
        columns = [self._memory_blocks.best_fit(len(indices)) for _ in range(self.groups.sliding)]
        for index, window in zip(indices, zip(*columns, strict=True), strict=True):
            if (old := blocks.windows.get(index)) is not None:
                for source, target in zip(old, window, strict=True):
                    self._arena.copy(source, target, filled)
                self.cached.windows.release(old)
            blocks.windows[index] = window

    def write(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v `[Hkv, n, d]`, on any device, as KV of the tokens [start, start + n).

        The blocks must be exclusive to this block table. Returns when the copy is complete.
        """
        indices = range(start // BLOCK_SIZE, blocks_for(start + k.shape[1]))
        block_ids = self.blocks_of(blocks, self.groups.group[layer], indices)
        assert self._memory_blocks.exclusive(block_ids), "write to a shared block: reserve first"
        encoded = KVPart(k, v) if self.format.exact else KVPart(k, v).map(self.format_of(layer).encode)
        self.fill(blocks, layer, start, encoded.k, encoded.v)

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Copy the KV of a token slot to slot `target`, whose block must be exclusive to this block table."""
        assert self._memory_blocks.refs(blocks.ids[target // BLOCK_SIZE]) == 1, (
            "write to a shared block: make_exclusive first"
        )
        [row] = self.stored(blocks, layer, range(source, source + 1))
        self.fill(blocks, layer, target, row.k, row.v)

    def commit(self, blocks: BlockTable, length: int) -> None:
        """Mark the tokens [blocks.length, length) as complete in all layers."""
        assert blocks.length <= length <= blocks.capacity
        blocks.length = length

    def rewind(self, blocks: BlockTable, length: int) -> None:
        """Mark the tokens [length, blocks.length) as incomplete: rejected drafts, or tokens to be recomputed."""
        assert length <= blocks.length
        blocks.length = length

    def fork(self, blocks: BlockTable) -> BlockTable:
        """Return a new block table that shares the blocks of the tokens below `blocks.length`."""
        shared = blocks.ids[: blocks_for(blocks.length)]
        self._blocks.incref(shared)
        for window in blocks.windows.values():
            self._memory_blocks.incref(window)
        return BlockTable(list(shared), blocks.length, dict(blocks.windows), blocks.floor)

    def match(self, tokens: Sequence[int], *provenance_keys: str, floor: int = 0) -> BlockTable:
        """Return a block table with the longest published prefix of `tokens`, in full blocks.

        In models with recurrent state, the prefix ends at a snapshot. At least one token is left to compute. `length`
        of the result is the number of cached tokens.

        Args:
            *provenance_keys: Accepted KV provenance keys. For each block, the first key that matches is used.
            floor: First token that sliding-window layers may see. A prefix is only used if window blocks are cached for
                all tokens, from `floor` on, that the first token after the prefix sees.
        """
        self._unpublish_lost()
        return self.cached.match(tokens, *provenance_keys, floor=floor)

    def known_tokens(self, tokens: Sequence[int], *provenance_keys: str) -> int:
        return self.cached.tree.known_tokens(tokens, *provenance_keys)

    def publish(self, blocks: BlockTable, tokens: Sequence[int], provenance_key: str) -> list[int]:
        """Insert the full blocks below `blocks.length` into the prefix tree.

        `tokens` are all tokens of the sequence. If another sequence has published a block with the same tokens and
        provenance, the block table uses this block instead, so that the KV is stored only once. Blocks that are already
        published keep their own provenance key.

        Returns:
            Indices in the block table at which a block was replaced. The KV of these tokens is in other slots now.
        """
        lost, full = self._unpublish_lost(), blocks.length // BLOCK_SIZE
        if barred := self._exclusive | lost if self.groups.full else self._exclusive:
            full = next((i for i in range(full) if blocks.ids[i] in barred), full)
        assert len(tokens) >= full * BLOCK_SIZE, "publish needs the tokens of every full block"
        instead = self.cached.insert(blocks, full, tokens, provenance_key)
        for i, block in instead.items():
            self._drop([blocks.ids[i]])
            blocks.ids[i] = block
        # Only window blocks after the last gap are published: a block before a gap may be incomplete.
        if self.groups.sliding:
            self.cached.keep_windows(blocks, self.window_start(blocks, blocks.length) // BLOCK_SIZE, full, lost)
        return list(instead)

    def drop_prefixes(self) -> bool:
        """Free the published blocks that no sequence uses. Return whether no published block is left."""
        self.cached.evict(len(self.cached))
        return not len(self.cached)

    def make_exclusive(self, blocks: BlockTable, index: int) -> bool:
        """Make the block at `index` exclusive to the block table, so that its slots may be overwritten.

        The block and its descendants leave the prefix tree for good. Return False, without a change, if another
        sequence uses it.
        """
        block = blocks.ids[index]
        if block in self.cached and self._blocks.refs(block) == 2:
            self.cached.remove(block)
        if self._blocks.refs(block) > 1:
            return False
        self._exclusive.add(block)
        return True

    def truncate(self, blocks: BlockTable, length: int) -> None:
        """Drop the tokens from `length` on. Free the blocks that contain only dropped tokens."""
        assert 0 <= length <= blocks.length
        self.shrink(blocks, length)
        for index in [index for index in blocks.windows if index >= blocks_for(length)]:
            self.cached.windows.release(blocks.windows.pop(index))

    def shrink(self, blocks: BlockTable, length: int) -> None:
        """Free the full-attention token slots from `length` on, whose tokens have been moved or evicted."""
        blocks.length = length
        count = blocks_for(length)
        self._drop(blocks.ids[count:])
        del blocks.ids[count:]

    def release(self, blocks: BlockTable) -> None:
        """Free all blocks and empty the block table. A second call has no effect."""
        self.truncate(blocks, 0)

    def check_integrity(self) -> None:
        if self.file is not None:
            self.file.check_integrity()
        self._blocks.check_integrity()
        self._memory_blocks.check_integrity()
        self.cached.check_integrity(self._blocks.refs)
        assert all(self._blocks.refs(block) > 0 and block not in self.cached for block in self._exclusive)
        assert self._arena.active == self._memory_blocks.slabs
        assert self.bytes_used <= self.bytes_peak <= self.block_count * self.block_bytes <= self.limit_bytes

    def _unpublish_lost(self) -> set[int]:
        """Remove blocks whose write to disk failed, with their descendants, from the prefix tree. Return them."""
        if lost := self.lost:
            self.cached.windows.forget_lost(lost)
        for block in lost if self.groups.full else ():
            if block in self.cached:
                self.cached.remove(block)
        return lost

    def _drop(self, blocks: Sequence[int]) -> None:
        self._exclusive.difference_update(self._blocks.decref(blocks))
        self.cached.release(blocks)

    def _provide(self, count: int) -> None:
        """Make `count` block ids free, in one run if possible. Raise PoolFullError otherwise."""
        if self.groups.full:
            self._provide_memory_blocks(count)
            self._activate(count, run=min(count, self.layout.slab_blocks))
        elif (missing := count - self._blocks.free) > 0:
            if self._blocks.slabs * IDS_AT_ONCE >= MOST_IDS:
                self.cached.evict(missing)
            while self._blocks.free < count:
                self._blocks.add_slab()

    def _provide_memory_blocks(self, count: int) -> None:
        """Evict idle blocks until `count` blocks are free. If there are too few, raise PoolFullError and evict none."""
        self._check_free(count)
        while (missing := count - self.free_blocks) > 0:
            if not (self.groups.full and self.cached.evict(missing)):
                self.cached.windows.evict(missing)

    def _activate(self, count: int, run: int) -> None:
        """Activate slabs until `count` blocks are free, of which `run` are contiguous, or until no slab is left."""
        blocks = self._memory_blocks
        while self._arena.active < self.layout.slabs and (blocks.free < count or blocks.largest_run < run):
            try:
                self._arena.activate()
            except PoolFullError:
                if blocks.free < count:
                    raise
                return
            blocks.add_slab()

    def _report_free(self, blocks: Sequence[int]) -> None:
        for report in self.on_free:
            report(blocks)

    def _record_peak(self) -> None:
        self.bytes_peak = max(self.bytes_peak, self.bytes_used)

    def _full(self, count: int, missing: int) -> PoolFullError:
        capacity, free = (self.block_count, self.block_bytes), self.free_blocks + self.idle_blocks
        return pool_full(count, missing, free, capacity, self.limit_bytes, disk=self.file is not None)
