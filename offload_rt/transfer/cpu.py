"""Transfers on a CPU: attention reads KV directly from the host pool.

C code reads all KV in place (`kernels.decode_attention`). Without C code, the keys of resident and selected tokens are
copied to a scratch buffer. The values are copied only if several query heads share a KV head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..core import BLOCK_SIZE, BlockTable, KVPart, ModelGeometry, Selection, VisibleTokens
from ..kernels.decode_attention import PagedPart, library
from ..kv_cache.pool import HostPool
from .base import KVStorage, PendingFetch, PrefilledLayer, RowFetch, Savings, Transfer, join
from .plan import first_occurrences

_NOTHING = range(0), range(0)


@dataclass(frozen=True)
class _Fetch:
    """The KV of the `resident` tokens and of the selected `tokens` `[Hkv, n]`.

    If `tokens` is None, `resident[0]` contains all tokens. KV is read only when attention uses it, because the newest
    token is appended after the fetch has started.
    """

    pages: _Pages
    scratch: _Scratch
    blocks: BlockTable
    layer: int
    resident: tuple[range, range]
    tokens: torch.Tensor | None
    bytes: int
    savings: Savings | None = None
    copied_tokens: int | None = None

    def wait(self) -> list[KVPart]:
        pages, blocks, layer = self.pages, self.blocks, self.layer
        if self.tokens is not None:
            return [pages.part(blocks, layer, self.resident, self.tokens, self.scratch)]
        runs = partial(pages.pool.runs, blocks, layer, self.resident[0])
        if pages.pool.groups.group[layer] or library(pages.rows[0].shape[1], pages.rows[0].dtype) is None:
            return runs()
        return [pages.part(blocks, layer, self.resident, pages.no_tokens, self.scratch, runs)]


class _Pages:
    """Cache of `PagedPart.block_rows` for open block tables. An entry is recomputed if the blocks have changed.

    `rows` contains two views `[R, d]` of the pool, one for K and one for V. The K and the V of a token have the same
    index in their views.
    """

    def __init__(self, pool: HostPool) -> None:
        self.pool, layout = pool, pool.layout
        self.rows = pool.rows, pool.rows[layout.value_offset :]
        self.no_tokens = torch.empty(layout.kv_heads, 0, dtype=torch.int64)
        self.token_bytes = [pool.token_bytes(layer) for layer in range(len(pool.groups.group))]
        self._first_rows = [layout.row(first, 0, 0) for first in pool.groups.storage_layer]
        self._head_rows = layout.head_rows
        self._known: dict[int, tuple[list[int], torch.Tensor]] = {}

    def part(
        self,
        blocks: BlockTable,
        layer: int,
        resident: tuple[range, range],
        tokens: torch.Tensor,
        scratch: _Scratch,
        runs: Callable[[], list[KVPart]] | None = None,
    ) -> PagedPart:
        assert self.pool.groups.group[layer] == 0, "sliding-window layers are dense"
        ids, block_rows = self._known.get(id(blocks), ([], None))
        if block_rows is None or ids != blocks.ids:
            block_rows = self.pool.row_base(blocks) - torch.arange(0, len(blocks.ids) * BLOCK_SIZE, BLOCK_SIZE)
            self._known[id(blocks)] = list(blocks.ids), block_rows
        first = self._first_rows[layer]
        return PagedPart(self.rows, block_rows, first, self._head_rows, resident, tokens, scratch.gather, runs)

    def forget(self, blocks: BlockTable) -> None:
        self._known.pop(id(blocks), None)

    def check_integrity(self, block_tables: Set[int]) -> None:
        assert self._known.keys() <= block_tables


class _Scratch:
    """Reused buffers into which K and V are gathered. Each gather overwrites the previous one."""

    def __init__(self, rows: tuple[torch.Tensor, torch.Tensor], planes: int) -> None:
        self._rows = rows
        # If keys contain the values, one buffer is enough.
        self._buffers = [rows[0].new_empty(0) for _ in range(planes)]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def gather(self, plane: int, ids: torch.Tensor) -> torch.Tensor:
        """Copy the rows `ids` `[Hkv, n]` of K (`plane` 0) or V (`plane` 1) to a buffer `[Hkv, n, d]`."""
        rows, plane = self._rows[plane], min(plane, len(self._buffers) - 1)
        needed = ids.numel() * rows.shape[1]
        if self._buffers[plane].numel() < needed:
            self._buffers[plane] = rows.new_empty(needed + needed // 4)
        out = self._buffers[plane][:needed].view(-1, rows.shape[1])
        # `index_select` of whole vectors is faster than `torch.gather`.
        torch.index_select(rows, 0, ids.view(-1), out=out)
        return out.view(*ids.shape, rows.shape[1])


class CpuStorage(KVStorage):
    """`KVStorage` on a CPU. KV is stored only in the pool, but resident KV is counted as if it were copied."""

    def __init__(self, pool: HostPool, pages: _Pages, geometry: ModelGeometry) -> None:
        self._pool, self._pages, self._geometry = pool, pages, geometry
        self._resident: dict[int, int] = {}

    @property
    def resident_bytes(self) -> int:
        return sum(self._resident.values())

    @property
    def opened(self) -> Set[int]:
        return self._resident.keys()

    def open(self, blocks: BlockTable, sinks: int, recent: int, origin: BlockTable | None = None) -> None:
        self._resident[id(blocks)] = sum(
            sum(self._geometry.resident(layer, sinks, recent)) * self._pages.token_bytes[layer]
            for layer in self._geometry.kv_layers
        )

    def close(self, blocks: BlockTable) -> None:
        self._resident.pop(id(blocks), None)
        self._pages.forget(blocks)

    def settle(self, blocks: BlockTable) -> None:
        pass  # no-op, because `append` is synchronous

    def append(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        self._pool.write(blocks, layer, start, k, v)
        return k.shape[1] * self._pages.token_bytes[layer]

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        self._pool.move(blocks, layer, source, target)

    def prefill_layer(self, blocks: BlockTable, layer: int, start: int, slices: Iterable[KVPart]) -> PrefilledLayer:
        if self._pool.groups.group[layer]:
            return self._prefill_sliding(blocks, layer, start, list(slices))
        stop = start
        for part in slices:
            self._pool.write(blocks, layer, stop, part.k, part.v)
            stop += part.k.shape[1]
        kv, size = join(self._pool.runs(blocks, layer, range(stop))), self._pages.token_bytes[layer]
        return PrefilledLayer(kv, 0, start * size, (stop - start) * size)

    def extend_layer(self, blocks: BlockTable, layer: int, start: int, new: KVPart) -> PrefilledLayer:
        if self._pool.groups.group[layer]:
            return self._prefill_sliding(blocks, layer, start, [new])
        self._pool.write(blocks, layer, start, new.k, new.v)
        count = new.k.shape[1]
        runs = self._pool.runs(blocks, layer, range(start + count))
        own = next(n for n in itertools.count(1) if sum(run.k.shape[1] for run in runs[-n:]) >= count)
        kv, first = join(runs[-own:]), sum(run.k.shape[1] for run in runs[:-own])
        size = self._pages.token_bytes[layer]
        return PrefilledLayer(kv, first, start * size, count * size, runs[:-own])

    def _prefill_sliding(self, blocks: BlockTable, layer: int, start: int, slices: list[KVPart]) -> PrefilledLayer:
        # Not all new tokens have slots in the pool, so the KV in the pool and the new KV are concatenated.
        first = self._pool.groups.first_seen(start, blocks.floor)
        new = join(slices)
        tokens = range(start, start + new.k.shape[1])
        kept = self._pool.stored_range(blocks, layer, tokens)
        self._pool.write(blocks, layer, kept.start, new.k[:, kept.start - start :], new.v[:, kept.start - start :])
        before = self._pool.runs(blocks, layer, range(first, start))
        size = self._pages.token_bytes[layer]
        return PrefilledLayer(join([*before, new]), first, (start - first) * size, len(kept) * size)


class CpuRows(RowFetch):
    def __init__(self, pool: HostPool, pages: _Pages) -> None:
        self._pool, self._pages = pool, pages
        self._entry_bytes = pool.layout.entry_bytes
        # The buffers are separate because the results of `fetch` and `fetch_more` are in use at the same time.
        self._fetched, self._repaired = (_Scratch(pages.rows, pool.layout.planes) for _ in range(2))

    @property
    def nbytes(self) -> int:
        return self._fetched.nbytes + self._repaired.nbytes

    def fetch(self, blocks: BlockTable, layer: int, visible: VisibleTokens, selection: Selection | None) -> _Fetch:
        if selection is None:
            size = len(visible.candidates) * self._pages.token_bytes[layer]
            return _Fetch(self._pages, self._fetched, blocks, layer, (visible.all, range(0)), None, size)
        assert selection.counts is None, "selections on the CPU have no counts"
        size, resident = selection.tokens.numel() * self._entry_bytes, (visible.sinks, visible.recent)
        return _Fetch(self._pages, self._fetched, blocks, layer, resident, selection.tokens, size)

    def fetch_range(self, blocks: BlockTable, layer: int, tokens: range) -> PendingFetch:
        size = len(tokens) * self._pages.token_bytes[layer]
        return _Fetch(self._pages, self._fetched, blocks, layer, (tokens, range(0)), None, size)

    def fetch_together(
        self,
        block_tables: Sequence[BlockTable],
        layer: int,
        visible: Sequence[VisibleTokens],
        selections: Sequence[Selection],
    ) -> list[PendingFetch]:
        """Start one fetch per sequence. KV of shared blocks is counted once, although each sequence reads it."""
        rows = [
            self._pages.part(blocks, layer, _NOTHING, selection.tokens, self._fetched).ids.flatten()
            for blocks, selection in zip(block_tables, selections, strict=True)
        ]
        again = (first_occurrences(torch.cat(rows)) >= 0).split([len(ids) for ids in rows])
        savings = [Savings(len(one), torch.tensor(len(one)), one.sum(), torch.tensor(0)) for one in again]
        each = zip(block_tables, visible, selections, savings, strict=True)
        return [replace(self.fetch(blocks, layer, seen, own), savings=one) for blocks, seen, own, one in each]

    def fetch_more(self, blocks: BlockTable, layer: int, extra: Selection) -> PendingFetch:
        size = extra.tokens.numel() * self._entry_bytes
        return _Fetch(self._pages, self._repaired, blocks, layer, _NOTHING, extra.tokens, size)


class CpuTransfer(Transfer):
    """`Transfer` on a CPU, for KV formats that attention can read in place."""

    def __init__(self, pool: HostPool, geometry: ModelGeometry) -> None:
        assert pool.format.exact, "encoded KV cannot be read in place"
        self._pages = _Pages(pool)
        self.storage = CpuStorage(pool, self._pages, geometry)
        self.rows = CpuRows(pool, self._pages)

    @property
    def device_bytes(self) -> int:
        return self.storage.resident_bytes + self.rows.nbytes

    def check_integrity(self) -> None:
        self._pages.check_integrity(self.storage.opened)
