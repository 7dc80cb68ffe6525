"""The link across PCIe: pinned host rows, a prefetch stream, a write-back stream, resident rows on the device.

Bytes per sparse layer and step and sequence: 2 * Hkv * n * d numbers in, 2 * Hkv * d out, where n are the selected rows
that are neither resident nor in the working set. On CUDA a kernel gathers them that reads the pinned rows across the
link; which rows these are is never known to the host. (Without Triton, and on a CPU, the host gathers.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..core import BlockTable, KVPart, ModelGeometry
from ..kv_cache.pool import HostPool
from .cuda_fetch import CudaBatches, CudaRows, copy_heads
from .link import PrefilledLayer
from .open_sequences import DeviceState, OpenSequence
from .plan import row_ids
from .staging import HELD_BACK
from .streams import DeviceStream, Stream


class CudaStorage:
    """`KVStorage` across PCIe: what is resident is kept on the device, everything is written back behind the compute
    that made it."""

    def __init__(self, state: DeviceState, rows: CudaRows, batches: CudaBatches) -> None:
        self._state, self._rows, self._batches = state, rows, batches

    def open(self, blocks: BlockTable, sinks: int, recent: int, origin: BlockTable | None = None) -> None:
        """Opens a sequence; the resident rows of one that has tokens already are copied or loaded."""
        state = self._state
        if origin is not None:
            state.add_copy(blocks, origin)
            return
        one = state.add(blocks, sinks, recent)
        for layer in range(state.geometry.layers if blocks.length else 0):
            sinks_here, recent_here = state.geometry.resident(layer, sinks, recent)
            last = range(max(0, blocks.length - recent_here), blocks.length)
            for tokens in (range(min(sinks_here, blocks.length)), state.pool.kept(blocks, layer, last)):
                at = tokens.start
                for run in state.pool.runs(blocks, layer, tokens):
                    one.residency.store(layer, at, run.k.to(state.device), run.v.to(state.device))
                    at += run.k.shape[1]

    def close(self, blocks: BlockTable) -> None:
        """Closes a sequence; after it nothing reads or writes the block table's chunks any more."""
        self._state.prefetch.mark().synchronize()
        self._state.staging.clear()
        self._state.write_back.mark().synchronize()
        self._state.returning.clear()
        self._state.remove(blocks)
        self._batches.forget(blocks)

    def settle(self, blocks: BlockTable) -> None:
        """Waits for the sequence's last write-back; from any thread."""
        self._state.settle(blocks)

    def append(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        """Keeps the resident ones of k, v `[Hkv, m, d]` and queues the write-back of all that have slots."""
        written = self._append(blocks, layer, start, k, v)
        self._state.returning.release(HELD_BACK)
        return written

    def _append(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        state, one = self._state, self._state[blocks]
        if k.shape[1] == 1 and not state.pool.groups.group[layer]:
            lists = self._batches.lists_of([blocks])
            lists.append(
                layer, k[:, 0].contiguous(), v[:, 0].contiguous(), *lists.newest(start, *one.residency.sizes(layer))
            )
            return state.token_bytes
        one.residency.store(layer, start, k, v)
        kept = state.pool.kept(blocks, layer, range(start, start + k.shape[1]))
        k, v = k[:, kept.start - start :], v[:, kept.start - start :]
        with state.write_back.behind_compute():
            at = 0
            stored_k, stored_v = state.format.encode(k), state.format.encode(v)
            for run in state.pool.stored(blocks, layer, kept):
                piece = slice(at, at + run.k.shape[1])
                copy_heads(run.k, stored_k[:, piece])
                copy_heads(run.v, stored_v[:, piece])
                at = piece.stop
            one.written = state.write_back.mark()
        state.returning.hold(one.written, k, v)
        return len(kept) * state.token_bytes

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Copies on the host, since both rows are in the pool, behind the write-back of the row and the reads of the
        slot it overwrites. Where that slot is a resident one, the device's copy moves too, and the working set forgets
        what was there."""
        state, one = self._state, self._state[blocks]
        state.settle(blocks)
        state.prefetch.mark().synchronize()
        state.pool.move(blocks, layer, source, target)
        self._moved(one, layer, source, target)

    def displace(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Writes the resident row to where it moves, behind the reads of the row that was there; the host waits for
        nothing."""
        state, one = self._state, self._state[blocks]
        lists = self._batches.lists_of([blocks])
        k, v = one.residency.row(layer, source)
        state.write_back.wait_for(state.prefetch.mark())
        lists.write_back(layer, k, v, lists.row(target))
        self._moved(one, layer, source, target)

    def _moved(self, one: OpenSequence, layer: int, source: int, target: int) -> None:
        """The row in slot `source` is in slot `target` too: what the device has of either follows."""
        state = self._state
        one.residency.move(layer, source, target)
        if one.working is not None:
            with state.prefetch.behind_compute():
                one.working.forget(layer, target)

    def prefill_layer(self, blocks: BlockTable, layer: int, start: int, slices: Iterable[KVPart]) -> PrefilledLayer:
        """Appends the slices, and loads the rows before `start` in front of them. What the layer before wrote back has
        been read by then."""
        state = self._state
        state.returning.release()
        first = state.pool.groups.first_seen(start, blocks.floor) if state.pool.groups.group[layer] else 0
        # Before the slices: what was written back before them is all that it waits for.
        loaded = self._rows.stage_range(blocks, layer, range(first, start)) if first < start else None
        fresh, stop, written = [], start, 0
        for part in slices:
            written += self._append(blocks, layer, stop, part.k, part.v)
            fresh.append(part)
            stop += part.k.shape[1]
        parts = fresh
        if loaded is not None:
            state.staging.arrive(loaded.held, loaded.mark)
            before = state.format.decode(loaded.staged)
            parts = [KVPart(before[0], before[1]), *fresh]
        k, v = torch.cat([part.k for part in parts], dim=1), torch.cat([part.v for part in parts], dim=1)
        return PrefilledLayer(KVPart(k, v), first, (start - first) * state.token_bytes, written)

    def extend_layer(self, blocks: BlockTable, layer: int, start: int, new: KVPart) -> PrefilledLayer:
        """As `prefill_layer`."""
        return self.prefill_layer(blocks, layer, start, [new])


class CudaLink:
    """`Link` for a device with memory of its own, and for any KV format: rows cross as they are stored and are decoded
    on the device. (On a CPU, with `InlineStream`, it serves the formats that cannot be attended to in place, and
    working sets, which save bytes there only as they are counted.)

    Order. Rows enter the pool only in the write-back stream, behind the compute that made them, and leave it only in
    the prefetch stream, behind the last write-back of their sequence; a chunk changes hands only after `close`, which
    waits for both streams. Working sets, rows and tables, belong to the prefetch stream alone. Staged rows and what is
    written back are memory of the compute stream (`staging.py`); counts that are made in the prefetch stream are handed
    over through the caching allocator's `record_stream`.
    """

    def __init__(
        self,
        pool: HostPool,
        geometry: ModelGeometry,
        device: torch.device,
        streams: tuple[Stream, Stream] | None = None,
        working_set: int = 0,
        in_place: bool = True,
    ) -> None:
        """streams: prefetch and write-back, made on `device` where None. working_set: rows per KV head that stay on the
        device in each layer that selects; 0 is none. in_place: whether kernels may read and write the pool; else the
        host copies rows together, and waits for the device to learn which."""
        prefetch, write_back = streams or (DeviceStream(device), DeviceStream(device))
        self._state = DeviceState(pool, geometry, device, prefetch, write_back, working_set, in_place)
        self.batched = CudaBatches(self._state)
        self.rows = CudaRows(self._state, self.batched)
        self.storage = CudaStorage(self._state, self.rows, self.batched)

    @property
    def device_bytes(self) -> int:
        """Bytes of resident rows and working sets of all open sequences; staged rows belong to the allocator's peak."""
        return sum(one.residency.nbytes + one.working_set_bytes for one in self._state)

    def working_set_bytes(self, blocks: BlockTable) -> int:
        """Bytes of the working set of an open sequence, its tables included."""
        return self._state[blocks].working_set_bytes

    def check_integrity(self) -> None:
        """Asserts that every row of a working set is the pool's. Waits for both streams."""
        self._state.prefetch.mark().synchronize()
        for one in self._state:
            self._state.settle(one.blocks)
            if one.working is not None:
                one.working.check_integrity(self._stored_rows(one.blocks))

    def _stored_rows(self, blocks: BlockTable) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Reads rows `[2, Hkv, n, width]` of tokens `[Hkv, n]` from the pool."""
        pool = self._state.pool
        base = pool.row_base(blocks)
        return lambda layer, tokens: pool.rows[row_ids(pool.layout, base, pool.groups.place[layer], tokens.cpu())]
