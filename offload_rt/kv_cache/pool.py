"""The KV cache in host memory: allocates, shares and frees blocks for the block tables of sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..config import KVFormatName
from ..core import BLOCK_SIZE, BlockTable, KVPart, ModelGeometry
from .arena import Arena
from .block_allocator import BlockAllocator
from .disk.file_arena import FileArena
from .disk.file_layout import DiskTier
from .kv_format import make_kv_formats, stored_geometry
from .layer_groups import LayerGroups
from .layout import SLAB_TOKENS, ArenaLayout
from .memory_blocks import MemoryBlocks
from .prefix_cache import PrefixCache
from .process_lock import ProcessLock
from .sliding_windows import SlidingWindows
from .state_pool import StatePool
from .stored_rows import StoredRows, blocks_for
from .system_memory import memory_limit

MOST_TOKENS = 1 << 24  # maximum size if `limit_bytes` is None: more than a batch of the longest contexts needs

# If all layers use sliding windows, blocks of group 0 store no KV and are only ids. The pool then adds `IDS_AT_ONCE`
# ids at a time. Once there are `MOST_IDS` ids (4 Mi tokens), it evicts blocks from the prefix tree before adding ids.
IDS_AT_ONCE, MOST_IDS = 1 << 10, 1 << 16


class HostPool(StoredRows):
    """The KV cache of all sequences, in blocks of 64 tokens, with a fixed limit in bytes.

    Each sequence has a `BlockTable`. `reserve` allocates token slots, `write` fills them layer by layer, and `commit`
    marks tokens as complete in all layers. `StoredRows` has the methods that read KV.

    Blocks are reference-counted. `publish` adds full blocks to the prefix tree. They stay there after their sequence
    ends, so that later sequences with the same prefix can use them. `reserve` replaces a shared, partly filled block
    with a copy. Full blocks are only overwritten by token eviction, which calls `make_exclusive` first.

    If no block is free, the pool activates the next slab of the arena. If no slab is left, it evicts blocks that only
    the prefix tree uses, least recently used first. Sliding-window layers have separate blocks (see `sliding.slide`).

    Concurrency: threads that share the pool must hold `lock`. `release`, `truncate`, `reserve`, `publish`,
    `make_exclusive` and `sliding.slide` may free, copy or exchange blocks. Before these calls, the caller must wait for
    all asynchronous transfers of the blocks. Alternatively, an event on the write-back stream must ensure that the
    transfers end before the next write.

    Args:
        limit_bytes: Limit on host memory in bytes. None means half of the available memory.
        kv_cache_dtype: Storage format (`kv_format.py`).
        pin: Page-lock each slab for CUDA when it is activated.
        slab_tokens: Number of tokens per slab.
        disk: Options for storing the KV in a file. `limit_bytes` then limits only the host memory.
        states: Memory for snapshots of recurrent state (hybrid models). None disables snapshots.

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
        self.pins = pin and disk is None
        # Functions that are called with the freed blocks, before these blocks can be allocated again.
        self.on_free: list[Callable[[Sequence[int]], None]] = [] if self.file is None else [self.file.discard]
        memory_blocks = BlockAllocator(self.layout.slab_blocks, self._report_free)
        # Ids of group 0. Unless all layers use sliding windows, these ids have memory in the arena.
        self._blocks = memory_blocks if self.groups.full else BlockAllocator(IDS_AT_ONCE)
        self.states = states
        slots = None if not geometry.states else 0 if states is None else states.slots
        self.cached = PrefixCache(self._blocks, memory_blocks, self.groups, slots)
        self._memory = MemoryBlocks(
            arena, memory_blocks, self.cached, evicts_tree=self.groups.full, limit_bytes=self.limit_bytes
        )
        self.sliding = SlidingWindows(arena, self._memory, self.cached.windows, self.groups)
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
        return self._memory.free

    @property
    def idle_blocks(self) -> int:
        """Number of blocks that only the prefix tree references. They count as used but can be evicted."""
        return self.cached.idle_blocks

    @property
    def reuses_prefixes(self) -> bool:
        """Whether sequences can start from a cached prefix. For hybrid models, this requires memory for snapshots."""
        return self.cached.snapshots is None or self.cached.snapshots.slots > 0

    @property
    def can_grow(self) -> bool:
        """Whether one sequence can grow by 64 tokens, possibly after an eviction."""
        return self._memory.available >= self.groups.blocks_at_once

    @property
    def bytes_used(self) -> int:
        """Size in bytes of all blocks in sequences and in the prefix cache. Shared blocks count once."""
        return self._memory.allocator.used * self.block_bytes

    @property
    def sequence_bytes(self) -> int:
        """Size in bytes of all blocks in sequences. Shared blocks count once."""
        return (self._memory.allocator.used - self.idle_blocks) * self.block_bytes

    def bytes_of(self, blocks: BlockTable) -> int:
        return (self.groups.full * len(blocks.ids) + self.groups.sliding * len(blocks.windows)) * self.block_bytes

    def bytes_for(self, tokens: int) -> int:
        """Return the maximum size in bytes that the KV of a sequence with `tokens` tokens can have."""
        return self.groups.blocks(tokens) * self.block_bytes

    def prepare(self, tokens: int) -> None:
        """Activate slabs for up to `tokens` additional tokens, so that decoding does not wait for page-locking.

        Call this when a sequence is admitted. It does not allocate blocks, and has no effect for a pool on disk.
        """
        if self.file is None:
            self._memory.activate(self.groups.blocks(tokens), run=0)

    def check_fits(self, tokens: int) -> None:
        """Raise PoolFullError if `tokens` tokens do not fit even in an empty pool."""
        if (count := self.groups.blocks(tokens)) > self.block_count:
            raise self._memory.full_error(count, count - self.block_count)

    def check_spare(self, blocks: int) -> None:
        """Raise PoolFullError unless `blocks` sequences can each grow by 64 tokens."""
        self._memory.check(blocks * self.groups.blocks_at_once)

    def check_can_grow(self, blocks: BlockTable, tokens: int, spare: int) -> None:
        """Raise PoolFullError unless the sequence can grow to `tokens` tokens.

        In addition, `spare` other sequences must be able to grow by 64 tokens each.
        """
        more = self.groups.blocks(tokens) - self.bytes_of(blocks) // self.block_bytes
        self._memory.check(max(0, more) + spare * self.groups.blocks_at_once)

    # ------------------------------------------------------------------------------------------- blocks of sequences

    def new_block_table(self, tokens: int, floor: int = 0) -> BlockTable:
        """Create an empty block table with slots for `tokens` tokens in full-attention layers. Raises PoolFullError.

        Sliding-window layers will not attend to tokens before `floor`.
        """
        count = blocks_for(tokens)
        self._provide(count)
        return BlockTable(self._blocks.best_fit(count), floor=floor)

    def reserve(self, blocks: BlockTable, tokens: int) -> None:
        """Allocate slots for `tokens` tokens in total. Make the blocks of the tokens from `blocks.length` on exclusive.

        A partly filled block that is shared is replaced with a copy. If the pool is full, PoolFullError is raised and
        the block table stays unchanged.
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

    def write(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v `[Hkv, n, d]` as the KV of tokens [start, start + n), and wait for the copy.

        The tensors may be on any device. The blocks must be exclusive to this block table.
        """
        indices = range(start // BLOCK_SIZE, blocks_for(start + k.shape[1]))
        block_ids = self.blocks_of(blocks, self.groups.group[layer], indices)
        assert self._memory.allocator.exclusive(block_ids), "write to a shared block: reserve first"
        encoded = KVPart(k, v) if self.format.exact else KVPart(k, v).map(self.format_of(layer).encode)
        self.fill(blocks, layer, start, encoded.k, encoded.v)

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Copy the KV in token slot `source` to slot `target`, whose block must be exclusive to the block table."""
        assert self._memory.allocator.refs(blocks.ids[target // BLOCK_SIZE]) == 1, (
            "write to a shared block: make_exclusive first"
        )
        [row] = self.stored(blocks, layer, range(source, source + 1))
        self.fill(blocks, layer, target, row.k, row.v)

    def commit(self, blocks: BlockTable, length: int) -> None:
        """Mark the tokens [blocks.length, length) as complete in all layers."""
        assert blocks.length <= length <= blocks.capacity
        blocks.length = length

    def rewind(self, blocks: BlockTable, length: int) -> None:
        """Mark the tokens from `length` on as incomplete, for example because they are rejected draft tokens."""
        assert length <= blocks.length
        blocks.length = length

    def fork(self, blocks: BlockTable) -> BlockTable:
        """Return a new block table that shares the blocks of the first `blocks.length` tokens."""
        shared = blocks.ids[: blocks_for(blocks.length)]
        self._blocks.incref(shared)
        for window in blocks.windows.values():
            self._memory.allocator.incref(window)
        return BlockTable(list(shared), blocks.length, dict(blocks.windows), blocks.floor)

    def match(self, tokens: Sequence[int], *provenance_keys: str, floor: int = 0) -> BlockTable:
        """Return a block table with the longest published prefix of `tokens`. Its `length` counts the cached tokens.

        The prefix consists of full blocks and leaves at least one token to compute. In models with recurrent state, it
        ends at a snapshot.

        Args:
            *provenance_keys: Accepted KV provenance keys. For each block, the first key that matches is used.
            floor: First token that sliding-window layers attend to. Window blocks that the first token after the prefix
                attends to must be cached, except for tokens before `floor`.
        """
        self._unpublish_lost()
        return self.cached.match(tokens, *provenance_keys, floor=floor)

    def known_tokens(self, tokens: Sequence[int], *provenance_keys: str) -> int:
        return self.cached.tree.known_tokens(tokens, *provenance_keys)

    def publish(self, blocks: BlockTable, tokens: Sequence[int], provenance_key: str) -> list[int]:
        """Insert the full blocks of the first `blocks.length` tokens into the prefix tree.

        `tokens` contains all tokens of the sequence. If the tree already has a block with the same tokens and KV
        provenance key, this block replaces the sequence's block in the block table. Blocks that are already published
        keep their key.

        Returns:
            Indices of the replaced blocks in the block table. Their tokens are now in different slots.
        """
        lost, full = self._unpublish_lost(), blocks.length // BLOCK_SIZE
        if barred := self._exclusive | lost if self.groups.full else self._exclusive:
            full = next((i for i in range(full) if blocks.ids[i] in barred), full)
        assert len(tokens) >= full * BLOCK_SIZE, "publish needs the tokens of every full block"
        instead = self.cached.insert(blocks, full, tokens, provenance_key)
        for i, block in instead.items():
            self._drop([blocks.ids[i]])
            blocks.ids[i] = block
        # Publish only window blocks after the last gap, because a block before a gap may be incomplete.
        if self.groups.sliding:
            self.cached.keep_windows(blocks, self.window_start(blocks, blocks.length) // BLOCK_SIZE, full, lost)
        return list(instead)

    def drop_prefixes(self) -> bool:
        """Free the published blocks that no sequence uses. Return True if no published block is left."""
        self.cached.evict(len(self.cached))
        return not len(self.cached)

    def make_exclusive(self, blocks: BlockTable, index: int) -> bool:
        """Make the block at `index` exclusive to the block table, so that its slots can be overwritten.

        The block and its descendants leave the prefix tree, and the block is not published again. If another sequence
        uses the block, nothing changes and False is returned.
        """
        block = blocks.ids[index]
        if block in self.cached and self._blocks.refs(block) == 2:
            self.cached.remove(block)
        if self._blocks.refs(block) > 1:
            return False
        self._exclusive.add(block)
        return True

    def truncate(self, blocks: BlockTable, length: int) -> None:
        """Drop the tokens from `length` on, and free the blocks that have no tokens left."""
        assert 0 <= length <= blocks.length
        self.shrink(blocks, length)
        for index in [index for index in blocks.windows if index >= blocks_for(length)]:
            self.cached.windows.release(blocks.windows.pop(index))

    def shrink(self, blocks: BlockTable, length: int) -> None:
        """Free the full-attention blocks beyond the first `length` token slots."""
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
        self._memory.check_integrity()
        self.cached.check_integrity(self._blocks.refs)
        assert all(self._blocks.refs(block) > 0 and block not in self.cached for block in self._exclusive)
        assert self.block_count * self.block_bytes <= self.limit_bytes

    def _unpublish_lost(self) -> set[int]:
        """Remove blocks whose write to disk failed, and their descendants, from the prefix tree.

        Return the failed blocks.
        """
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
        if self.groups.full:
            self._memory.provide(count, run=min(count, self.layout.slab_blocks))
        elif (missing := count - self._blocks.free) > 0:
            if self._blocks.slabs * IDS_AT_ONCE >= MOST_IDS:
                self.cached.evict(missing)
            while self._blocks.free < count:
                self._blocks.add_slab()

    def _report_free(self, blocks: Sequence[int]) -> None:
        for report in self.on_free:
            report(blocks)
