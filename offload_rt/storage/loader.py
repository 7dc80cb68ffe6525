"""Loading of stored KV layer by layer, while the prefill computes earlier layers (CachedAttention §3.2.1)."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from ..core import BLOCK_SIZE, BlockTable, KVPart
from ..kv_cache.disk.direct_file import aligned
from ..kv_cache.disk.extents import StoredExtent
from ..kv_cache.pool import HostPool
from ..kv_cache.stored_rows import SlotSpan
from .block_file import StoredBlock

READERS = min(4, os.cpu_count() or 1)
"""Number of threads that read, verify and copy the blocks of a layer.

One thread is not enough: on an H100 host, it reads cached files at only 0.86 GB/s, and the GPU can compute the KV of
8,192 tokens in less time. On two busy cores, two threads take 0.6 times as long as one.
"""


class PlacedBlock(NamedTuple):
    block_index: int
    block: StoredBlock
    group: int = 0


class DamagedBlockError(Exception):
    def __init__(self, key: bytes) -> None:
        super().__init__(key.hex())
        self.key = key


def read_buffer_layers(load_seconds: float, compute_seconds: float, layers: int) -> int:
    """Return how many layers to load before the prefill starts, so that the prefill never waits.

    In the paper, the read buffer has space for the fraction 1 - T_pref L_new / (T_load L_hist) of the stored KV.

    Args:
        load_seconds: T_load L_hist in the paper, the time to load the stored prefix.
        compute_seconds: T_pref L_new in the paper, the time to compute the new tokens.
    """
    if load_seconds <= 0:
        return 1
    return max(1, min(layers, math.ceil(layers * (1 - compute_seconds / load_seconds))))


class BlockLoader:
    """Loads stored blocks into a block table, layer by layer, on a background thread.

    The KV of a layer may be read after `wait(layer)`. The thread loads at most `ahead` layers beyond the layer of the
    last `wait`.

    If the KV pool is on disk, it reads full blocks directly from the store (see `kv_cache.disk.extents`). The loader
    then only verifies these blocks, and does not copy them.

    Args:
        blocks: Block table to fill. No other block table may share its blocks. Release them only after `close`.
        placed_blocks: Stored blocks with their indices in the block table. Each must contain all layers of its group.
    """

    def __init__(self, pool: HostPool, blocks: BlockTable, placed_blocks: Seq[PlacedBlock], ahead: int):
        self._pool, self._placed, self._ahead = pool, placed_blocks, ahead
        self._layers = len(pool.groups.group)
        tokens = [
            range(placed.block_index * BLOCK_SIZE, placed.block_index * BLOCK_SIZE + placed.block.count)
            for placed in placed_blocks
        ]
        self._spans = [pool.spans(blocks, c.group, own)[0] for c, own in zip(placed_blocks, tokens, strict=True)]
        largest = max((placed.block.layer_bytes for placed in placed_blocks), default=0)
        # Each reader reuses one buffer, because touching new memory takes longer than reading a cached file.
        self._buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(READERS):
            self._buffers.put(aligned(max(1, largest)))
        self._extents = [
            attach(pool, placed.block, span) for placed, span in zip(placed_blocks, self._spans, strict=True)
        ]
        self._wanted, self._done = -1, 0
        self._damaged: bytes | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self.load_seconds = 0.0
        self.stall_seconds = 0.0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._load, name="offload-rt loader", daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        with self._changed:
            return self._done == self._layers and self._damaged is None

    @property
    def damaged(self) -> bool:
        """Whether a block could not be read. `wait` then raises DamagedBlockError."""
        with self._changed:
            return self._damaged is not None

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, layer: int) -> None:
        """Wait until `layer` is loaded. Up to `ahead` more layers are then loaded in the background.

        Raises DamagedBlockError if a stored block could not be read. If another error ended the loader thread, that
        error is raised.
        """
        began = time.perf_counter()
        with self._changed:
            self._wanted = max(self._wanted, layer)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done > layer or self._damaged is not None or self._failure is not None)
            self.stall_seconds += time.perf_counter() - began
            if self._failure is not None:
                raise self._failure
            if self._damaged is not None:
                raise DamagedBlockError(self._damaged)

    def close(self) -> None:
        """Stop the loader thread. Layers that it has not started to load are skipped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _load(self) -> None:
        try:
            self._load_layers()
        except BaseException as error:  # `wait` re-raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _load_layers(self) -> None:
        with ThreadPoolExecutor(READERS, "offload-rt reader") as readers:
            for layer in range(self._layers):
                if not self._may_load(layer):
                    return
                began = time.perf_counter()
                bad = self._load_layer(layer, readers)
                with self._changed:
                    self.load_seconds += time.perf_counter() - began
                    self._damaged = bad
                    self._done = layer + 1
                    self._changed.notify_all()
                if bad is not None:
                    return

    def _load_layer(self, layer: int, readers: ThreadPoolExecutor) -> bytes | None:
        if layer not in self._pool.groups.kv_layers:
            return None
        group, parts = self._pool.groups.group[layer], zip(self._placed, self._spans, self._extents, strict=True)
        mine = [(placed.block, span, extent) for placed, span, extent in parts if placed.group == group]
        intact = list(readers.map(lambda each: self._fill(each[0], layer, *each[1:]), mine))
        return next((block.key for (block, *_), right in zip(mine, intact, strict=True) if not right), None)

    def _may_load(self, layer: int) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or layer <= self._wanted + self._ahead)
            return not self._closed

    def _fill(self, block: StoredBlock, layer: int, span: SlotSpan, extent: StoredExtent | None) -> bool:
        return all(
            self._fill_storage_layer(block, storage_layer, span, extent)
            for storage_layer in self._pool.groups.storage_layers(layer)
        )

    def _fill_storage_layer(
        self, block: StoredBlock, storage_layer: int, span: SlotSpan, extent: StoredExtent | None
    ) -> bool:
        layout, format = self._pool.layout, self._pool.format
        buffer = self._buffers.get()
        try:
            own = buffer.numpy().data[: block.layer_bytes]
            if extent is not None:
                return block.read_from(extent.file.handle, storage_layer, own)
            if not block.read_layer(storage_layer, own):
                return False
            rows = buffer[: layout.kv_heads * span.size * layout.entry_bytes].view(format.storage)
            part = KVPart.of(rows.view(layout.kv_heads, span.size, layout.planes, format.width), dim=2)
            self._pool.fill_storage_layer(storage_layer, span, part.k, part.v)
            return True
        finally:
            self._buffers.put(buffer)


def attach(pool: HostPool, block: StoredBlock, span: SlotSpan) -> StoredExtent | None:
    """Let the pool block at `span` use the KV in the file of a stored block. Return the extent of the stored block.

    Return None if the KV must be copied instead, for example because the pool is not on disk.
    """
    file, number = pool.file, span.slab * pool.layout.slab_blocks + span.offset // BLOCK_SIZE
    if file is None or span.size < BLOCK_SIZE or not file.is_empty(number):
        return None
    extent = block.extent()
    return extent if extent is not None and file.attach(number, extent, range(pool.layout.layers)) else None
