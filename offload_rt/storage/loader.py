"""Loading a stored prefix layer by layer, ahead of the prefill that needs it (CachedAttention §3.2.1)."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor

import torch

from ..core import CHUNK, BlockTable
from ..kv_cache.disk.direct_file import aligned
from ..kv_cache.disk.file_layout import chunk_layer_bytes
from ..kv_cache.disk.homes import Home
from ..kv_cache.pool import HostPool
from ..kv_cache.stored_rows import Span
from .chunk_store import PlacedChunk, StoredChunk

READERS = min(4, os.cpu_count() or 1)
"""Threads that read, check and copy chunks of a layer: one alone brought 0.86 GB/s of cached files into an H100's host,
which computing 8,192 tokens again outruns; two take 0.6 of its time on two busy cores."""


class DamagedChunkError(Exception):
    """A stored chunk, with the key `key`, could not be read after all."""

    def __init__(self, key: bytes) -> None:
        super().__init__(key.hex())
        self.key = key


def read_buffer_layers(load_seconds: float, compute_seconds: float, layers: int) -> int:
    """Returns k, the layers that loading has to be ahead by when the prefill begins, so that it never waits.

    The paper sizes the buffer as S_buf = B (T_load L_hist - T_pref L_new): the bytes that cannot be loaded while the
    new tokens are computed. `load_seconds` is T_load L_hist, `compute_seconds` T_pref L_new, and a layer has
    B load_seconds / layers bytes, hence k = layers (1 - compute / load), and 1 where computing takes longer."""
    if load_seconds <= 0:
        return 1
    return max(1, min(layers, math.ceil(layers * (1 - compute_seconds / load_seconds))))


class ChunkLoader:
    """A thread that brings stored chunks into a block table, layer by layer, at most `ahead` layers ahead of the layer
    that is being computed: it begins at once with the first `ahead`, before any computation. With 0 a layer is loaded
    when it is asked for, and the computation waits for all of it.

    Full chunks that come to a pool on disk stay where they are: their files become their homes (`pool.homes`), and
    loading a layer checks it there.

    The block table must hold the chunks and be nobody else's; it must not be given back before `close`. Rows are
    written only by its readers, each chunk's by one of them, and read only after `wait` of their layer: the thread has
    waited for all of a layer's chunks by then, and an event orders the two.
    """

    def __init__(self, pool: HostPool, blocks: BlockTable, chunks: Seq[PlacedChunk], ahead: int):
        """chunks: with their places in the block table; each has a block for every layer of its group."""
        self._pool, self._chunks, self._ahead = pool, chunks, ahead
        self._layers = len(pool.groups.group)
        tokens = [range(placed.place * CHUNK, placed.place * CHUNK + placed.chunk.count) for placed in chunks]
        self._spans = [pool.spans(blocks, c.group, own)[0] for c, own in zip(chunks, tokens, strict=True)]
        largest = max((placed.chunk.layer_bytes for placed in chunks), default=0)
        # One for each reader: touching fresh memory takes longer than reading a cached file.
        self._blocks: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(READERS):
            self._blocks.put(aligned(max(1, largest)))
        self._homes = [adopt(pool, placed.chunk, span) for placed, span in zip(chunks, self._spans, strict=True)]
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
        """Whether all layers have arrived, whole."""
        with self._changed:
            return self._done == self._layers and self._damaged is None

    @property
    def damaged(self) -> bool:
        """Whether a chunk could not be read: `wait` raises from now on."""
        with self._changed:
            return self._damaged is not None

    @property
    def ended(self) -> bool:
        """Whether nothing more comes by itself: everything has arrived, or something was damaged."""
        return not self._thread.is_alive()

    def wait(self, layer: int) -> None:
        """Returns when layer `layer` is loaded and lets the thread go on to layer + ahead. Raises DamagedChunkError,
        and what else ended the thread."""
        began = time.perf_counter()
        with self._changed:
            self._wanted = max(self._wanted, layer)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done > layer or self._damaged is not None or self._failure is not None)
            self.stall_seconds += time.perf_counter() - began
            if self._failure is not None:
                raise self._failure
            if self._damaged is not None:
                raise DamagedChunkError(self._damaged)

    def close(self) -> None:
        """Ends the thread; layers that have not been loaded are not."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _load(self) -> None:
        try:
            self._load_layers()
        except BaseException as error:  # whoever waits for a layer hears of it
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
        """Loads all chunks of a layer; returns the key of the first that is damaged."""
        group, parts = self._pool.groups.group[layer], zip(self._chunks, self._spans, self._homes, strict=True)
        mine = [(placed.chunk, span, home) for placed, span, home in parts if placed.group == group]
        whole = list(readers.map(lambda each: self._fill(each[0], layer, *each[1:]), mine))
        return next((chunk.key for (chunk, *_), right in zip(mine, whole, strict=True) if not right), None)

    def _may_load(self, layer: int) -> bool:
        """Waits until the layer is near enough; False where nothing more is wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or layer <= self._wanted + self._ahead)
            return not self._closed

    def _fill(self, chunk: StoredChunk, layer: int, span: Span, home: Home | None) -> bool:
        """Loads one layer of one chunk, which is checked before it is copied to its rows, or read at home."""
        layout, format, place = self._pool.layout, self._pool.format, self._pool.groups.place[layer]
        block = self._blocks.get()
        try:
            own = block.numpy().data[: chunk.layer_bytes]
            if home is not None:
                return chunk.check_layer(place, home, own)
            if not chunk.read_layer(place, own):
                return False
            rows = block[: 2 * layout.kv_heads * span.size * layout.row_bytes].view(format.storage)
            k, v = rows.view(layout.kv_heads, span.size, 2, format.width).unbind(2)
            self._pool.fill_span(layer, span, k, v)
            return True
        finally:
            self._blocks.put(block)


def fits(pool: HostPool, chunk: StoredChunk, tokens: int) -> bool:
    """Whether a layer's block of a stored chunk has as many bytes as `tokens` tokens of this pool."""
    return chunk.layer_bytes == chunk_layer_bytes(tokens, pool.layout)


def adopt(pool: HostPool, chunk: StoredChunk, span: Span) -> Home | None:
    """The file of a stored chunk, if it is the home of the pool's chunk at `span` from now on."""
    file, number = pool.file, span.slab * pool.layout.slab_chunks + span.offset // CHUNK
    if file is None or span.size < CHUNK or not file.blank(number):
        return None
    home = chunk.home()
    return home if home is not None and file.house(number, home, range(pool.layout.layers)) else None
