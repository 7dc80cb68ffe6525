"""KV transfers for a batch, with one list of tokens per sequence and KV head (`kernels.lists`).

For any batch size, a layer takes three kernel launches: one gathers the selected KV, one stores the newest KV on the
device, and one writes it back to the pool. Addresses and shapes are fixed, so that CUDA graphs can capture a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..core import BLOCK_SIZE, BlockTable, KVPart
from ..kernels import dispatch, pool_rows
from ..kernels.h2d_copy import copy_into, to_device
from ..kernels.pointer_table import FIELDS, PointerTable, entry
from ..kernels.pool_rows import DeviceRows
from .open_sequences import DeviceState, OpenSequence
from .plan import BLOCK_BITS, first_occurrences
from .residency import resident_index
from .staging import HELD_BACK
from .streams import Event
from .working_lists import WorkingLists


@dataclass(frozen=True)
class PendingBatchFetch:
    state: DeviceState
    staging_key: int  # key of this fetch's buffers in `state.staging`, which keeps the buffers alive
    event: Event  # reached when `staged` and `tally` are valid
    staged: torch.Tensor  # KV `[planes, P, n, width]` in the storage format, with P = B * Hkv
    # For each sequence, the number of KV entries that are transferred and the number that were found on the device,
    # int64 `[B, 2]`. All other entries are transferred for another sequence. None if all valid entries are transferred.
    tally: torch.Tensor | None

    def wait(self) -> KVPart:
        """Return K and V `[P, n, d]`. The compute stream waits for the copies, but the host does not."""
        counted = () if self.tally is None else (self.tally,)
        self.state.staging.release(self.staging_key, self.event, *counted)
        return KVPart.of(self.state.format.decode(self.staged))


class RowLists:
    """Token lists for `batch` sequences with up to `tokens` tokens each. Every KV head of a sequence has its own list.

    `hold` sets the sequences. `hold` and `append` run in the compute stream, and fetches run in the prefetch stream.
    Before the next `hold`, `wait` must be called for every fetch.
    """

    def __init__(self, state: DeviceState, batch: int, tokens: int) -> None:
        layout, device = state.pool.layout, state.device
        self._state, self._pool, self._batch, self.device = state, state.pool, batch, device
        self.heads = layout.kv_heads  # of full-attention layers
        self.entry_bytes = layout.entry_bytes  # K and V of one token and head in full-attention layers
        self._prefetch, self._write_back = state.prefetch, state.write_back
        self._moves: Any = dispatch if state.in_place else pool_rows
        """Device kernels if the pool is read in place, and torch on the host otherwise."""
        self._bases = torch.zeros(batch, -(-tokens // BLOCK_SIZE), dtype=torch.int64, device=device)
        storage_layers = state.pool.groups.storage_layer
        self._tables = torch.zeros(len(storage_layers), batch, FIELDS, dtype=torch.int64, device=device)
        each = zip(storage_layers, state.pool.groups.group, strict=True)
        firsts = [layout.vectors(index, window=group > 0) for index, group in each]
        self._offsets = to_device(torch.tensor([one for layer in firsts for own in layer for one in own]), device)
        parts = self._offsets.split([layout.planes * len(layer[0]) for layer in firsts])
        self._planes = [part.view(layout.planes, -1) for part in parts]
        """For each layer, the offsets of each head's K and V in a slab, int64 `[planes, Hkv]`, counted in vectors."""
        self._table_ids: list[list[int]] = []
        self._versions: list[int] = []
        self._open: list[OpenSequence] = []
        self._resident: list[PointerTable] = []
        capacity = state.working_set
        self._working = WorkingLists(len(storage_layers), batch, capacity, device) if capacity else None
        self._newest: tuple[tuple[int, int, int], torch.Tensor, torch.Tensor] | None = None
        self._captures = False
        self._captured: Event | None = None

    @property
    def tokens(self) -> int:
        return self._bases.shape[1] * BLOCK_SIZE

    def keep_working_sets(self, layers: Iterable[int]) -> None:
        """Make `hold` allocate the working sets of `layers`, because a graph cannot capture their allocation."""
        if self._working is not None:
            self._working.use(layers)

    def hold(self, block_tables: Sequence[BlockTable], padding: int = 0) -> None:
        """Set the sequences of the batch before a step. All of them must be open.

        Only data that has changed is copied to the device. The last `padding` sequences only fill up the batch, and
        their working sets do not change.
        """
        assert len(block_tables) == self._batch
        sequences = [self._state[blocks] for blocks in block_tables]
        tables, versions = [one.blocks.ids for one in sequences], self._complete_copies(sequences)
        if tables != self._table_ids or versions != self._versions:
            bases = torch.zeros(self._bases.shape, dtype=torch.int64)
            for row, one in zip(bases, sequences, strict=True):
                own = self._state.row_base(one.blocks)[: len(row)]
                row[: len(own)] = own
            copy_into(bases, self._bases)
            self._table_ids, self._versions = [list(ids) for ids in tables], versions
            self._newest = None
        if not self._open or any(new is not old for new, old in zip(sequences, self._open, strict=True)):
            rows = [[one.residency.lists(layer) for one in sequences] for layer in range(len(self._tables))]
            copy_into(torch.tensor([[entry(own) for own in layer] for layer in rows]), self._tables)
            self._resident = [PointerTable(tuple(own), table) for own, table in zip(rows, self._tables, strict=True)]
            if self._working is not None:
                with self._prefetch.behind_compute():
                    self._working.hold([one.working for one in sequences if one.working is not None], padding)
            self._open = sequences

    def _complete_copies(self, sequences: Sequence[OpenSequence]) -> list[int]:
        if (copies := self._state.copies) is None:
            return []
        for one in sequences:
            copies.update(one.blocks)
            copies.load_all(one.blocks, one.written)
        return [copies.version(one.blocks) for one in sequences]

    def release(self) -> None:
        self._open, self._resident = [], []
        if self._working is not None:
            self._working.release()

    @property
    def in_place(self) -> bool:
        """Whether kernels read the pool directly, in which case the host never waits."""
        return self._state.in_place

    def join(self) -> None:
        """Make the compute stream wait for all write-backs and fetches queued so far."""
        for stream in (self._prefetch, self._write_back):
            with stream.behind_compute():  # During a capture, this adds streams that the step does not use.
                event = stream.record_event()
            stream.hold_compute(event)
        self._state.pending_writes.clear()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Return a context for capturing a step in a CUDA graph. Call `join` before, as before a replay."""
        self._captures, self._captured = True, None
        try:
            yield
        finally:
            self._captures, self._captured = False, None

    def replayed(self) -> None:
        """Make later transfers of the sequences wait for all compute work queued so far. Call after a graph replay."""
        with self._write_back.behind_compute():
            self._set_written(self._write_back.record_event())

    def _set_written(self, event: Event) -> None:
        if self._captures:
            # Other threads may wait for the events of sequences (`DeviceState.settle`). They cannot wait for an event
            # that was recorded during a capture.
            self._captured = event
            return
        for one in self._open:
            one.written = event

    @property
    def _written(self) -> list[Event]:
        if self._captures:
            return [] if self._captured is None else [self._captured]
        events = {id(one.written): one.written for one in self._open}.values()
        return [event for event in events if event is not None]

    def forget(self) -> None:
        """Wait for the device and drop the buffers of all fetches. Call this after a graph capture has failed."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self._state.staging.clear()
        self._state.pending_writes.clear()

    def resident(self, layer: int) -> PointerTable:
        """Return the resident KV `[planes * Hkv, s + w, d]` of each sequence."""
        return self._resident[layer]

    def copies(self, layer: int) -> tuple[DeviceRows, torch.Tensor]:
        """Return the copies of blocks on the device, and the first row id of each block `[B, blocks]`."""
        rows = self._state.device_rows(layer)
        assert rows is not None, "see `BatchedRows.on_device`"
        return rows, self._bases

    def token_bytes(self, layer: int) -> int:
        return self._pool.token_bytes(layer)

    def newest_index_and_row(self, slot: int, sinks: int, recent: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the arguments `indices` and `rows` of `append` for a single sequence whose newest token is in `slot`.

        The tensors are created only once for all layers of a step.
        """
        key = slot, sinks, recent
        if self._newest is None or self._newest[0] != key:
            at = torch.tensor([resident_index(slot, sinks, recent)])
            self._newest = key, to_device(at, self.device), self.row(slot)
        return self._newest[1:]

    def row(self, slot: int) -> torch.Tensor:
        return to_device(torch.tensor(self.rows_of(0, [slot])), self.device)

    def group(self, layer: int) -> int:
        return self._pool.groups.group[layer]

    def rows_of(self, group: int, slots: Sequence[int]) -> list[int]:
        """Return the row id of the key in slot `slots[b]` of each sequence b, for head 0 and the group's first layer.

        For a negative slot, the id is negative. If blocks have copies on the device, the row ids in the pool are
        followed by the row ids in the copies.
        """
        each = list(zip(self._open, slots, strict=True))
        rows = [slot if slot < 0 else self._pool.row(one.blocks, group, slot) for one, slot in each]
        if (copies := self._state.copies) is None or group:
            return rows
        return rows + [slot if slot < 0 else copies.row(one.blocks, slot) for one, slot in each]

    def row_count(self, group: int) -> int:
        return self._batch * (1 if self._state.copies is None or group else 2)

    def append(self, layer: int, newest: KVPart, indices: torch.Tensor, rows: torch.Tensor) -> None:
        """Store the newest KV of each sequence on the device and write it back to the pool.

        Args:
            newest: Keys and values `[P, d]`, with P = B * Hkv.
            indices: Index of the newest token in each sequence's resident KV (see `resident_index`), int64 `[B]`.
                Sequences with a negative index are skipped.
            rows: Row ids of each sequence's newest token (see `rows_of`). Negative ids are skipped.
        """
        dispatch.store_resident(newest.k, newest.v, self._resident[layer], indices)
        self.write_back(layer, newest, rows)

    def write_back(self, layer: int, newest: KVPart, rows: torch.Tensor) -> None:
        """Write K and V `[P, d]` to the rows `rows` (see `rows_of`), after earlier compute work. P = B * Hkv."""
        with self._write_back.behind_compute():
            stored = newest.map(self._pool.format_of(layer).encode)
            vectors, device = self._pool.vectors(layer), self._state.device_rows(layer)
            self._moves.write_rows(vectors, stored.k, stored.v, rows, self._planes[layer], device)
            event = self._write_back.record_event()
        self._state.pending_writes.hold(event, newest.k, newest.v, rows, self._offsets)
        self._state.pending_writes.release(HELD_BACK)
        self._set_written(event)

    def fetch(
        self, layer: int, tokens: torch.Tensor, counts: torch.Tensor | None, *, overlapping: bool, cached: bool = True
    ) -> PendingBatchFetch:
        """Start fetching the KV of selected tokens.

        Args:
            tokens: Token lists, int64 `[P, n]`.
            counts: Number of valid tokens in each list, int32 `[P]`. None if all tokens are valid.
            overlapping: Whether KV that several sequences select from shared blocks is read from the pool only once.
            cached: Whether to use the working sets.
        """
        # Inputs and staged KV are allocated in the compute stream (`Staging`). All other tensors are allocated, used
        # and freed in the prefetch stream.
        shape = (self._pool.layout.planes, *tokens.shape, self._pool.rows.shape[1])
        staged = self._pool.rows.new_empty(shape, device=tokens.device)
        staging_key = self._state.staging.hold(
            staged, tokens, self._bases, self._offsets, *(() if counts is None else (counts,))
        )
        with self._prefetch.behind_compute():
            for event in self._written:
                self._prefetch.wait_for(event)
            working = self._working if cached and tokens.numel() else None
            if overlapping or working is not None:
                tally = self._gather_listed(layer, tokens, counts, staged, working, overlapping=overlapping)
            else:
                device = self._state.device_rows(layer)
                tally = None if device is None else tokens.new_zeros(self._batch, 2)
                planes = self._planes[layer]
                self._moves.gather_tokens(self._pool.rows, tokens, counts, self._bases, planes, staged, device, tally)
            return PendingBatchFetch(self._state, staging_key, self._prefetch.record_event(), staged, tally)

    def _ids(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        at = tokens.view(self._batch, -1)
        rows = self._bases.gather(1, at >> BLOCK_BITS).add_(at & (BLOCK_SIZE - 1)).view(self._batch, self.heads, -1)
        offsets = self._planes[layer].unsqueeze(1).unsqueeze(-1)
        if (device := self._state.device_rows(layer)) is not None:
            copies = device.planes.unsqueeze(1).unsqueeze(-1) + device.first
            offsets = copies.where(rows >= device.first, offsets)
        found: torch.Tensor = (rows + offsets).flatten(1, 2)
        return found

    def _gather_listed(
        self,
        layer: int,
        tokens: torch.Tensor,
        counts: torch.Tensor | None,
        staged: torch.Tensor,
        working: WorkingLists | None,
        *,
        overlapping: bool,
    ) -> torch.Tensor | None:
        """Fill `staged` with the KV of `tokens`, from working sets, copies of blocks, or the pool.

        If `overlapping`, KV that several sequences need is read from the pool once and then copied on the device. The
        result is the value of `PendingBatchFetch.tally`.
        """
        ids, valid, found, copied = self._ids(layer, tokens), None, None, None
        if counts is not None:
            valid = torch.arange(tokens.shape[1], device=tokens.device) < counts.unsqueeze(1)
            ids = ids.masked_fill(~valid, -1)
        if working is not None:
            found = working.look_up(layer, tokens, valid)
            ids = ids.masked_fill(found.slots >= 0, -1)
        if (device := self._state.device_rows(layer)) is not None:
            copied = ids[0] >= device.first
        again = None
        if overlapping and ids.numel():
            # K and V have the same duplicates, so it is enough to sort the rows of K. KV in copies of blocks may be
            # read several times.
            keys = first_occurrences((ids[0] if copied is None else ids[0].masked_fill(copied, -1)).flatten())
            values = [(keys + len(keys)).where(keys >= 0, -1)] * (len(ids) - 1)  # none if keys contain the values
            again = torch.stack([keys, *values]).view_as(ids)
        wanted = (ids if again is None else ids.masked_fill(again >= 0, -1)).flatten(0, 1)
        all_of_them = torch.full((len(wanted),), wanted.shape[1], dtype=torch.int32, device=ids.device)
        rows = staged.flatten(0, 1)
        self._moves.gather_rows(self._pool.rows, wanted, all_of_them, rows, device)
        if again is not None:
            dispatch.gather_rows(rows.flatten(0, 1), again.flatten(0, 1), all_of_them, rows)
        if working is not None and found is not None:
            working.take(layer, found, staged)
            working.put(layer, found, staged)
        hits = copied if found is None else found.hits
        return self._tally(tokens, counts, None if hits is None else hits.view(self._batch, -1).sum(1), again)

    def _tally(
        self, tokens: torch.Tensor, counts: torch.Tensor | None, hits: torch.Tensor | None, again: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the value of `PendingBatchFetch.tally`.

        `hits` `[B]` counts the entries that were found on the device. `again` is >= 0 for entries that are fetched for
        another sequence.
        """
        if hits is None and again is None:
            return None
        if counts is None:
            selected = torch.full((self._batch,), self.heads * tokens.shape[1], device=tokens.device)
        else:
            selected = counts.view(self._batch, -1).sum(1)
        hits = torch.zeros_like(selected) if hits is None else hits
        transferred = selected - hits
        if again is not None:
            transferred = transferred - (again[0].view(self._batch, -1) >= 0).sum(1)
        return torch.stack((transferred, hits), dim=1)
