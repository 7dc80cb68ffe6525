"""The host pool's facade: block tables of chunks, and the rows behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..config import KVFormatName
from ..core import CHUNK, BlockTable, ModelGeometry
from ..errors import PoolFullError
from .arena import Arena
from .chunks import ChunkTable
from .disk.disk_tier import DiskTier, open_file_arena
from .kv_format import make_kv_format
from .layer_groups import LayerGroups
from .layout import SLAB_TOKENS, ArenaLayout
from .machine import memory_limit, pool_full
from .prefix_tree import PrefixTree
from .process_lock import ProcessLock
from .stored_rows import Rows, StoredRows, chunks_for
from .window_chunks import WindowChunks

MOST_TOKENS = 1 << 24
"""Token slots that a pool without a limit of its own stops at: 16 Mi, more than a batch of the longest contexts."""

NAMES, MOST_NAMES = 1 << 10, 1 << 16
"""Where every layer slides, chunks of group 0 have no rows: so many names of them are made at once, and from so many on
(4 Mi tokens) those that only the prefix tree knows are used again first."""


class HostPool(StoredRows):
    """All KV of all sequences in host memory, in chunks of 64 tokens, within a hard limit of bytes.

    A sequence holds a `BlockTable`: `reserve` gives it slots that it alone may write, `write` fills them layer by
    layer, `commit` declares tokens complete in all layers, `runs` and `row_base` say where they lie. Chunks are shared
    by counting references; the only shared chunk that a sequence would write into is its partly filled last one, and
    `reserve` copies that one first. A full chunk is never written again, unless eviction claims it (`claim`).

    Full chunks that were published stay in the prefix tree when their sequence ends, for the next one with the same
    beginning; they are the first to go (least recently used, leaf first) when a sequence needs room.

    Rows of sliding layers lie in chunks of their own (`layer_groups.py`): `slide` gives a sequence those that its
    windows show, and takes back the others. What a published chunk has of them is kept for others as long as there is
    room (`window_chunks.py`).

    Order. The pool never sees a stream and never waits: it is called from one thread at a time (who calls holds `lock`
    where there are several), and its calls take effect in the order they are made. What runs later than the call that
    started it (a copy to the device, a write-back) belongs to the link, and the link's owner calls `release`,
    `truncate`, `reserve`, `slide`, `publish` and `claim` only when every read and write of the block table's chunks
    that these calls may free, copy or exchange has been waited for, or is ordered (by an event on the write-back
    stream) before the first write of the chunk's next holder. Nothing that is half written is visible: `runs` may show
    a token as soon as a layer wrote it, but forks and the prefix tree only ever take tokens below `blocks.length`.

    limit_bytes None takes half of the memory that is available. MemoryLimitError where the limit is above what the
    machine has, or below one chunk. `kv_cache_dtype`: see `kv_format.py`. With `pin`, slabs are pinned
    for CUDA when they are first needed. With `disk` rows lie in a file there, and the limit is of those in memory.
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
            arena: Rows = Arena(layout, format.storage, pin=pin)
        else:
            arena = open_file_arena(disk, stored, format, limit, slab_tokens)
        self.limit_bytes = limit if disk is None else arena.layout.chunks * arena.layout.chunk_bytes
        super().__init__(arena, LayerGroups.of(geometry), format)
        self.bytes_peak = 0
        self.pins = pin and disk is None
        """Whether its slabs are page-locked."""
        self._held = ChunkTable(self.layout.slab_chunks, *(() if self.file is None else (self.file.discard,)))
        """Chunks of the arena."""
        self._chunks = self._held if self.groups.full else ChunkTable(NAMES)
        """Chunks of group 0: of the arena, or where every layer slides mere names."""
        self._tree = PrefixTree()
        self.lock = ProcessLock()
        self._windows = WindowChunks(self._held, self.groups)
        self._claimed: set[int] = set()

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return self.layout.chunk_bytes

    @property
    def chunk_count(self) -> int:
        """Chunks the pool can hold."""
        return self.layout.chunks

    @property
    def free_chunks(self) -> int:
        """Chunks that nobody holds."""
        return self.chunk_count - self._held.used

    @property
    def idle_chunks(self) -> int:
        """Chunks that only the prefix tree holds: they count as used and are given up when room is needed."""
        return self._tree.idle * self.groups.full + self._windows.idle

    @property
    def grows(self) -> bool:
        """Whether a sequence could begin another 64 tokens."""
        return self.free_chunks + self.idle_chunks >= self.groups.chunks_at_once

    @property
    def bytes_used(self) -> int:
        """Bytes of all chunks that somebody holds, each once; at most `limit_bytes`."""
        return self._held.used * self.chunk_bytes

    @property
    def bytes_held(self) -> int:
        """Bytes of all chunks that some block table holds, each once."""
        return (self._held.used - self.idle_chunks) * self.chunk_bytes

    def bytes_of(self, blocks: BlockTable) -> int:
        """Bytes of the chunks that a block table holds."""
        return (self.groups.full * len(blocks.chunks) + self.groups.sliding * len(blocks.windows)) * self.chunk_bytes

    def bytes_for(self, tokens: int) -> int:
        """Bytes of the most chunks that a sequence of `tokens` tokens holds."""
        return self.groups.chunks(tokens) * self.chunk_bytes

    def prepare(self, tokens: int) -> None:
        """Makes slabs ready for `tokens` more tokens, as far as there are any: call it when a sequence is admitted, for
        its prompt and all it may generate, so that nothing is pinned in the middle of decoding. Reserves nothing, and
        takes nothing from a disk before it is needed."""
        if self.file is None:
            self._activate(self.groups.chunks(tokens), run=0)

    def check_fits(self, tokens: int) -> None:
        """Raises PoolFullError where the whole pool could not hold one sequence of `tokens` tokens."""
        if (count := self.groups.chunks(tokens)) > self.chunk_count:
            raise self._full(count, count - self.chunk_count)

    def check_spare(self, chunks: int) -> None:
        """Raises PoolFullError where there is no room for `chunks` times 64 more tokens."""
        self._check_free(chunks * self.groups.chunks_at_once)

    def check_grows(self, blocks: BlockTable, tokens: int, spare: int) -> None:
        """Raise PoolFullError if `blocks` cannot grow to `tokens` tokens and leave room for `spare` times 64 more."""
        more = self.groups.chunks(tokens) - self.bytes_of(blocks) // self.chunk_bytes
        self._check_free(max(0, more) + spare * self.groups.chunks_at_once)

    def _check_free(self, count: int) -> None:
        if (missing := count - self.free_chunks - self.idle_chunks) > 0:
            raise self._full(count, missing)

    def new_block_table(self, tokens: int, floor: int = 0) -> BlockTable:
        """A block table of length 0 with slots for `tokens` tokens, in one run if there is one, in layers that see
        everything; sliding ones will see none before `floor`. PoolFullError where they cannot be had."""
        count = chunks_for(tokens)
        self._provide(count)
        blocks = BlockTable(self._chunks.best_fit(count), floor=floor)
        self._record_peak()
        return blocks

    def reserve(self, blocks: BlockTable, tokens: int) -> None:
        """Slots for `tokens` tokens in total, and nobody else's hold on any chunk from `blocks.length` on: a shared,
        partly filled last chunk is copied, its filled slots only. PoolFullError leaves the block table as it was."""
        chunks = range(blocks.length // CHUNK, len(blocks.chunks))
        shared = [i for i in chunks if self._chunks.refs(blocks.chunks[i]) > 1]
        count = len(shared) + max(0, chunks_for(tokens) - len(blocks.chunks))
        if count == 0:
            return
        self._provide(count)
        fresh = self._chunks.extend(blocks.chunks[-1], count) if blocks.chunks and not shared else []
        fresh += self._chunks.roomy(count - len(fresh))
        for i, chunk in zip(shared, fresh, strict=False):
            if self.groups.full:
                self._arena.copy(blocks.chunks[i], chunk, max(0, blocks.length - i * CHUNK))
            self._drop([blocks.chunks[i]])
            blocks.chunks[i] = chunk
        blocks.chunks += fresh[len(shared) :]
        self._record_peak()

    def slides(self, blocks: BlockTable, start: int, stop: int, *, whole: bool = False) -> bool:
        """Whether `slide` would change anything: then everything appended must be in the pool first."""
        return self.groups.sliding > 0 and self._shown(blocks, start, stop, whole) != blocks.windows.keys()

    def slide(self, blocks: BlockTable, start: int, stop: int, *, whole: bool = False, behind: int = 0) -> None:
        """Slots in sliding layers for the computation of tokens [start, stop): for those before `start` that their
        windows show, and of the new ones for those that the windows of later tokens will show. All others are given
        back. A shared, partly filled chunk is copied, as `reserve` does. PoolFullError leaves the block table as it
        was; a model without sliding layers needs nothing.

        whole: slots ahead too, for as many tokens as a window ever needs, so that the sequence can slide on in a pool
        that is full. behind: so many new tokens before these have slots too, if there are free ones."""
        if not self.groups.sliding:
            return
        shown, at, filled = self._shown(blocks, start, stop, whole), *divmod(start, CHUNK)
        first = max(start, self.groups.first_seen(stop, blocks.floor))
        earlier = range(max(start, first - behind) // CHUNK, first // CHUNK)
        if (len(shown - blocks.windows.keys()) + len(earlier)) * self.groups.sliding <= self.free_chunks:
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
        """The places that `slide` leaves a block table with."""
        before = range(self.groups.first_seen(start, blocks.floor) // CHUNK, chunks_for(start))
        first = self.groups.first_seen(stop, blocks.floor)
        ahead = self.groups.first_seen(stop - 1, blocks.floor) // CHUNK + self.groups.window_chunks if whole else 0
        return {*before, *range(max(start, first) // CHUNK, max(chunks_for(stop), ahead))}

    def _give_windows(self, blocks: BlockTable, places: Sequence[int], filled: int) -> None:
        """Gives a block table window chunks for `places`, side by side for each group; where it has a shared one, the
        first `filled` slots of that are copied."""
        self._activate(len(places) * self.groups.sliding, run=len(places))
        columns = [self._held.best_fit(len(places)) for _ in range(self.groups.sliding)]
        for place, window in zip(places, zip(*columns, strict=True), strict=True):
            if (old := blocks.windows.get(place)) is not None:
                for source, target in zip(old, window, strict=True):
                    self._arena.copy(source, target, filled)
                self._windows.release(old)
            blocks.windows[place] = window

    def write(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """`StoredRows.write`, into chunks that nobody else holds."""
        places = range(start // CHUNK, chunks_for(start + k.shape[1]))
        held = self.chunks_of(blocks, self.groups.group[layer], places)
        assert all(self._held.refs(chunk) == 1 for chunk in held), "write to a shared chunk: reserve first"
        super().write(blocks, layer, start, k, v)

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """`StoredRows.move`, into a chunk that nobody else holds."""
        assert self._held.refs(blocks.chunks[target // CHUNK]) == 1, "write to a shared chunk: claim first"
        super().move(blocks, layer, source, target)

    def commit(self, blocks: BlockTable, length: int) -> None:
        """Declares the tokens [block table.length, length) complete in all layers."""
        assert blocks.length <= length <= blocks.capacity
        blocks.length = length

    def rewind(self, blocks: BlockTable, length: int) -> None:
        """Declares the tokens [length, block table.length) not complete: drafts that are computed again, or were not
        wanted. Their slots stay, and are this block table's alone."""
        assert length <= blocks.length
        blocks.length = length

    def fork(self, blocks: BlockTable) -> BlockTable:
        """A second block table on the same complete tokens; nothing is copied until one of the two writes."""
        shared = blocks.chunks[: chunks_for(blocks.length)]
        self._chunks.incref(shared)
        for window in blocks.windows.values():
            self._held.incref(window)
        return BlockTable(list(shared), blocks.length, dict(blocks.windows), blocks.floor)

    def match(self, tokens: Sequence[int], *lineages: str, floor: int = 0) -> BlockTable:
        """A block table on the longest published prefix of `tokens`, in full chunks, never all of them (one token at
        least is left to compute): `length` says how many need not be computed. At each chunk the first of `lineages`
        that is known goes on. Sliding layers must have all that their windows show from `floor` on."""
        self._unkey_lost()
        chunks = self._tree.match(tokens, *lineages, usable=lambda path: self._windows.usable(path, floor))
        self._chunks.incref(chunks)
        return BlockTable(chunks, len(chunks) * CHUNK, self._windows.take(chunks, floor), floor)

    def known_tokens(self, tokens: Sequence[int], *lineages: str) -> int:
        """Returns how many of the first `tokens` are published, token by token (`PrefixTree.known_tokens`)."""
        return self._tree.known_tokens(tokens, *lineages)

    def publish(self, blocks: BlockTable, tokens: Sequence[int], lineage: str) -> list[int]:
        """Enters the full chunks below `blocks.length` in the prefix tree; `tokens` are the sequence's, from its start.
        Chunks published before keep their lineage. Where another sequence published the same tokens of the same
        lineage first, the block table exchanges its chunk for that one, so that they are stored once and seen as
        shared; returns the indices of exchanged chunks (row ids of these have changed)."""
        lost, full = self._unkey_lost(), blocks.length // CHUNK
        if barred := self._claimed | lost if self.groups.full else self._claimed:
            full = next((i for i in range(full) if blocks.chunks[i] in barred), full)
        assert len(tokens) >= full * CHUNK, "publish needs the tokens of every full chunk"
        fresh, instead = self._tree.insert(tokens, blocks.chunks[:full], lineage, self._alone)
        self._chunks.incref(fresh)
        self._chunks.incref(instead.values())
        for i, chunk in instead.items():
            self._drop([blocks.chunks[i]])
            blocks.chunks[i] = chunk
        if self.groups.sliding:  # what reaches to the newest token without a gap: before one, a place may be partial
            for i in range(self.window_start(blocks, blocks.length) // CHUNK, full):
                if blocks.chunks[i] in self._tree and lost.isdisjoint(blocks.windows[i]):
                    self._windows.keep(blocks.chunks[i], blocks.windows[i])
        return list(instead)

    def drop_prefixes(self) -> bool:
        """Forget the published blocks that no sequence holds. Return whether no published block is left."""
        self._forget(self._tree.evict(len(self._tree)))
        return not len(self._tree)

    def claim(self, blocks: BlockTable, index: int) -> bool:
        """Makes chunk `index` of a block table its own for good, so that single slots of it may be overwritten: False
        where another sequence holds it. A chunk that is also in the prefix tree leaves it, with everything behind it,
        and is never published again."""
        chunk = blocks.chunks[index]
        if chunk in self._tree and self._chunks.refs(chunk) == 2:
            self._forget(self._tree.unkey(chunk))
        if self._chunks.refs(chunk) > 1:
            return False
        self._claimed.add(chunk)
        return True

    def truncate(self, blocks: BlockTable, length: int) -> None:
        """Forgets the tokens from `length` on and gives back the chunks that held only those."""
        assert 0 <= length <= blocks.length
        self.shrink(blocks, length)
        for place in [place for place in blocks.windows if place >= chunks_for(length)]:
            self._windows.release(blocks.windows.pop(place))

    def shrink(self, blocks: BlockTable, length: int) -> None:
        """Gives back the slots from `length` on of the layers that see everything: their tokens lie elsewhere now."""
        blocks.length = length
        held = chunks_for(length)
        self._drop(blocks.chunks[held:])
        del blocks.chunks[held:]

    def release(self, blocks: BlockTable) -> None:
        """Gives all chunks back and empties the block table; a second call does nothing."""
        self.truncate(blocks, 0)

    def check_integrity(self) -> None:
        """Asserts that ids, counts and bytes agree."""
        if self.file is not None:
            self.file.check_integrity()
        self._chunks.check_integrity()
        self._held.check_integrity()
        self._tree.check_integrity(self._chunks.refs)
        self._windows.check_integrity(self._tree.__contains__)
        assert all(self._chunks.refs(chunk) > 0 and chunk not in self._tree for chunk in self._claimed)
        assert self._arena.active == self._held.slabs
        assert self.bytes_used <= self.bytes_peak <= self.chunk_count * self.chunk_bytes <= self.limit_bytes

    def _provide(self, count: int) -> None:
        """Sees to it that `count` chunks of group 0 are free, in memory that is ready, in one run if there is one."""
        if self.groups.full:
            self._provide_held(count)
            self._activate(count, run=min(count, self.layout.slab_chunks))
        elif (missing := count - self._chunks.free) > 0:
            if self._chunks.slabs * NAMES >= MOST_NAMES:
                self._forget(self._tree.evict(missing))
            while self._chunks.free < count:
                self._chunks.add_slab()

    def _provide_held(self, count: int) -> None:
        """Sees to it that `count` chunks of the arena are free, at the expense of idle ones, or raises PoolFullError
        and changes nothing."""
        if (lacking := count - self.free_chunks - self.idle_chunks) > 0:
            raise self._full(count, lacking)
        while (missing := count - self.free_chunks) > 0:
            gone = self._tree.evict(missing) if self.groups.full else []
            self._forget(gone)
            if not gone:
                self._windows.evict(missing)

    def _forget(self, chunks: Sequence[int]) -> None:
        """These chunks left the tree: its references on them, and on what was kept of their windows, end."""
        self._windows.forget(chunks)
        self._chunks.decref(chunks)

    def _unkey_lost(self) -> set[int]:
        """Chunks whose rows a disk did not take; of them and all behind them nothing is published any more."""
        if lost := self.lost:
            self._windows.forget_lost(lost)
        for chunk in lost if self.groups.full else ():
            if chunk in self._tree:
                self._forget(self._tree.unkey(chunk))
        return lost

    def _activate(self, count: int, run: int) -> None:
        """Makes slabs ready until `count` chunks are free in them, `run` of these side by side, or none is left."""
        while self._arena.active < self.layout.slabs and (self._held.free < count or self._held.largest_run < run):
            try:
                self._arena.activate()
            except PoolFullError:
                if self._held.free < count:
                    raise
                return
            self._held.add_slab()

    def _alone(self, chunk: int) -> bool:
        return self._chunks.refs(chunk) == 1

    def _drop(self, chunks: Sequence[int]) -> None:
        """A sequence's references on `chunks` end."""
        self._claimed.difference_update(self._chunks.decref(chunks))
        self._tree.release(filter(self._alone, chunks))

    def _record_peak(self) -> None:
        self.bytes_peak = max(self.bytes_peak, self.bytes_used)

    def _full(self, count: int, missing: int) -> PoolFullError:
        room, free = (self.chunk_count, self.chunk_bytes), self.free_chunks + self.idle_chunks
        return pool_full(count, missing, free, room, self.limit_bytes, disk=self.file is not None)
