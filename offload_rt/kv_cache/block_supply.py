"""Blocks of the KV pool: activates memory of the arena, evicts cached blocks, and checks the capacity."""

from __future__ import annotations

import os
import threading

import torch

from ..config import KVFormatName
from ..core import BlockTable, ModelGeometry
from ..errors import InputError, PoolFullError
from .arena import Arena
from .block_allocator import BlockAllocator
from .disk.file_arena import FileArena
from .disk.file_layout import DiskTier
from .kv_format import make_kv_formats, stored_geometry
from .layer_groups import LayerGroups
from .layout import SLAB_TOKENS, ArenaLayout
from .prefix_cache import PrefixCache
from .state_pool import StatePool
from .stored_rows import StoredRows
from .system_memory import memory_limit, pool_full

MOST_TOKENS = 1 << 24  # maximum size without `limit_bytes`: 16 Mi tokens, more than a batch of the longest contexts

# If all layers use sliding windows, blocks of group 0 store no KV and are only ids. The pool then adds `IDS_AT_ONCE`
# ids at a time. When there are `MOST_IDS` ids (4 Mi tokens), it evicts blocks from the prefix tree before it adds ids.
IDS_AT_ONCE, MOST_IDS = 1 << 10, 1 << 16


class ProcessLock:
    """A re-entrant lock that raises InputError if a forked child process enters it.

    The child must not use the runtime, because it has none of the parent's threads (savers, loaders) but shares the
    parent's file locks on stores.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            raise InputError(
                f"this runtime was loaded in process {self._process} and cannot be used in a forked process: load it "
                "after the fork, or start workers with multiprocessing's start method 'spawn'"
            )
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


class BlockSupply(StoredRows):
    """Supplies the blocks of a pool. If none is free, it activates memory or evicts idle blocks of the prefix cache.

    Args:
        geometry: Dimensions of the model.
        dtype: Data type of the model's KV.
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
        on_free = () if self.file is None else (self.file.discard,)
        self._memory_blocks = BlockAllocator(self.layout.slab_blocks, *on_free)
        # Ids of group 0. They have memory in the arena, unless all layers use sliding windows.
        self._blocks = self._memory_blocks if self.groups.full else BlockAllocator(IDS_AT_ONCE)
        self.states = states
        slots = None if not geometry.states else 0 if states is None else states.slots
        self.cached = PrefixCache(self._blocks, self._memory_blocks, self.groups, slots)
        self.lock = ProcessLock()
        self._claimed: set[int] = set()

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
        """Whether a new sequence can start from a cached prefix.

        This is False for models with recurrent state if the pool has no memory for snapshots.
        """
        return self.cached.snapshots is None or self.cached.snapshots.slots > 0

    @property
    def grows(self) -> bool:
        """Whether there is space for another 64 tokens of one sequence, including space that eviction would free."""
        return self.free_blocks + self.idle_blocks >= self.groups.blocks_at_once

    @property
    def bytes_used(self) -> int:
        """Size in bytes of all blocks that sequences or the prefix cache use, at most `limit_bytes`.

        Shared blocks count once.
        """
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

        Call it when a sequence is admitted, with the length of its prompt and of the output. Decoding then never pauses
        to page-lock memory. A pool on disk allocates space on demand, so the call has no effect.
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
        """Raise PoolFullError if the sequence cannot grow to `tokens` tokens.

        The pool must also have space left for `spare` times 64 more tokens.
        """
        more = self.groups.blocks(tokens) - self.bytes_of(blocks) // self.block_bytes
        self._check_free(max(0, more) + spare * self.groups.blocks_at_once)

    def _check_free(self, count: int) -> None:
        if (missing := count - self.free_blocks - self.idle_blocks) > 0:
            raise self._full(count, missing)

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
        """Evict idle blocks until `count` blocks are free.

        Raise PoolFullError, without evicting any, if there are too few.
        """
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

    def _record_peak(self) -> None:
        self.bytes_peak = max(self.bytes_peak, self.bytes_used)

    def _full(self, count: int, missing: int) -> PoolFullError:
        capacity, free = (self.block_count, self.block_bytes), self.free_blocks + self.idle_blocks
        return pool_full(count, missing, free, capacity, self.limit_bytes, disk=self.file is not None)
