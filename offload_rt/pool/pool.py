"""The host pool's facade: block tables of chunks, and the rows behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ..config import KVFormatName, format_size
from ..core import CHUNK, BlockTable, KVPart, ModelGeometry
from ..errors import MemoryLimitError, PoolFullError
from .arena import Arena
from .chunks import ChunkTable
from .kv_format import kv_format as make_format
from .layout import SLAB_TOKENS, ArenaLayout
from .machine import available_memory
from .prefix_tree import PrefixTree

MOST_TOKENS = 1 << 24
"""Token slots that a pool without a limit of its own stops at: 16 Mi, more than a batch of the longest contexts."""


class Span(NamedTuple):
    """Neighbouring token slots of one slab: `size` of them from slot `offset` on."""

    slab: int
    offset: int
    size: int


class HostPool:
    """All KV of all sequences in host memory, in chunks of 64 tokens, within a hard limit of bytes.

    A sequence holds a `BlockTable`: `reserve` gives it slots that it alone may write, `write` fills them layer by
    layer, `commit` declares tokens complete in all layers, `runs` and `row_base` say where they lie. Chunks are shared
    by counting references; the only shared chunk that a sequence would write into is its partly filled last one, and
    `reserve` copies that one first. A full chunk is never written again, unless eviction claims it (`claim`).

    Full chunks that were published stay in the prefix tree when their sequence ends, for the next one with the same
    beginning; they are the first to go (least recently used, leaf first) when a sequence needs room.

    Order. The pool never sees a stream and never waits: it is called from one thread, and its calls take effect in the
    order they are made. What runs later than the call that started it (a copy to the device, a write-back) belongs to
    the link, and the link's owner calls `release`, `truncate`, `reserve`, `publish` and `claim` only when every read
    and write of the block table's chunks that these calls may free, copy or exchange has been waited for, or is ordered
    (by an event on the write-back stream) before the first write of the chunk's next holder. Nothing that is half
    written is visible: `runs` may show a token as soon as a layer wrote it, but forks and the prefix tree only ever
    take tokens below `blocks.length`.

    limit_bytes None takes half of the memory that is available. MemoryLimitError where the limit is above what the
    machine has, or below one chunk. `kv_format` is how rows are stored (`kv_format.py`). With `pin`, slabs are pinned
    for CUDA when they are first needed.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        dtype: torch.dtype,
        limit_bytes: int | None,
        *,
        kv_format: KVFormatName = "auto",
        pin: bool = False,
        slab_tokens: int = SLAB_TOKENS,
    ) -> None:
        self.format = make_format(kv_format, dtype, geometry.head_dim)
        stored = replace(geometry, head_dim=self.format.width)
        available = available_memory()
        if limit_bytes is None:
            limit_bytes = min(available // 2, stored.kv_bytes(MOST_TOKENS, self.format.storage))
        elif limit_bytes > available:
            raise MemoryLimitError(
                f"a host pool of {format_size(limit_bytes)} ({limit_bytes} bytes) is more than the "
                f"{format_size(available)} ({available} bytes) of memory available here; lower host_memory"
            )
        self.limit_bytes = limit_bytes
        self.layout = ArenaLayout.fit(stored, self.format.storage, limit_bytes, slab_tokens)
        self.bytes_peak = 0
        self._arena = Arena(self.layout, self.format.storage, pin=pin)
        self._chunks = ChunkTable(self.layout.slab_chunks)
        self._tree = PrefixTree()
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
        return self.chunk_count - self._chunks.used

    @property
    def idle_chunks(self) -> int:
        """Chunks that only the prefix tree holds: they count as used and are given up when room is needed."""
        return self._tree.idle

    @property
    def bytes_used(self) -> int:
        """Bytes of all chunks that somebody holds, each once; at most `limit_bytes`."""
        return self._chunks.used * self.chunk_bytes

    @property
    def bytes_held(self) -> int:
        """Bytes of all chunks that some block table holds, each once."""
        return (self._chunks.used - self.idle_chunks) * self.chunk_bytes

    @property
    def rows(self) -> torch.Tensor:
        """`[R, width]`, the pool's memory by row id (`ArenaLayout`), as `format` stores it."""
        return self._arena.rows

    def prepare(self, tokens: int) -> None:
        """Makes slabs ready for `tokens` more tokens, as far as there are any: call it when a sequence is admitted, for
        its prompt and all it may generate, so that nothing is pinned in the middle of decoding. Reserves nothing."""
        self._activate(_chunks_of(tokens), run=0)

    def check_fits(self, tokens: int) -> None:
        """Raises PoolFullError where the whole pool could not hold one sequence of `tokens` tokens."""
        if (count := _chunks_of(tokens)) > self.chunk_count:
            raise PoolFullError(self._full(count, count - self.chunk_count))

    def check_spare(self, chunks: int) -> None:
        """Raises PoolFullError where fewer than `chunks` chunks are free or idle."""
        if (missing := chunks - self.free_chunks - self.idle_chunks) > 0:
            raise PoolFullError(self._full(chunks, missing))

    def new_block_table(self, tokens: int) -> BlockTable:
        """A block table of length 0 with slots for `tokens` tokens, in one run if there is one. PoolFullError where
        they cannot be had."""
        count = _chunks_of(tokens)
        self._provide(count)
        self._activate(count, run=min(count, self.layout.slab_chunks))
        blocks = BlockTable(self._chunks.best_fit(count))
        self._record_peak()
        return blocks

    def reserve(self, blocks: BlockTable, tokens: int) -> None:
        """SlotTable for `tokens` tokens in total, and nobody else's hold on any chunk from `blocks.length` on: a
        shared, partly filled last chunk is copied, its filled slots only. PoolFullError leaves the block table as it
        was."""
        first = blocks.length // CHUNK
        shared = [i for i in range(first, len(blocks.chunks)) if self._chunks.refs(blocks.chunks[i]) > 1]
        count = len(shared) + max(0, _chunks_of(tokens) - len(blocks.chunks))
        if count == 0:
            return
        self._provide(count)
        self._activate(count, run=min(count, self.layout.slab_chunks))
        fresh = self._chunks.extend(blocks.chunks[-1], count) if blocks.chunks and not shared else []
        fresh += self._chunks.roomy(count - len(fresh))
        for i, chunk in zip(shared, fresh, strict=False):
            self._arena.copy(blocks.chunks[i], chunk, max(0, blocks.length - i * CHUNK))
            self._drop([blocks.chunks[i]])
            blocks.chunks[i] = chunk
        blocks.chunks += fresh[len(shared) :]
        self._record_peak()

    def write(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """K and V of tokens [start, start + n) of one layer, k, v `[Hkv, n, d]` on any device; blocks until copied."""
        tokens = range(start, start + k.shape[1])
        held = blocks.chunks[start // CHUNK : _chunks_of(tokens.stop)]
        assert all(self._chunks.refs(chunk) == 1 for chunk in held), "write to a shared chunk: reserve first"
        done = 0
        for part in self.stored(blocks, layer, tokens):
            count = part.k.shape[1]
            part.k.copy_(self.format.encode(k[:, done : done + count]))
            part.v.copy_(self.format.encode(v[:, done : done + count]))
            done += count

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """The rows of slot `source` also take slot `target`, as they are stored."""
        assert self._chunks.refs(blocks.chunks[target // CHUNK]) == 1, "write to a shared chunk: claim first"
        [row] = self.stored(blocks, layer, range(source, source + 1))
        [place] = self.stored(blocks, layer, range(target, target + 1))
        place.k.copy_(row.k)
        place.v.copy_(row.v)

    def commit(self, blocks: BlockTable, length: int) -> None:
        """Declares the tokens [block table.length, length) complete in all layers."""
        assert blocks.length <= length <= blocks.capacity
        blocks.length = length

    def spans(self, blocks: BlockTable, tokens: range) -> list[Span]:
        """Where the token slots `tokens` of a block table lie, in token order, in as few pieces as possible."""
        assert tokens.step == 1 and tokens.start >= 0 and tokens.stop <= blocks.capacity
        spans = []
        start = tokens.start
        while start < tokens.stop:
            index = start // CHUNK
            chunk = blocks.chunks[index]
            slab, slot = divmod(chunk, self.layout.slab_chunks)
            most = min(_chunks_of(tokens.stop) - index, self.layout.slab_chunks - slot)
            run = _run_length(blocks.chunks[index : index + most])
            stop = min(tokens.stop, (index + run) * CHUNK)
            spans.append(Span(slab, slot * CHUNK + start % CHUNK, stop - start))
            start = stop
        return spans

    def view(self, layer: int, span: Span) -> KVPart:
        """K and V `[Hkv, size, width]` of one layer and span, as views of the pool."""
        planes = self._arena.planes[span.slab, layer].narrow(2, span.offset, span.size)
        return KVPart(planes[:, 0], planes[:, 1])

    def stored(self, blocks: BlockTable, layer: int, tokens: range) -> list[KVPart]:
        """K and V of the token slots `tokens` of one layer, as views `[Hkv, n, width]` of the pool in token order, one
        for each contiguous run: each head's `[n, width]` is contiguous. For many layers: `spans` once, then `view`."""
        return [self.view(layer, span) for span in self.spans(blocks, tokens)]

    def runs(self, blocks: BlockTable, layer: int, tokens: range) -> list[KVPart]:
        """`stored` as numbers `[Hkv, n, d]`: the views themselves where the format is exact, else decoded copies."""
        parts = self.stored(blocks, layer, tokens)
        if self.format.exact:
            return parts
        return [KVPart(self.format.decode(part.k), self.format.decode(part.v)) for part in parts]

    def row_base(self, blocks: BlockTable) -> torch.Tensor:
        """int64 `[chunks]`: the row id of each chunk's first token in layer 0, head 0, K. Token t of layer l, head h
        is row `row_base[t // 64] + t % 64 + layout.row(l, h, kv)`."""
        chunks = torch.tensor(blocks.chunks, dtype=torch.int64)
        slabs = chunks // self.layout.slab_chunks
        return slabs * self.layout.slab_rows + (chunks - slabs * self.layout.slab_chunks) * CHUNK

    def fork(self, blocks: BlockTable) -> BlockTable:
        """A second block table on the same complete tokens; nothing is copied until one of the two writes."""
        shared = blocks.chunks[: _chunks_of(blocks.length)]
        self._chunks.incref(shared)
        return BlockTable(list(shared), blocks.length)

    def match(self, tokens: Sequence[int], *lineages: str) -> BlockTable:
        """A block table on the longest published prefix of `tokens`, in full chunks, never all of them (one token at
        least is left to compute): `length` says how many need not be computed. At each chunk the first of `lineages`
        that is known goes on."""
        chunks = self._tree.match(tokens, *lineages)
        self._chunks.incref(chunks)
        return BlockTable(chunks, len(chunks) * CHUNK)

    def publish(self, blocks: BlockTable, tokens: Sequence[int], lineage: str) -> list[int]:
        """Enters the full chunks below `blocks.length` in the prefix tree; `tokens` are the sequence's, from its start.
        Chunks published before keep their lineage. Where another sequence published the same tokens of the same
        lineage first, the block table exchanges its chunk for that one, so that they are stored once and seen as
        shared; returns the indices of exchanged chunks (row ids of these have changed)."""
        full = blocks.length // CHUNK
        full = next((i for i in range(full) if blocks.chunks[i] in self._claimed), full) if self._claimed else full
        assert len(tokens) >= full * CHUNK, "publish needs the tokens of every full chunk"
        fresh, instead = self._tree.insert(tokens, blocks.chunks[:full], lineage, self._alone)
        self._chunks.incref(fresh)
        self._chunks.incref(instead.values())
        for i, chunk in instead.items():
            self._drop([blocks.chunks[i]])
            blocks.chunks[i] = chunk
        return list(instead)

    def claim(self, blocks: BlockTable, index: int) -> bool:
        """Makes chunk `index` of a block table its own for good, so that single slots of it may be overwritten: False
        where another sequence holds it. A chunk that is also in the prefix tree leaves it, with everything behind it,
        and is never published again."""
        chunk = blocks.chunks[index]
        if chunk in self._tree and self._chunks.refs(chunk) == 2:
            self._chunks.decref(self._tree.unkey(chunk))
        if self._chunks.refs(chunk) > 1:
            return False
        self._claimed.add(chunk)
        return True

    def truncate(self, blocks: BlockTable, length: int) -> None:
        """Forgets the tokens from `length` on and gives back the chunks that held only those."""
        assert 0 <= length <= blocks.length
        blocks.length = length
        held = _chunks_of(length)
        self._drop(blocks.chunks[held:])
        del blocks.chunks[held:]

    def release(self, blocks: BlockTable) -> None:
        """Gives all chunks back and empties the block table; a second call does nothing."""
        self.truncate(blocks, 0)

    def check_integrity(self) -> None:
        """Asserts that ids, counts and bytes agree."""
        self._chunks.check_integrity()
        self._tree.check_integrity(self._chunks.refs)
        assert all(self._chunks.refs(chunk) > 0 and chunk not in self._tree for chunk in self._claimed)
        assert self._arena.active == self._chunks.slabs
        assert self.bytes_used <= self.bytes_peak <= self.chunk_count * self.chunk_bytes <= self.limit_bytes

    def _provide(self, count: int) -> None:
        """Sees to it that `count` chunks are free, at the expense of idle ones, or raises PoolFullError and changes
        nothing."""
        missing = count - self.free_chunks
        if missing > self.idle_chunks:
            raise PoolFullError(self._full(count, missing - self.idle_chunks))
        if missing > 0:
            self._chunks.decref(self._tree.evict(missing))

    def _activate(self, count: int, run: int) -> None:
        """Makes slabs ready until `count` chunks are free in them, `run` of these side by side, or none is left."""
        while self._arena.active < self.layout.slabs and (self._chunks.free < count or self._chunks.largest_run < run):
            self._arena.activate()
            self._chunks.add_slab()

    def _alone(self, chunk: int) -> bool:
        return self._chunks.refs(chunk) == 1

    def _drop(self, chunks: Sequence[int]) -> None:
        """A sequence's references on `chunks` end."""
        self._claimed.difference_update(self._chunks.decref(chunks))
        self._tree.release(filter(self._alone, chunks))

    def _record_peak(self) -> None:
        self.bytes_peak = max(self.bytes_peak, self.bytes_used)

    def _full(self, count: int, missing: int) -> str:
        needed, lacking, limit, enough = (
            format_size(size)
            for size in (
                count * self.chunk_bytes,
                missing * self.chunk_bytes,
                self.limit_bytes,
                self.limit_bytes + missing * self.chunk_bytes,
            )
        )
        return (
            f"the host pool is full: {count} chunks of {CHUNK} tokens ({needed}) are needed, and of {self.chunk_count} "
            f"only {self.free_chunks + self.idle_chunks} are free or can be given up by the prefix tree: {missing} too "
            f"few ({lacking}); raise host_memory from {limit} to {enough} or more, shorten the prompts, or run fewer "
            f"sequences at once"
        )


def _chunks_of(tokens: int) -> int:
    """Chunks that hold `tokens` tokens."""
    return -(-tokens // CHUNK)


def _run_length(chunks: list[int]) -> int:
    """How many of `chunks`, from the first on, have successive ids. The whole list is compared first, which is much
    the commonest case and runs at the speed of C."""
    first = chunks[0]
    if chunks == list(range(first, first + len(chunks))):
        return len(chunks)
    return next(i for i, chunk in enumerate(chunks) if chunk != first + i)
