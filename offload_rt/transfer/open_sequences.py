"""Device data of open sequences and the two transfer streams, which the parts of `CudaTransfer` share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..core import BlockTable, ModelGeometry
from ..kernels.pool_rows import DeviceRows
from ..kv_cache.pool import HostPool
from .device_copies import DeviceCopies
from .residency import Residency
from .staging import PendingWriteBacks, Staging
from .streams import Event, Stream
from .working_set import WorkingSet


@dataclass
class OpenSequence:
    """Device data of an open sequence. `written` is the event of its last write-back."""

    blocks: BlockTable
    residency: Residency
    working: WorkingSet | None
    written: Event | None = None

    @property
    def working_set_bytes(self) -> int:
        return 0 if self.working is None else self.working.nbytes


class DeviceState:
    """The open sequences by block table, the pool, and the transfer streams."""

    def __init__(
        self,
        pool: HostPool,
        geometry: ModelGeometry,
        device: torch.device,
        prefetch: Stream,
        write_back: Stream,
        working_set: int,
        in_place: bool,
    ) -> None:
        self.pool, self.geometry, self.device, self.format = pool, geometry, device, pool.format
        self.prefetch, self.write_back = prefetch, write_back
        self.staging, self.pending_writes = Staging(prefetch), PendingWriteBacks(write_back)
        self.entry_bytes = pool.layout.entry_bytes
        self.working_set, self.in_place = working_set, in_place
        self.copies: DeviceCopies | None = None
        self._open: dict[int, OpenSequence] = {}

    def __getitem__(self, blocks: BlockTable) -> OpenSequence:
        return self._open[id(blocks)]

    def __iter__(self) -> Iterator[OpenSequence]:
        return iter(self._open.values())

    def find(self, blocks: BlockTable) -> OpenSequence | None:
        """Return the open sequence of a block table, or None. Thread-safe."""
        return self._open.get(id(blocks))

    def add(self, blocks: BlockTable, sinks: int, recent: int) -> OpenSequence:
        residency = Residency(self.geometry, self.format.dtype, self.device, sinks, recent)
        self._open[id(blocks)] = OpenSequence(blocks, residency, self._new_working_set())
        return self._open[id(blocks)]

    def add_copy(self, blocks: BlockTable, origin: BlockTable) -> None:
        """Open a sequence, and copy its device data from the open sequence `origin`."""
        like = self[origin]
        with self.prefetch.behind_compute():
            copied = None if like.working is None else like.working.clone()
        self._open[id(blocks)] = OpenSequence(blocks, like.residency.clone(), copied)

    def remove(self, blocks: BlockTable) -> None:
        self._open.pop(id(blocks), None)

    def device_rows(self, layer: int) -> DeviceRows | None:
        return None if self.copies is None or self.pool.groups.group[layer] else self.copies.rows(layer)

    def row_base(self, blocks: BlockTable) -> torch.Tensor:
        """Return the row id at which each block begins, int64 `[blocks]`. It is in the pool or in a device copy."""
        return self.pool.row_base(blocks) if self.copies is None else self.copies.row_base(blocks)

    def settle(self, blocks: BlockTable) -> None:
        """Make the host wait for the last write-back of the sequence. Thread-safe."""
        # A sequence that is being opened or closed has no pending write-back.
        one = self.find(blocks)
        if one is not None and (written := one.written) is not None:
            written.synchronize()

    def _new_working_set(self) -> WorkingSet | None:
        if not self.working_set:
            return None
        rows = replace(self.geometry.full_rows, head_dim=self.format.width)
        return WorkingSet(rows, self.working_set, self.format.storage, self.device)
