"""KV storage of a machine whose compute device is the host itself: KV vectors are attended to where they lie.

Each sparse layer and step moves no bytes if C code reads KV where it lies (`kernels.decode_attention`). Else K of the
selected tokens, Hkv * (resident + n) * d numbers, goes to a scratch buffer (`index_select` of whole rows, faster than
`torch.gather` over the cache), and so does V if query heads share a KV head. A dense layer moves nothing. Transfer
statistics count what a device would receive: the fetched candidates, and every new KV vector written back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..core import BlockTable, KVPart, ModelGeometry, ScatteredRows, Selection, Visible
from ..kv_cache.pool import HostPool
from .link import PrefilledLayer, Savings, Ticket, join
from .plan import attended_tokens, first_askers, key_rows


@dataclass(frozen=True)
class _DenseTicket:
    """All rows of `tokens`, as views of the pool."""

    pool: HostPool
    blocks: BlockTable
    layer: int
    tokens: range
    bytes: int
    savings: Savings | None = None

    def wait(self) -> list[KVPart]:
        return self.pool.runs(self.blocks, self.layer, self.tokens)


@dataclass(frozen=True)
class _SparseTicket:
    """Rows of `tokens` `[Hkv, n]`, gathered when they are needed: the newest is appended after the request."""

    pages: _Pages
    scratch: _Scratch
    blocks: BlockTable
    layer: int
    tokens: torch.Tensor
    bytes: int
    savings: Savings | None = None

    def wait(self) -> list[KVPart]:
        return [_ScatteredPart(self.scratch, self.pages.rows(self.blocks, self.layer, self.tokens))]


class _Pages:
    """`HostPool.row_base` of each open block table, made again only when the block table's chunks have changed."""

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self._known: dict[int, tuple[list[int], torch.Tensor]] = {}

    def of(self, blocks: BlockTable) -> torch.Tensor:
        """int64 `[chunks]`."""
        chunks, base = self._known.get(id(blocks), ([], None))
        if base is None or chunks != blocks.chunks:
            base = self.pool.row_base(blocks)
            self._known[id(blocks)] = list(blocks.chunks), base
        return base

    def rows(self, blocks: BlockTable, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        """Row ids of K int64 `[Hkv, n]` of `tokens` int64 `[Hkv, n]`, in a layer that sees everything."""
        assert self.pool.groups.group[layer] == 0, "what a sliding layer sees is attended to as a whole"
        return key_rows(self.pool.layout, self.of(blocks), self.pool.groups.place[layer], tokens)

    def forget(self, blocks: BlockTable) -> None:
        """The block table is closed; another may get its id."""
        self._known.pop(id(blocks), None)

    def check_integrity(self, block_tables: Set[int]) -> None:
        """Asserts that only these block tables, by `id`, are known."""
        assert self._known.keys() <= block_tables


class _Scratch:
    """A buffer for K and one for V, each as large as the largest gather it has seen; each gather overwrites the
    last. `planes`: the pool's rows `[R, d]`, and those `plane_rows` behind, so that V of a token has K's row id."""

    def __init__(self, pool: HostPool) -> None:
        self.planes = pool.rows, pool.rows[pool.layout.plane_rows :]
        self._buffers = [pool.rows.new_empty(0), pool.rows.new_empty(0)]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def gather(self, plane: int, ids: torch.Tensor) -> torch.Tensor:
        """Rows `[Hkv, n, d]` of K's row ids int64 `[Hkv, n]`; plane 0 for K, 1 for V."""
        rows = self.planes[plane]
        needed = ids.numel() * rows.shape[1]
        if self._buffers[plane].numel() < needed:
            self._buffers[plane] = rows.new_empty(needed + needed // 4)
        out = self._buffers[plane][:needed].view(-1, rows.shape[1])
        torch.index_select(rows, 0, ids.view(-1), out=out)
        return out.view(*ids.shape, rows.shape[1])


class _ScatteredPart(KVPart):
    """Selected rows, which stay where they lie until somebody asks for k or v. For query groups of one the weighted sum
    reads V there, each row once; a gather and a product would read it, write it and read it again."""

    def __init__(self, scratch: _Scratch, ids: torch.Tensor) -> None:
        """ids: int64 `[Hkv, n]` as `key_rows` gives them."""
        self._scratch, self._ids = scratch, ids

    @property
    def shape(self) -> tuple[int, int]:
        """Hkv and n."""
        kv_heads, n = self._ids.shape
        return kv_heads, n

    @property
    def scattered(self) -> ScatteredRows:
        """In the pool."""
        return ScatteredRows(*self._scratch.planes, self._ids)

    @property
    def k(self) -> torch.Tensor:
        """`[Hkv, n, d]`, gathered anew at every reading."""
        return self._scratch.gather(0, self._ids)

    @property
    def v(self) -> torch.Tensor:
        """`[Hkv, n, d]`, gathered anew at every reading."""
        return self._scratch.gather(1, self._ids)

    def mix(self, weights: torch.Tensor) -> torch.Tensor:
        """The values weighted by `weights` `[Hkv, G, n]`: `[Hkv, G, d]`; a bag of an embedding is a weighted sum of
        rows."""
        rows, (kv_heads, n) = self._scratch.planes[1], self._ids.shape
        if weights.shape[1] > 1:
            return super().mix(weights)
        bags, each = torch.arange(0, kv_heads * n, n), weights.to(rows.dtype).view(-1)
        return F.embedding_bag(self._ids.view(-1), rows, bags, mode="sum", per_sample_weights=each).unsqueeze(1)


class CpuStorage:
    """`KVStorage` on the host: rows stay where they are written, only the count of resident ones is noted."""

    def __init__(self, pool: HostPool, pages: _Pages, geometry: ModelGeometry) -> None:
        self._pool, self._pages, self._geometry = pool, pages, geometry
        self._token_bytes = 2 * pool.layout.kv_heads * pool.layout.row_bytes
        self._resident: dict[int, int] = {}

    @property
    def resident_bytes(self) -> int:
        """Bytes of the resident rows of all open sequences, in all layers."""
        return sum(self._resident.values()) * self._token_bytes

    @property
    def opened(self) -> Set[int]:
        """The open block tables, by `id`."""
        return self._resident.keys()

    def open(self, blocks: BlockTable, sinks: int, recent: int, origin: BlockTable | None = None) -> None:
        """Notes how many tokens are resident, summed over layers."""
        layers = range(self._geometry.layers)
        self._resident[id(blocks)] = sum(sum(self._geometry.resident(layer, sinks, recent)) for layer in layers)

    def close(self, blocks: BlockTable) -> None:
        """Forget the sequence. A second call does nothing."""
        self._resident.pop(id(blocks), None)
        self._pages.forget(blocks)

    def settle(self, blocks: BlockTable) -> None:
        """Returns at once: `append` blocks until its rows are written."""

    def append(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        """Writes k, v `[Hkv, m, d]` to the pool; returns the bytes that a link would carry."""
        self._pool.write(blocks, layer, start, k, v)
        return k.shape[1] * self._token_bytes

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Copies the row in the pool."""
        self._pool.move(blocks, layer, source, target)

    def displace(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Copies the row in the pool."""
        self._pool.move(blocks, layer, source, target)

    def prefill_layer(self, blocks: BlockTable, layer: int, start: int, slices: Iterable[KVPart]) -> PrefilledLayer:
        """Writes the slices; the rows returned are a view of the pool where its chunks are one run. Of a sliding layer
        they are joined from what is in the pool and what is new, since not all of that is kept."""
        if self._pool.groups.group[layer]:
            return self._prefill_sliding(blocks, layer, start, list(slices))
        stop = start
        for part in slices:
            self._pool.write(blocks, layer, stop, part.k, part.v)
            stop += part.k.shape[1]
        whole = join(self._pool.runs(blocks, layer, range(stop)))
        return PrefilledLayer(whole, 0, start * self._token_bytes, (stop - start) * self._token_bytes)

    def extend_layer(self, blocks: BlockTable, layer: int, start: int, new: KVPart) -> PrefilledLayer:
        """Writes the rows; all are views of the pool, those before the new tokens' chunks as `past`."""
        if self._pool.groups.group[layer]:
            return self._prefill_sliding(blocks, layer, start, [new])
        self._pool.write(blocks, layer, start, new.k, new.v)
        count = new.k.shape[1]
        runs = self._pool.runs(blocks, layer, range(start + count))
        own = next(n for n in itertools.count(1) if sum(run.k.shape[1] for run in runs[-n:]) >= count)
        kv, first = join(runs[-own:]), sum(run.k.shape[1] for run in runs[:-own])
        return PrefilledLayer(kv, first, start * self._token_bytes, count * self._token_bytes, runs[:-own])

    def _prefill_sliding(self, blocks: BlockTable, layer: int, start: int, slices: list[KVPart]) -> PrefilledLayer:
        first = self._pool.groups.first_seen(start, blocks.floor)
        new = join(slices)
        tokens = range(start, start + new.k.shape[1])
        kept = self._pool.kept(blocks, layer, tokens)
        self._pool.write(blocks, layer, kept.start, new.k[:, kept.start - start :], new.v[:, kept.start - start :])
        before = self._pool.runs(blocks, layer, range(first, start))
        bytes_each = (start - first) * self._token_bytes, len(kept) * self._token_bytes
        return PrefilledLayer(join([*before, new]), first, *bytes_each)


class CpuRows:
    """`RowFetch` on the host. Gathers run at `wait`, in the caller's thread; a ticket's and a repair's rows are alive
    at once and have a scratch buffer each."""

    def __init__(self, pool: HostPool, pages: _Pages) -> None:
        self._pool, self._pages = pool, pages
        self._pair_bytes = 2 * pool.layout.row_bytes
        self._token_bytes = pool.layout.kv_heads * self._pair_bytes
        self._fetched, self._repaired = _Scratch(pool), _Scratch(pool)

    @property
    def nbytes(self) -> int:
        """Bytes of the scratch buffers."""
        return self._fetched.nbytes + self._repaired.nbytes

    def fetch(self, blocks: BlockTable, layer: int, visible: Visible, selection: Selection | None) -> Ticket:
        """A ticket of views of the pool, or of selected rows that are gathered when it is waited for."""
        if selection is None:
            return _DenseTicket(self._pool, blocks, layer, visible.all, len(visible.candidates) * self._token_bytes)
        return self._sparse(blocks, layer, visible, selection)

    def _sparse(
        self, blocks: BlockTable, layer: int, visible: Visible, selection: Selection, savings: Savings | None = None
    ) -> _SparseTicket:
        """Resident and selected rows."""
        assert selection.counts is None, "the host knows its own counts"
        tokens, asked = attended_tokens(visible, selection.tokens), selection.tokens.numel() * self._pair_bytes
        return _SparseTicket(self._pages, self._fetched, blocks, layer, tokens, asked, savings)

    def fetch_range(self, blocks: BlockTable, layer: int, tokens: range) -> Ticket:
        """A ticket of views of the pool."""
        return _DenseTicket(self._pool, blocks, layer, tokens, len(tokens) * self._token_bytes)

    def fetch_together(
        self,
        block_tables: Sequence[BlockTable],
        layer: int,
        visible: Sequence[Visible],
        selections: Sequence[Selection],
    ) -> list[Ticket]:
        """Each sequence gathers its own rows from the pool, only the count is of the union."""
        rows = [
            self._pages.rows(blocks, layer, selection.tokens).flatten()
            for blocks, selection in zip(block_tables, selections, strict=True)
        ]
        again = (first_askers(torch.cat(rows)) >= 0).split([len(ids) for ids in rows])
        savings = [Savings(len(one), torch.tensor(len(one)), one.sum(), torch.tensor(0)) for one in again]
        each = zip(block_tables, visible, selections, savings, strict=True)
        return [self._sparse(blocks, layer, seen, selection, one) for blocks, seen, selection, one in each]

    def fetch_more(self, blocks: BlockTable, layer: int, extra: Selection) -> Ticket:
        """A ticket of the extra rows, in a buffer of their own."""
        crossing = extra.tokens.numel() * self._pair_bytes
        return _SparseTicket(self._pages, self._repaired, blocks, layer, extra.tokens, crossing)


class CpuLink:
    """`Link` for the CPU and an exact KV format."""

    def __init__(self, pool: HostPool, geometry: ModelGeometry) -> None:
        assert pool.format.exact, "rows that have to be decoded cannot be attended to where they lie"
        self._pages = _Pages(pool)
        self.storage = CpuStorage(pool, self._pages, geometry)
        self.rows = CpuRows(pool, self._pages)
        self.batched = None

    @property
    def device_bytes(self) -> int:
        """Bytes of the resident rows of all open sequences, and of the scratch buffers."""
        return self.storage.resident_bytes + self.rows.nbytes

    def working_set_bytes(self, blocks: BlockTable) -> int:
        """0: every row is where it is attended to."""
        return 0

    def check_integrity(self) -> None:
        """Asserts that pages are known of open sequences only."""
        self._pages.check_integrity(self.storage.opened)
