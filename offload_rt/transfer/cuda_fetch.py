"""Host-to-device copies of KV, for single sequences and for batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..core import BlockTable, KVPart, Selection, VisibleTokens
from ..kernels.h2d_copy import to_device
from .base import BatchedRows, PendingFetch, RowFetch, Savings, join
from .open_sequences import DeviceState
from .residency import Residency
from .row_lists import RowLists
from .streams import Event


@dataclass(frozen=True)
class _PendingFetch(PendingFetch):
    state: DeviceState
    staging_key: int  # key of this fetch's buffers in `state.staging`, which keeps the buffers alive
    event: Event  # reached when `staged` is complete
    staged: torch.Tensor  # fetched KV `[planes, Hkv, n, width]` in the storage format
    savings: Savings | None = None
    # Number of valid entries per KV head, int32 `[Hkv]`, or None if all entries are valid.
    counts: torch.Tensor | None = None
    residency: Residency | None = None
    layer: int = 0
    # If not None, the result of `wait` begins with the resident KV of these tokens. `wait` reads it, because the newest
    # token is stored after the fetch has started.
    visible: VisibleTokens | None = None
    copied_tokens: int | None = None

    @property
    def bytes(self) -> int:
        tokens = self.staged.shape[2]
        return self.staged.nbytes // max(1, tokens) * (tokens - (self.copied_tokens or 0))

    def wait(self) -> list[KVPart]:
        counted = () if self.savings is None else self.savings.tensors
        self.state.staging.release(self.staging_key, self.event, *counted)
        rows = self.state.pool.format_of(self.layer).decode(self.staged)
        parts = [KVPart.of(rows, counts=self.counts)] if rows.shape[2] else []
        if self.residency is None or self.visible is None:
            return parts
        parts = [*self.residency.part(self.layer, self.visible), *parts]
        if self.counts is not None or self.staged.is_cuda:
            return parts
        return [join(parts)]


class CudaBatches(BatchedRows):
    """`BatchedRows` for a device with separate memory. It also caches `RowLists` for fetches outside of batches."""

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._lists: dict[tuple[int, ...], RowLists] = {}

    def row_lists(self, batch: int, tokens: int) -> RowLists:
        return RowLists(self._state, batch, tokens)

    def on_device(self, block_tables: Sequence[BlockTable]) -> bool:
        copies = self._state.copies
        return copies is not None and self._state.format.exact and all(copies.covers(own) for own in block_tables)

    def lists_of(self, block_tables: Sequence[BlockTable]) -> RowLists:
        """Return the `RowLists` for these sequences, from the cache if the capacity is sufficient."""
        key, capacity = tuple(id(blocks) for blocks in block_tables), max(blocks.capacity for blocks in block_tables)
        if key not in self._lists or self._lists[key].tokens < capacity:
            self._lists[key] = self.row_lists(len(block_tables), capacity + capacity // 8)
        self._lists[key].hold(block_tables)
        return self._lists[key]

    def forget(self, blocks: BlockTable) -> None:
        self._lists = {key: lists for key, lists in self._lists.items() if id(blocks) not in key}


class CudaRows(RowFetch):
    def __init__(self, state: DeviceState, batches: CudaBatches) -> None:
        self._state, self._batches = state, batches

    def fetch(
        self, blocks: BlockTable, layer: int, visible: VisibleTokens, selection: Selection | None
    ) -> PendingFetch:
        if selection is not None:
            return self.fetch_together([blocks], layer, [visible], [selection])[0]
        return self.fetch_range(blocks, layer, visible.candidates, visible)

    def fetch_more(self, blocks: BlockTable, layer: int, extra: Selection) -> PendingFetch:
        return self.fetch_together([blocks], layer, [None], [extra])[0]

    def fetch_range(
        self, blocks: BlockTable, layer: int, tokens: range, visible: VisibleTokens | None = None
    ) -> PendingFetch:
        """Start copying all KV of `tokens`. If `visible` is not None, the result begins with its resident tokens."""
        state, one, pool = self._state, self._state[blocks], self._state.pool
        shape = (pool.layout.planes, state.geometry.rows(layer).kv_heads, len(tokens), pool.format_of(layer).width)
        staged = torch.empty(shape, dtype=state.format.storage, device=state.device)
        # If K and V share rows, the rows are copied as a whole, because copies of only K or only V would be strided.
        shared = pool.shares_rows(layer)
        planes = staged.new_empty((1, *shape[1:3], pool.layout.head_dim)) if shared else staged
        staging_key = state.staging.hold(staged, planes)
        with state.prefetch.behind_compute():
            if (written := one.written) is not None:
                state.prefetch.wait_for(written)
            copied = self._fill(blocks, layer, tokens, planes)
            if shared:
                part = pool.layout.window_part(planes[0])
                staged[0].copy_(part.k)
                staged[1].copy_(part.v)
            event = state.prefetch.record_event()
        return _PendingFetch(
            state, staging_key, event, staged, residency=one.residency, layer=layer, visible=visible,
            copied_tokens=copied,
        )  # fmt: skip

    def _fill(self, blocks: BlockTable, layer: int, tokens: range, planes: torch.Tensor) -> int | None:
        """Fill `planes` `[planes, Hkv, n, width]` with the stored KV of `tokens`.

        KV is read from copies of blocks on the device if they contain it, and from the pool otherwise. Missing layers
        of copies are loaded first. Return how many tokens the copies contained before, or None if there are no copies.
        """
        state, pool, copied = self._state, self._state.pool, None
        parts: list[tuple[range, tuple[torch.Tensor, ...]]] = [(tokens, ())]
        if copies := None if pool.groups.group[layer] else state.copies:
            copies.update(blocks)
            parts = copies.readable(blocks, layer, tokens)
            copied = sum(len(part) for part, there in parts if there)
            if copies.load(blocks, [layer], state[blocks].written):
                parts = copies.readable(blocks, layer, tokens)
        for part, there in parts:
            at = part.start - tokens.start
            for run in [there] if there else pool.planes(blocks, layer, part):
                piece = slice(at, at + run[0].shape[1])
                for into, rows in zip(planes, run, strict=True):
                    copy_heads(into[:, piece], rows)
                at = piece.stop
        return copied

    def fetch_together(
        self,
        block_tables: Sequence[BlockTable],
        layer: int,
        visible: Sequence[VisibleTokens | None],
        selections: Sequence[Selection],
    ) -> list[PendingFetch]:
        """Start one fetch per sequence, all in a single transfer.

        If `visible` is not None for a sequence, the result of its fetch begins with its resident tokens.
        """
        state = self._state
        tokens, counts = self._listed(selections)
        pending = self._batches.lists_of(block_tables).fetch(layer, tokens, counts, overlapping=len(block_tables) > 1)
        with state.prefetch.behind_compute():
            savings = [self._savings(pending.tally, b, one) for b, one in enumerate(selections)]
            event = state.prefetch.record_event()
        heads, fetches = state.geometry.kv_heads, list[PendingFetch]()
        for b, (selection, less, seen) in enumerate(zip(selections, savings, visible, strict=True)):
            staged = pending.staged[:, b * heads : (b + 1) * heads, : selection.count]
            residency = state[block_tables[b]].residency
            fetches.append(
                _PendingFetch(state, pending.staging_key, event, staged, less, selection.counts, residency, layer, seen)
            )
        return fetches

    def _listed(self, selections: Sequence[Selection]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the selected tokens as lists `[P, n]` with P = B * Hkv, and the lengths `[P]` of the lists.

        The lists are padded to the length of the longest. If no padding was needed, the lengths are None.
        """
        counts = [one.counts for one in selections if one.counts is not None]
        assert len(counts) in (0, len(selections)), "either all selections of a batch have counts or none"
        if not counts and len({one.count for one in selections}) == 1:
            return torch.cat([one.tokens.to(self._state.device) for one in selections]), None
        if not counts:
            known = [len(one.tokens) * [one.count] for one in selections]
            counts = [to_device(torch.tensor(known, dtype=torch.int32).flatten(), self._state.device)]
        most = max(one.count for one in selections)
        padded = [F.pad(one.tokens.to(self._state.device), (0, most - one.count)) for one in selections]
        return torch.cat(padded), torch.cat([each.to(self._state.device) for each in counts])

    def _savings(self, tally: torch.Tensor | None, b: int, selection: Selection) -> Savings | None:
        requested = selection.tokens.numel()
        if selection.counts is not None:
            selected = selection.counts.to(self._state.device).sum()
        elif tally is not None:
            selected = torch.full_like(tally[b, 0], requested)
        else:
            return None
        if tally is None:
            return Savings(requested, selected, requested - selected, torch.zeros_like(selected))
        return Savings(requested, selected, requested - tally[b, 0], tally[b, 1])


def copy_heads(into: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy `rows` `[Hkv, m, d]` to `into`, head by head, because only copies of contiguous memory are asynchronous."""
    for target, source in zip(into, rows, strict=True):
        target.copy_(source, non_blocking=True)
