"""Copies of pool blocks on the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch

from ..core import BLOCK_SIZE, BlockTable
from ..kernels.h2d_copy import to_device
from ..kernels.pool_rows import DeviceRows
from ..kv_cache.pool import HostPool
from .device_blocks import DeviceBlocks
from .streams import Event, Stream


class DeviceCopies:
    """Copies of blocks with KV of full-attention layers, in one device tensor with a fixed address.

    KV that is in a copy need not be transferred. New KV is written both to the pool and to the copy, in the write-back
    stream. A copy is therefore bit-identical to its block, and can be dropped at any time. Layers that are missing from
    a copy are loaded from the pool in the prefetch stream. The prefetch stream reads the copies, and if they contain
    all KV of a batch, the compute stream does.

    The row ids of copies begin after those of the pool (`kernels.pool_rows`), so kernels know from a row id whether to
    read the pool or a copy.
    """

    def __init__(self, pool: HostPool, device: torch.device, slots: int, prefetch: Stream, write_back: Stream) -> None:
        layout, groups = pool.layout, pool.groups
        self._pool, self._prefetch, self._write_back = pool, prefetch, write_back
        self.layers = groups.layers_of(0)
        own = replace(layout, layers=groups.used_storage_layers(0), slab_blocks=slots, slabs=1, window_rows=None)
        count = own.layers * own.layer_rows
        self._rows = torch.empty(count, layout.head_dim, dtype=pool.format.storage, device=device)
        self._planes = self._rows.view(own.layers, own.kv_heads, own.planes, own.plane_rows, layout.head_dim)
        self._first = first = len(pool.rows)
        offsets = [own.vectors(groups.storage_layer[layer], window=False) for layer in self.layers]
        planes = to_device(torch.tensor(offsets) - first, device)
        self._rows_of = {
            layer: DeviceRows(self._rows, first, each) for layer, each in zip(self.layers, planes, strict=True)
        }
        self._blocks = DeviceBlocks(slots, self.layers)
        self._loaded: dict[int, int] = {}  # `loaded_bytes` of each sequence
        self._covered: dict[int, tuple[int, bool]] = {}  # `version` of each sequence, and the result of `covers`
        pool.on_free.append(self._blocks.freed)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def rows(self, layer: int) -> DeviceRows:
        return self._rows_of[layer]

    def update(self, blocks: BlockTable) -> None:
        """Assign slots to new blocks of an open sequence, and free the slots of blocks that it no longer uses."""
        if self._blocks.update(id(blocks), blocks.ids, blocks.length):
            # The slots may have belonged to other blocks, whose transfers must end before new transfers begin.
            self._prefetch.wait_for(self._write_back.record_event())
            self._write_back.wait_for(self._prefetch.record_event())

    def close(self, blocks: BlockTable) -> None:
        self._blocks.close(id(blocks))
        self._loaded.pop(id(blocks), None)
        self._covered.pop(id(blocks), None)

    def version(self, blocks: BlockTable) -> int:
        """Return a number that changes whenever the sequence's `row_base` changes. Numbers are never reused."""
        return self._blocks.version(id(blocks))

    def row_base(self, blocks: BlockTable) -> torch.Tensor:
        """Return the row id at which each block begins, int64 `[blocks]`.

        The row id is in the copy of the block if the copy is complete, and in the pool otherwise.
        """
        slots = torch.tensor(self._blocks.complete_slots(id(blocks)), dtype=torch.int64)
        return torch.where(slots < 0, self._pool.row_base(blocks), self._first + slots * BLOCK_SIZE)

    def row(self, blocks: BlockTable, token: int) -> int:
        """Return the row id of the key of `token` in the copy of its block, or -1 if the block has no copy.

        The row id is for head 0 of storage layer 0.
        """
        slot = self._blocks.slot(blocks.ids[token // BLOCK_SIZE])
        return -1 if slot < 0 else self._first + slot * BLOCK_SIZE + token % BLOCK_SIZE

    def write(self, blocks: BlockTable, layer: int, tokens: range, encoded: Sequence[torch.Tensor]) -> None:
        """Write K and V `[Hkv, n, width]` of `tokens` to the copies, in the write-back stream.

        `encoded` contains the tensors that were written to the pool.
        """
        self.update(blocks)
        for part, offset in _runs(blocks.ids, tokens, self._blocks.slot):
            if offset >= 0:
                at = slice(part.start - tokens.start, part.stop - tokens.start)
                for into, rows in zip(self._part(layer, offset, len(part)), encoded, strict=True):
                    into.copy_(rows[:, at])

    def readable(self, blocks: BlockTable, layer: int, tokens: range) -> list[tuple[range, tuple[torch.Tensor, ...]]]:
        """Split `tokens` into parts. Return each part with its K and V `[Hkv, n, width]` on the device.

        For a part that has no readable copy, the tuple of K and V is empty.
        """
        parts = _runs(blocks.ids, tokens, lambda block: self._blocks.readable_slot(block, layer))
        return [(part, () if offset < 0 else self._part(layer, offset, len(part))) for part, offset in parts]

    def load(self, blocks: BlockTable, layers: Collection[int], written: Event | None) -> int:
        """Start copying those of `layers` that the copies of the sequence's blocks lack, after the event `written`.

        The KV of these layers must be in the pool. Return the size of the copied KV in bytes.
        """
        if not self._blocks.incomplete(id(blocks)):
            return 0
        with self._prefetch.behind_compute():
            if written is not None:
                self._prefetch.wait_for(written)
            loaded = sum(self._load_layer(blocks, layer) for layer in layers)
            event = self._prefetch.record_event()
        self._write_back.wait_for(event)
        return loaded

    def covers(self, blocks: BlockTable) -> bool:
        """Return whether all blocks of an open sequence have copies, some of which may lack layers."""
        self.update(blocks)
        version, covered = self._covered.get(id(blocks), (-1, False))
        if version != self.version(blocks):
            covered = all(self._blocks.slot(block) >= 0 for block in blocks.ids)
            self._covered[id(blocks)] = self.version(blocks), covered
        return covered

    def load_all(self, blocks: BlockTable, written: Event | None) -> None:
        """Start copying all missing layers before a step. The copied bytes are added to `loaded_bytes`."""
        if loaded := self.load(blocks, self.layers, written):
            self._loaded[id(blocks)] = self.loaded_bytes(blocks) + loaded

    def loaded_bytes(self, blocks: BlockTable) -> int:
        return self._loaded.get(id(blocks), 0)

    def refresh(self, blocks: BlockTable, layer: int, token: int) -> None:
        """Copy the KV of a token again after it has changed in the pool."""
        with self._write_back.behind_compute():
            self._copy_from_pool(blocks, layer, range(token, token + 1), self._blocks.slot)

    def check_integrity(self, block_tables: Sequence[BlockTable]) -> None:
        """Assert that complete copies of committed tokens equal the KV in the pool. All transfers must have ended."""
        self._blocks.check_integrity()
        for blocks in block_tables:
            self.update(blocks)
            for layer in self.layers:
                for part, rows in self.readable(blocks, layer, range(blocks.length)):
                    stored = self._pool.planes(blocks, layer, part) if rows else []
                    wanted = [torch.cat(plane, dim=1) for plane in zip(*stored, strict=True)]
                    for own, want in zip(rows, wanted, strict=True):
                        same = own.cpu().view(torch.uint8) == want.view(torch.uint8)
                        assert bool(same.all()), f"layer {layer}: copies of the tokens {part} differ from the pool"

    def _load_layer(self, blocks: BlockTable, layer: int) -> int:
        def missing_slot(block: int) -> int:
            return self._blocks.missing_slot(block, layer)

        self._copy_from_pool(blocks, layer, range(blocks.capacity), missing_slot)
        missing = [block for block in blocks.ids if missing_slot(block) >= 0]
        for block in missing:
            self._blocks.loaded(block, layer)
        return len(missing) * BLOCK_SIZE * self._pool.token_bytes(layer)

    def _copy_from_pool(self, blocks: BlockTable, layer: int, tokens: range, slot_of: Callable[[int], int]) -> None:
        for part, offset in _runs(blocks.ids, tokens, slot_of):
            for run in self._pool.planes(blocks, layer, part) if offset >= 0 else ():
                size = run[0].shape[1]
                for into, rows in zip(self._part(layer, offset, size), run, strict=True):
                    for target, source in zip(into, rows, strict=True):  # contiguous, so that the host does not wait
                        target.copy_(source, non_blocking=True)
                offset += size

    def _part(self, layer: int, offset: int, size: int) -> tuple[torch.Tensor, ...]:
        """Return views `[Hkv, size, width]` of K and V from token slot `offset` on, or only of K if it contains V."""
        return self._planes[self._pool.groups.storage_layer[layer]].narrow(2, offset, size).unbind(1)


def copy_bytes(pool: HostPool) -> int:
    """Return the size of a block's copy in bytes, or 0 if the model has no full-attention layers."""
    groups, layout = pool.groups, pool.layout
    layers = groups.used_storage_layers(0) if groups.full else 0
    return layers * layout.kv_heads * BLOCK_SIZE * layout.entry_bytes


def _runs(ids: Sequence[int], tokens: range, slot_of: Callable[[int], int]) -> Iterator[tuple[range, int]]:
    """Split `tokens` into parts whose blocks have either consecutive slots or no slots.

    Yield each part with its first token slot, or with -1 if it has no slots. `slot_of` returns the slot of a block, or
    -1 if the block has no slot.
    """
    start = tokens.start
    while start < tokens.stop:
        index = start // BLOCK_SIZE
        slot, stop = slot_of(ids[index]), index + 1
        while stop * BLOCK_SIZE < tokens.stop and slot_of(ids[stop]) == (-1 if slot < 0 else slot + stop - index):
            stop += 1
        end = min(tokens.stop, stop * BLOCK_SIZE)
        yield range(start, end), -1 if slot < 0 else slot * BLOCK_SIZE + start % BLOCK_SIZE
        start = end
