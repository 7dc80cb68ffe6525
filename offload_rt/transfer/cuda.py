"""Transfers over PCIe, with pinned host KV, a prefetch stream, a write-back stream, and resident KV on the device.

In each step, a layer that selects tokens copies the selected KV to the device, except for KV that is already there. It
also writes the KV of one token per sequence to the host.

On CUDA, a kernel reads KV directly from pinned memory, so the host never needs to know the token indices. Without
Triton, or on a CPU, the host gathers the KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..core import BlockTable, KVPart, ModelGeometry
from ..kv_cache.pool import HostPool
from .base import KVStorage, PrefilledLayer, Transfer, join
from .cuda_fetch import CudaBatches, CudaRows, copy_heads
from .device_copies import DeviceCopies
from .open_sequences import DeviceState, OpenSequence
from .plan import row_ids
from .staging import HELD_BACK
from .streams import DeviceStream, Stream


class CudaStorage(KVStorage):
    """`KVStorage` for a device with separate memory. The write-back stream writes all KV to the pool."""

    def __init__(self, state: DeviceState, rows: CudaRows, batches: CudaBatches) -> None:
        self._state, self._rows, self._batches = state, rows, batches

    def open(self, blocks: BlockTable, sinks: int, recent: int, origin: BlockTable | None = None) -> None:
        state = self._state
        if state.copies is not None:
            state.copies.update(blocks)
        if origin is not None:
            state.add_copy(blocks, origin)
            return
        residency = state.add(blocks, sinks, recent).residency
        residency.load(state.pool, blocks, lambda layer, tokens: state.pool.runs(blocks, layer, tokens))

    def close(self, blocks: BlockTable) -> None:
        self._end_transfers(blocks)
        if self._state.copies is not None:
            self._state.copies.close(blocks)

    def reload(self, blocks: BlockTable, sinks: int, recent: int) -> None:
        # Copies of blocks on the device need no reload. They are loaded when the sequence first computes, so they
        # contain the KV that the host has written since `open`.
        self._end_transfers(blocks)
        self.open(blocks, sinks, recent)

    def _end_transfers(self, blocks: BlockTable) -> None:
        self._state.prefetch.record_event().synchronize()
        self._state.staging.clear()
        self._state.write_back.record_event().synchronize()
        self._state.pending_writes.clear()
        self._state.remove(blocks)
        self._batches.forget(blocks)

    def settle(self, blocks: BlockTable) -> None:
        self._state.settle(blocks)

    def append(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        written = self._append(blocks, layer, start, k, v)
        self._state.pending_writes.release(HELD_BACK)
        return written

    def _append(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        state, one = self._state, self._state[blocks]
        if k.shape[1] == 1 and not state.pool.groups.group[layer]:
            lists = self._batches.lists_of([blocks])
            newest = KVPart(k, v).map(lambda rows: rows[:, 0].contiguous())
            lists.append(layer, newest, *lists.newest_index_and_row(start, *one.residency.sizes(layer)))
            return state.pool.token_bytes(layer)
        one.residency.store(layer, start, k, v)
        return self._start_write_back(one, layer, start, k, v)

    def _start_write_back(self, one: OpenSequence, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        state, blocks = self._state, one.blocks
        kept = state.pool.stored_range(blocks, layer, range(start, start + k.shape[1]))
        part = KVPart(k, v).between(kept.start - start)
        with state.write_back.behind_compute():
            at, stored = 0, part.map(state.pool.format_of(layer).encode)
            encoded = state.pool.in_planes(layer, stored.k, stored.v)
            for run in state.pool.planes(blocks, layer, kept):
                piece = slice(at, at + run[0].shape[1])
                for into, rows in zip(run, encoded, strict=True):
                    copy_heads(into, rows[:, piece])
                at = piece.stop
            if state.copies is not None and not state.pool.groups.group[layer]:
                state.copies.write(blocks, layer, kept, encoded)
            one.written = state.write_back.record_event()
        state.pending_writes.hold(one.written, part.k, part.v)
        return len(kept) * state.pool.token_bytes(layer)

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        state, one = self._state, self._state[blocks]
        state.settle(blocks)
        state.prefetch.record_event().synchronize()  # until all reads of the target slot have ended
        state.pool.move(blocks, layer, source, target)
        if state.copies is not None and not state.pool.groups.group[layer]:
            state.copies.refresh(blocks, layer, target)
            one.written = state.write_back.record_event()
        self._update_after_move(one, layer, source, target)

    def displace(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        state, one = self._state, self._state[blocks]
        lists = self._batches.lists_of([blocks])
        entry = KVPart.of(one.residency.row(layer, source))
        state.write_back.wait_for(state.prefetch.record_event())  # until all reads of the target slot have ended
        lists.write_back(layer, entry, lists.row(target))
        self._update_after_move(one, layer, source, target)

    def _update_after_move(self, one: OpenSequence, layer: int, source: int, target: int) -> None:
        state = self._state
        one.residency.move(layer, source, target)
        if one.working is not None:
            with state.prefetch.behind_compute():
                one.working.forget(layer, target)

    def prefill_layer(self, blocks: BlockTable, layer: int, start: int, slices: Iterable[KVPart]) -> PrefilledLayer:
        state, one = self._state, self._state[blocks]
        state.pending_writes.release()  # the slices of the previous layer
        first = state.pool.groups.first_seen(start, blocks.floor) if state.pool.groups.group[layer] else 0
        # Start loading before the slices are appended, so that the load does not wait for their write-backs.
        loaded = self._rows.fetch_range(blocks, layer, range(first, start)) if first < start else None
        fresh, stop, written = [], start, 0
        for part in slices:
            # Make all heads contiguous with a single copy. Otherwise, the code below would need one copy per head.
            own = part.map(torch.Tensor.contiguous)
            written += self._start_write_back(one, layer, stop, own.k, own.v)
            fresh.append(own)
            stop += own.k.shape[1]
        kv = join(fresh if loaded is None else [*loaded.wait(), *fresh])
        one.residency.store(layer, start, kv.k[:, start - first :], kv.v[:, start - first :])
        return PrefilledLayer(kv, first, 0 if loaded is None else loaded.bytes, written)


class CudaTransfer(Transfer):
    """`Transfer` for a device with separate memory and any KV format.

    KV is transferred in the storage format and decoded on the device. On a CPU (with `InlineStream`), this class is
    used for KV formats that attention cannot read in place, and to count how many bytes working sets would save.

    Rules for the order of operations:
        * KV is written to the pool only in the write-back stream, after the compute work that produced it.
        * KV is read from the pool only in the prefetch stream, after the last write-back of its sequence.
        * A block is reused only after `close`, which waits for both streams.
        * Working sets are used only in the prefetch stream.
        * Copies of blocks on the device are used in the same streams as the blocks (`DeviceCopies`).
        * Buffers are allocated in the compute stream (`staging.py`). Counts are allocated in the prefetch stream and
        registered with `record_stream`.
    """

    def __init__(
        self,
        pool: HostPool,
        geometry: ModelGeometry,
        device: torch.device,
        streams: tuple[Stream, Stream] | None = None,
        working_set: int = 0,
        in_place: bool = True,
        device_blocks: int = 0,
    ) -> None:
        """Create the transfer.

        Args:
            streams: The prefetch stream and the write-back stream. If None, both are created on `device`.
            working_set: Capacity of each sequence's working set, in entries per KV head and sparse layer. 0 disables
                working sets.
            in_place: Whether kernels access the pool directly. If False, the host waits for the selected indices and
                gathers the KV.
            device_blocks: Maximum number of blocks that have copies on the device. Cannot be combined with working
                sets.
        """
        assert not (working_set and device_blocks)
        prefetch, write_back = streams or (DeviceStream(device), DeviceStream(device))
        self._state = DeviceState(pool, geometry, device, prefetch, write_back, working_set, in_place)
        if device_blocks:
            self._state.copies = DeviceCopies(pool, device, device_blocks, prefetch, write_back)
        self.batched = CudaBatches(self._state)
        self.rows = CudaRows(self._state, self.batched)
        self.storage = CudaStorage(self._state, self.rows, self.batched)

    @property
    def device_bytes(self) -> int:
        copies = 0 if self._state.copies is None else self._state.copies.nbytes
        return copies + sum(one.residency.nbytes + one.working_set_bytes for one in self._state)

    def working_set_bytes(self, blocks: BlockTable) -> int:
        return self._state[blocks].working_set_bytes

    def loaded_bytes(self, blocks: BlockTable) -> int:
        return 0 if self._state.copies is None else self._state.copies.loaded_bytes(blocks)

    def check_integrity(self) -> None:
        self._state.prefetch.record_event().synchronize()
        for one in self._state:
            self._state.settle(one.blocks)
            if one.working is not None:
                one.working.check_integrity(self._stored_rows(one.blocks))
        if self._state.copies is not None:
            self._state.copies.check_integrity([one.blocks for one in self._state])

    def _stored_rows(self, blocks: BlockTable) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Return a function that takes a layer and tokens `[Hkv, n]`, and reads their KV from the pool.

        The KV has the shape `[planes, Hkv, n, width]`.
        """
        pool = self._state.pool
        base = pool.row_base(blocks)
        return lambda layer, tokens: pool.rows[
            row_ids(pool.layout, base, pool.groups.storage_layer[layer], tokens.cpu())
        ]
