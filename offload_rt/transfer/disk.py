"""The link to a pool on disk: rows are read while the layer before computes, and those that were used stay in memory.

It is the same idea as across PCIe, one tier lower: sinks and recent tokens are resident on the device, what a layer
selects is asked for as soon as it is guessed, new rows are written behind. Two threads read, rows of a layer in the
order of what is asked for, those of the next one at the same time; which rows are in host memory, and which of a disk's
blocks are read for the others, is the pool's to know (`pool.file_arena`). A layer that attends to everything reads it
in order, block by block, one block ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from ..core import CHUNK, BlockTable, KVPart, ModelGeometry, Selection, Visible
from ..kv_cache.disk.file_arena import AT_ONCE, FileArena
from ..kv_cache.pool import HostPool
from ..utils.allocator import RecycledMemory
from .link import PrefilledLayer, Savings, Ticket
from .read_ahead import BlockRun, ReadingThread
from .residency import Residency


@dataclass
class _Open:
    """What there is of an open sequence: its resident rows, and its chunks as the reading thread takes them."""

    blocks: BlockTable
    residency: Residency
    _listed: list[int] = field(default_factory=list)
    _chunks: np.ndarray[tuple[int], np.dtype[np.int64]] = field(default_factory=lambda: np.empty(0, np.int64))

    def current(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Its chunks, as they are now."""
        if self._listed != self.blocks.chunks:
            self._listed = list(self.blocks.chunks)
            self._chunks = np.array(self._listed, np.int64)
        return self._chunks


class DiskState:
    """The open sequences of a link, by block table, and the threads that read for them."""

    def __init__(self, pool: HostPool, geometry: ModelGeometry, device: torch.device) -> None:
        assert pool.file is not None, "a pool in memory has other links"
        self.pool, self.geometry, self.device, self.file = pool, geometry, device, pool.file
        self._threads = [ReadingThread() for _ in range(AT_ONCE)]
        self.pair_bytes = 2 * pool.layout.row_bytes
        self.token_bytes = pool.layout.kv_heads * self.pair_bytes
        self.open: dict[int, _Open] = {}
        self._staging = RecycledMemory()

    def thread(self, layer: int) -> ReadingThread:
        """The one that reads a layer: what is asked for of it comes in order, of another at the same time."""
        return self._threads[layer % len(self._threads)]

    def staging(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Where rows that are read go, as they are stored; what is in it may be anything."""
        if self.device.type == "cuda":
            return torch.empty(shape, dtype=self.pool.format.storage, pin_memory=True)
        return self._staging.empty(shape, self.pool.format.storage)

    def close(self, blocks: BlockTable) -> None:
        """Forgets a sequence."""
        self.open.pop(id(blocks), None)
        if not self.open:
            self._staging.clear()

    def wait(self) -> None:
        """Returns when nothing is read any more."""
        for thread in self._threads:
            thread.wait()

    def __getitem__(self, blocks: BlockTable) -> _Open:
        return self.open[id(blocks)]

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of a run: two blocks are in memory at once."""
        fits = self.file.shares.staged // 2 // self.token_bytes
        return max(CHUNK, fits // CHUNK * CHUNK)

    def rows(self, blocks: BlockTable, layer: int, tokens: range) -> KVPart:
        """K and V `[Hkv, n, d]` of `tokens` of a layer, on the device."""
        parts = [self._on_device(part) for part in self.pool.stored(blocks, layer, tokens)]
        if len(parts) == 1:
            return parts[0]
        return KVPart(torch.cat([part.k for part in parts], dim=1), torch.cat([part.v for part in parts], dim=1))

    def _on_device(self, part: KVPart) -> KVPart:
        decode = self.pool.format.decode
        return KVPart(decode(part.k.to(self.device)), decode(part.v.to(self.device)))

    def run(self, blocks: BlockTable, layer: int, tokens: range) -> BlockRun:
        """All rows of `tokens`, block by block; the first ones are being read when this returns. A block lies in one
        piece in the pool: nothing is put together from several, which would leave memory with the allocator."""
        size, at = self.block_tokens, tokens.start
        edges = {tokens.start, *range(tokens.start // size * size + size, tokens.stop, size), tokens.stop}
        for span in self.pool.spans(blocks, self.pool.groups.group[layer], tokens):
            edges.add(at)
            at += span.size
        runs = [range(a, b) for a, b in pairwise(sorted(edges)) if a < b]
        return BlockRun(self.thread(layer), lambda own: self.rows(blocks, layer, own), runs, ahead=1)


class DiskStorage:
    """`KVStorage` on disk: what is resident is kept on the device, everything is in the pool when `append` returns (in
    memory of the pool, or on its way to the disk)."""

    def __init__(self, state: DiskState) -> None:
        self._state = state

    def open(self, blocks: BlockTable, sinks: int, recent: int, origin: BlockTable | None = None) -> None:
        """Opens a sequence; the resident rows of one that has tokens already are copied or read."""
        state = self._state
        if origin is not None:
            state.open[id(blocks)] = _Open(blocks, state[origin].residency.clone())
            return
        residency = Residency(state.geometry, state.pool.format.dtype, state.device, sinks, recent)
        for layer in range(state.geometry.layers if blocks.length else 0):
            sinks_here, recent_here = state.geometry.resident(layer, sinks, recent)
            last = range(max(0, blocks.length - recent_here), blocks.length)
            for tokens in (range(min(sinks_here, blocks.length)), state.pool.kept(blocks, layer, last)):
                if tokens:
                    rows = state.rows(blocks, layer, tokens)
                    residency.store(layer, tokens.start, rows.k, rows.v)
        state.open[id(blocks)] = _Open(blocks, residency)

    def close(self, blocks: BlockTable) -> None:
        """Closes a sequence, or one that could not be opened; after it nothing reads the block table's chunks."""
        self._state.wait()
        self._state.close(blocks)

    def settle(self, blocks: BlockTable) -> None:
        """Returns at once: whoever reads what was appended finds it."""

    def append(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        """Keeps the resident ones of k, v `[Hkv, m, d]` and hands to the pool all that have slots."""
        state = self._state
        state[blocks].residency.store(layer, start, k, v)
        kept = state.pool.kept(blocks, layer, range(start, start + k.shape[1]))
        if kept:
            state.pool.write(blocks, layer, kept.start, k[:, kept.start - start :], v[:, kept.start - start :])
        return len(kept) * state.token_bytes

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Copies the row in the pool, behind what is being read; where the target is a resident slot, on the device
        too."""
        self._state.wait()
        self._state.pool.move(blocks, layer, source, target)
        self._state[blocks].residency.move(layer, source, target)

    def displace(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """As `move`: the pool has every row, resident or not."""
        self.move(blocks, layer, source, target)

    def prefill_layer(self, blocks: BlockTable, layer: int, start: int, slices: Iterable[KVPart]) -> PrefilledLayer:
        """Appends the slices. The rows before `start` are the `past`, read block by block beside the computation; of a
        sliding layer, which shows few, they go in front."""
        state, slides = self._state, self._state.pool.groups.group[layer] != 0
        first = state.pool.groups.first_seen(start, blocks.floor) if slides else start
        past = state.run(blocks, layer, range(start)).parts if start and not slides else []
        parts = [state.rows(blocks, layer, range(first, start))] if first < start else []
        stop, written = start, 0
        for part in whole_chunks(slices, start):
            written += self.append(blocks, layer, stop, part.k, part.v)
            parts.append(part)
            stop += part.k.shape[1]
        k, v = torch.cat([part.k for part in parts], dim=1), torch.cat([part.v for part in parts], dim=1)
        loaded = start - (first if slides else 0)
        return PrefilledLayer(KVPart(k, v), first, loaded * state.token_bytes, written, past)

    def extend_layer(self, blocks: BlockTable, layer: int, start: int, new: KVPart) -> PrefilledLayer:
        """As `prefill_layer`."""
        return self.prefill_layer(blocks, layer, start, [new])


def whole_chunks(parts: Iterable[KVPart], start: int) -> Iterator[KVPart]:
    """K and V of tokens from `start` on, `[Hkv, m, d]` each, in parts that end where a chunk does, all but the last: a
    chunk that is filled whole goes to the disk at once, and one that is filled in parts waits in memory."""
    rest: KVPart | None = None
    for part in parts:
        if rest is not None:
            part = KVPart(torch.cat((rest.k, part.k), dim=1), torch.cat((rest.v, part.v), dim=1))
        size = part.k.shape[1]
        own = size - (start + size) % CHUNK
        rest = part if own <= 0 else KVPart(part.k[:, own:], part.v[:, own:]) if own < size else None
        if own > 0:
            yield KVPart(part.k[:, :own], part.v[:, :own])
            start += own
    if rest is not None:
        yield rest


@dataclass(frozen=True)
class _RunTicket:
    """All rows of a range, block by block, behind the resident ones (read at `wait`: the newest is stored after the
    request)."""

    run: BlockRun
    bytes: int
    residency: Residency | None = None
    layer: int = 0
    visible: Visible | None = None
    savings: Savings | None = None

    def wait(self) -> list[KVPart]:
        parts = self.run.parts
        if self.residency is None or self.visible is None:
            return parts
        return [*self.residency.part(self.layer, self.visible), *parts]


@dataclass(frozen=True)
class _RowsTicket:
    """Selected rows on their way into `staged` `[Hkv, m + n, 2, width]`, behind room for m resident ones."""

    state: DiskState
    reading: Future[None]
    staged: torch.Tensor
    bytes: int
    residency: Residency | None = None
    layer: int = 0
    visible: Visible | None = None
    savings: Savings | None = None

    def wait(self) -> list[KVPart]:
        own, format = [], self.state.pool.format
        if self.residency is not None and self.visible is not None:
            if format.exact:  # while the others are still being read
                self.residency.copy_to(self.layer, self.visible, self.staged.permute(2, 0, 1, 3))
            else:
                own = self.residency.part(self.layer, self.visible)
        self.reading.result()
        k, v = self.staged.to(self.state.device, non_blocking=True).unbind(2)
        return [*own, KVPart(format.decode(k), format.decode(v))]


class DiskRows:
    """`RowFetch` from disk. Rows that several sequences select are read once if they stay in memory, else for each."""

    def __init__(self, state: DiskState) -> None:
        self._state = state

    def fetch(self, blocks: BlockTable, layer: int, visible: Visible, selection: Selection | None) -> Ticket:
        """A ticket of the selected rows, or of all candidates."""
        if selection is not None:
            return self._rows(blocks, layer, selection, visible)
        run = self._state.run(blocks, layer, visible.candidates)
        size = len(visible.candidates) * self._state.token_bytes
        return _RunTicket(run, size, self._state[blocks].residency, layer, visible)

    def fetch_range(self, blocks: BlockTable, layer: int, tokens: range) -> Ticket:
        """A ticket of all rows of `tokens`."""
        return _RunTicket(self._state.run(blocks, layer, tokens), len(tokens) * self._state.token_bytes)

    def fetch_together(
        self,
        block_tables: Sequence[BlockTable],
        layer: int,
        visible: Sequence[Visible],
        selections: Sequence[Selection],
    ) -> list[Ticket]:
        """A ticket for each sequence."""
        each = zip(block_tables, visible, selections, strict=True)
        return [self._rows(blocks, layer, selection, seen) for blocks, seen, selection in each]

    def fetch_more(self, blocks: BlockTable, layer: int, extra: Selection) -> Ticket:
        """A ticket of the extra rows alone."""
        return self._rows(blocks, layer, extra)

    def _rows(self, blocks: BlockTable, layer: int, selection: Selection, visible: Visible | None = None) -> Ticket:
        """Starts reading what was selected; with `visible`, behind room for the resident rows."""
        state, one = self._state, self._state[blocks]
        tokens = selection.known().tokens.cpu()
        room = visible.resident if visible is not None and state.pool.format.exact else 0
        heads, count = tokens.shape
        staged = state.staging((heads, room + count, 2, state.pool.format.width))
        place = state.pool.groups.place[layer]
        reading = state.thread(layer).start(_gather, state.file, place, one.current(), tokens, room, staged)
        size = heads * count * state.pair_bytes
        return _RowsTicket(state, reading, staged, size, one.residency if visible is not None else None, layer, visible)


def _gather(
    file: FileArena,
    place: int,
    chunks: np.ndarray[tuple[int], np.dtype[np.int64]],
    tokens: torch.Tensor,
    room: int,
    staged: torch.Tensor,
) -> None:
    """Rows of tokens int64 `[Hkv, n]` of a sequence with these chunks into staged `[Hkv, room + n, 2, width]`, behind
    the first `room` of each head."""
    kv_heads, count = tokens.shape
    if not count:
        return
    wanted, heads = tokens.numpy(), np.arange(kv_heads)[:, None]
    ids = file.places.ids(place, chunks[wanted // CHUNK], wanted % CHUNK, heads)
    into = heads * (room + count) + np.arange(room, room + count)
    file.gather(place, ids.reshape(-1), staged.view(kv_heads * (room + count), -1), into.reshape(-1))


class DiskLink:
    """`Link` to a pool on disk, for any device and KV format."""

    def __init__(self, pool: HostPool, geometry: ModelGeometry, device: torch.device) -> None:
        self._state = DiskState(pool, geometry, device)
        self.storage, self.rows = DiskStorage(self._state), DiskRows(self._state)
        self.batched = None

    @property
    def device_bytes(self) -> int:
        """Bytes of the resident rows of all open sequences."""
        return sum(one.residency.nbytes for one in self._state.open.values())

    def working_set_bytes(self, blocks: BlockTable) -> int:
        """0: rows that stay are the pool's, in host memory."""
        return 0

    def check_integrity(self) -> None:
        """Waits for what is being read: nobody else looks at the pool then."""
        self._state.wait()
