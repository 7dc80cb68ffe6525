"""Transfers for a KV pool on disk.

Sinks and recent tokens are resident on the device. Selected KV is read while the previous layer computes. If a layer
attends to all tokens, their KV is read in order, in parallel with attention. Adjacent layers use different reading
threads. New KV is written asynchronously, and recently used KV is cached in host memory (`kv_cache.disk.file_arena`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from ..core import BLOCK_SIZE, BlockTable, KVPart, ModelGeometry, Selection, VisibleTokens
from ..kv_cache.disk.file_arena import AT_ONCE, FileArena
from ..kv_cache.pool import HostPool
from ..utils.allocator import RecycledMemory
from .base import KVStorage, PendingFetch, PrefilledLayer, RowFetch, Savings, Transfer, join
from .read_ahead import RangeReader, ReadingThread
from .residency import Residency


@dataclass
class _Open:
    """An open sequence, with its resident KV and with its block ids as an array for the reading threads."""

    blocks: BlockTable
    residency: Residency
    _listed: list[int] = field(default_factory=list)
    _blocks: np.ndarray[tuple[int], np.dtype[np.int64]] = field(default_factory=lambda: np.empty(0, np.int64))

    def current(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if self._listed != self.blocks.ids:
            self._listed = list(self.blocks.ids)
            self._blocks = np.array(self._listed, np.int64)
        return self._blocks


class DiskState:
    """The open sequences by block table, and the threads that read KV for them."""

    def __init__(self, pool: HostPool, geometry: ModelGeometry, device: torch.device) -> None:
        assert pool.file is not None, "the pool is not on disk"
        self.pool, self.geometry, self.device, self.file = pool, geometry, device, pool.file
        self._threads = [ReadingThread() for _ in range(AT_ONCE)]
        self.entry_bytes = pool.layout.entry_bytes
        self.open: dict[int, _Open] = {}
        self._staging = RecycledMemory()

    def thread(self, layer: int) -> ReadingThread:
        return self._threads[layer % len(self._threads)]

    def staging(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self.device.type == "cuda":
            return torch.empty(shape, dtype=self.pool.format.storage, pin_memory=True)
        return self._staging.empty(shape, self.pool.format.storage)

    def close(self, blocks: BlockTable) -> None:
        self.open.pop(id(blocks), None)
        if not self.open:
            self._staging.clear()

    def wait(self) -> None:
        for thread in self._threads:
            thread.wait()

    def __getitem__(self, blocks: BlockTable) -> _Open:
        return self.open[id(blocks)]

    def block_tokens(self, layer: int) -> int:
        """Return how many tokens a `RangeReader` reads at a time in `layer`."""
        fits = self.file.budget.staged // 2 // self.pool.token_bytes(layer)
        return max(BLOCK_SIZE, fits // BLOCK_SIZE * BLOCK_SIZE)

    def rows(self, blocks: BlockTable, layer: int, tokens: range) -> KVPart:
        """Read K and V `[Hkv, n, d]` of `tokens` to the device."""
        return join([self._on_device(layer, part) for part in self.pool.stored(blocks, layer, tokens)])

    def _on_device(self, layer: int, part: KVPart) -> KVPart:
        decode = self.pool.format_of(layer).decode
        return part.map(lambda rows: decode(rows.to(self.device)))

    def read_range(self, blocks: BlockTable, layer: int, tokens: range) -> RangeReader:
        """Start reading all KV of `tokens`, part by part."""
        # Also split at the boundaries of the pool's spans, because a part in two spans would have to be copied to new
        # memory.
        size, at = self.block_tokens(layer), tokens.start
        edges = {tokens.start, *range(tokens.start // size * size + size, tokens.stop, size), tokens.stop}
        for span in self.pool.spans(blocks, self.pool.groups.group[layer], tokens):
            edges.add(at)
            at += span.size
        runs = [range(a, b) for a, b in pairwise(sorted(edges)) if a < b]
        return RangeReader(self.thread(layer), lambda own: self.rows(blocks, layer, own), runs)


class DiskStorage(KVStorage):
    """`KVStorage` for a pool on disk. The pool keeps appended KV in memory until it has been written."""

    def __init__(self, state: DiskState) -> None:
        self._state = state

    def open(self, blocks: BlockTable, sinks: int, recent: int, origin: BlockTable | None = None) -> None:
        state = self._state
        if origin is not None:
            state.open[id(blocks)] = _Open(blocks, state[origin].residency.clone())
            return
        residency = Residency(state.geometry, state.pool.format.dtype, state.device, sinks, recent)
        residency.load(state.pool, blocks, lambda layer, tokens: [state.rows(blocks, layer, tokens)])
        state.open[id(blocks)] = _Open(blocks, residency)

    def close(self, blocks: BlockTable) -> None:
        """Wait for pending reads and close the sequence. This is allowed even if `open` has failed."""
        self._state.wait()
        self._state.close(blocks)

    def settle(self, blocks: BlockTable) -> None:
        pass  # no-op, because appended KV can be read from the pool immediately

    def append(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        state = self._state
        state[blocks].residency.store(layer, start, k, v)
        kept = state.pool.stored_range(blocks, layer, range(start, start + k.shape[1]))
        if kept:
            state.pool.write(blocks, layer, kept.start, k[:, kept.start - start :], v[:, kept.start - start :])
        return len(kept) * state.pool.token_bytes(layer)

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        self._state.wait()
        self._state.pool.move(blocks, layer, source, target)
        self._state[blocks].residency.move(layer, source, target)

    def prefill_layer(self, blocks: BlockTable, layer: int, start: int, slices: Iterable[KVPart]) -> PrefilledLayer:
        state, slides = self._state, self._state.pool.groups.group[layer] != 0
        first = state.pool.groups.first_seen(start, blocks.floor) if slides else start
        past = state.read_range(blocks, layer, range(start)).parts if start and not slides else []
        parts = [state.rows(blocks, layer, range(first, start))] if first < start else []
        stop, written = start, 0
        for part in whole_blocks(slices, start):
            written += self.append(blocks, layer, stop, part.k, part.v)
            parts.append(part)
            stop += part.k.shape[1]
        loaded = start - (first if slides else 0)
        return PrefilledLayer(join(parts), first, loaded * state.pool.token_bytes(layer), written, past)


def whole_blocks(parts: Iterable[KVPart], start: int) -> Iterator[KVPart]:
    """Regroup parts with K and V `[Hkv, m, d]` so that they end at block boundaries. The first token is `start`.

    The pool writes complete blocks to disk immediately, but has to buffer incomplete blocks in memory.
    """
    rest: KVPart | None = None
    for part in parts:
        if rest is not None:
            part = join([rest, part])
        size = part.k.shape[1]
        own = size - (start + size) % BLOCK_SIZE
        rest = part if own <= 0 else part.between(own) if own < size else None
        if own > 0:
            yield part.between(0, own)
            start += own
    if rest is not None:
        yield rest


@dataclass(frozen=True)
class _RangeFetch:
    """A pending read of all KV of a token range. `wait` returns the resident KV, followed by the parts of `reader`.

    Resident KV is read in `wait`, because the newest token is stored after the fetch has started.
    """

    reader: RangeReader
    bytes: int
    residency: Residency | None = None
    layer: int = 0
    visible: VisibleTokens | None = None
    savings: Savings | None = None
    copied_tokens: int | None = None

    def wait(self) -> list[KVPart]:
        parts = self.reader.parts
        if self.residency is None or self.visible is None:
            return parts
        return [*self.residency.part(self.layer, self.visible), *parts]


@dataclass(frozen=True)
class _SelectedFetch:
    """A pending read of selected KV entries into `staged` `[Hkv, m + n, planes, width]`.

    Per KV head, `staged` contains m resident entries followed by n selected entries.
    """

    state: DiskState
    reading: Future[None]
    staged: torch.Tensor
    bytes: int
    residency: Residency | None = None
    layer: int = 0
    visible: VisibleTokens | None = None
    savings: Savings | None = None
    copied_tokens: int | None = None

    def wait(self) -> list[KVPart]:
        own, format = [], self.state.pool.format
        if self.residency is not None and self.visible is not None:
            if format.exact:  # This runs while the selected KV is still being read.
                self.residency.copy_to(self.layer, self.visible, self.staged.permute(2, 0, 1, 3))
            else:
                own = self.residency.part(self.layer, self.visible)
        self.reading.result()
        return [*own, KVPart.of(self.staged.to(self.state.device, non_blocking=True), dim=2).map(format.decode)]


class DiskRows(RowFetch):
    """`RowFetch` for a pool on disk.

    KV that several sequences select is read once per sequence, unless it is in the pool's cache.
    """

    def __init__(self, state: DiskState) -> None:
        self._state = state

    def fetch(
        self, blocks: BlockTable, layer: int, visible: VisibleTokens, selection: Selection | None
    ) -> PendingFetch:
        if selection is not None:
            return self._start_selected_read(blocks, layer, selection, visible)
        reader = self._state.read_range(blocks, layer, visible.candidates)
        size = len(visible.candidates) * self._state.pool.token_bytes(layer)
        return _RangeFetch(reader, size, self._state[blocks].residency, layer, visible)

    def fetch_range(self, blocks: BlockTable, layer: int, tokens: range) -> PendingFetch:
        size = len(tokens) * self._state.pool.token_bytes(layer)
        return _RangeFetch(self._state.read_range(blocks, layer, tokens), size)

    def fetch_more(self, blocks: BlockTable, layer: int, extra: Selection) -> PendingFetch:
        return self._start_selected_read(blocks, layer, extra)

    def _start_selected_read(
        self, blocks: BlockTable, layer: int, selection: Selection, visible: VisibleTokens | None = None
    ) -> PendingFetch:
        state, one = self._state, self._state[blocks]
        tokens = selection.known().tokens.cpu()
        resident = visible.resident if visible is not None and state.pool.format.exact else 0
        heads, count = tokens.shape
        staged = state.staging((heads, resident + count, state.pool.layout.planes, state.pool.format.width))
        storage_layer = state.pool.groups.storage_layer[layer]
        reading = state.thread(layer).start(_gather, state.file, storage_layer, one.current(), tokens, resident, staged)
        size = heads * count * state.entry_bytes
        return _SelectedFetch(
            state, reading, staged, size, one.residency if visible is not None else None, layer, visible
        )


def _gather(
    file: FileArena,
    storage_layer: int,
    blocks: np.ndarray[tuple[int], np.dtype[np.int64]],
    tokens: torch.Tensor,
    resident: int,
    staged: torch.Tensor,
) -> None:
    """Read the KV of `tokens` into `staged` `[Hkv, resident + n, planes, width]`, after the first `resident` entries.

    `storage_layer` is the index of the layer within a block, and `blocks` contains the block ids of the sequence.
    """
    kv_heads, count = tokens.shape
    if not count:
        return
    wanted, heads = tokens.numpy(), np.arange(kv_heads)[:, None]
    ids = file.file_layout.entry_ids(storage_layer, blocks[wanted // BLOCK_SIZE], wanted % BLOCK_SIZE, heads)
    into = heads * (resident + count) + np.arange(resident, resident + count)
    file.gather(storage_layer, ids.reshape(-1), staged.view(kv_heads * (resident + count), -1), into.reshape(-1))


class DiskTransfer(Transfer):
    """`Transfer` for a pool on disk. It supports all devices and all KV formats."""

    def __init__(self, pool: HostPool, geometry: ModelGeometry, device: torch.device) -> None:
        self._state = DiskState(pool, geometry, device)
        self.storage, self.rows = DiskStorage(self._state), DiskRows(self._state)

    @property
    def device_bytes(self) -> int:
        return sum(one.residency.nbytes for one in self._state.open.values())

    def check_integrity(self) -> None:
        self._state.wait()
