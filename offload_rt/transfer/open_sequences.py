"""What the device has of each open sequence, and the two streams that rows move in: what the parts of the CUDA link
share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..core import BlockTable, ModelGeometry
from ..kv_cache.pool import HostPool
from .residency import Residency
from .staging import Returning, Staging
from .streams import Event, Stream
from .working_set import WorkingSet


@dataclass
class OpenSequence:
    """What the device has of one sequence. `written` is behind its last write-back."""

    blocks: BlockTable
    residency: Residency
    working: WorkingSet | None
    written: Event | None = None

    @property
    def working_set_bytes(self) -> int:
        """Bytes of its working set, tables included."""
        return 0 if self.working is None else self.working.nbytes


class DeviceState:
    """The open sequences of a link, by block table, the pool that their rows are in, and the streams between
    the two."""

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
        self.staging, self.returning = Staging(prefetch), Returning(write_back)
        self.pair_bytes = 2 * pool.layout.row_bytes
        self.token_bytes = pool.layout.kv_heads * self.pair_bytes
        self._working_set, self.in_place = working_set, in_place
        self._open: dict[int, OpenSequence] = {}

    def __getitem__(self, blocks: BlockTable) -> OpenSequence:
        return self._open[id(blocks)]

    def __iter__(self) -> Iterator[OpenSequence]:
        return iter(self._open.values())

    def find(self, blocks: BlockTable) -> OpenSequence | None:
        """The sequence, if it is open; from any thread."""
        return self._open.get(id(blocks))

    def add(self, blocks: BlockTable, sinks: int, recent: int) -> OpenSequence:
        """Opens a sequence of which nothing is on the device yet."""
        residency = Residency(self.geometry, self.format.dtype, self.device, sinks, recent)
        self._open[id(blocks)] = OpenSequence(blocks, residency, self._new_working_set())
        return self._open[id(blocks)]

    def add_copy(self, blocks: BlockTable, origin: BlockTable) -> None:
        """Opens a sequence with copies of what the device has of the open block table `origin`."""
        like = self[origin]
        with self.prefetch.behind_compute():
            copied = None if like.working is None else like.working.clone()
        self._open[id(blocks)] = OpenSequence(blocks, like.residency.clone(), copied)

    def remove(self, blocks: BlockTable) -> None:
        """Close a sequence. A second call does nothing."""
        self._open.pop(id(blocks), None)

    def settle(self, blocks: BlockTable) -> None:
        """Blocks the host until the sequence's last write-back is in the pool; from any thread: a block table that is
        being closed or opened anew has nothing on its way."""
        one = self.find(blocks)
        if one is not None and (written := one.written) is not None:
            written.synchronize()

    def _new_working_set(self) -> WorkingSet | None:
        if not self._working_set:
            return None
        heads, width = self.geometry.kv_heads, self.format.width
        return WorkingSet(heads, self._working_set, width, self.format.storage, self.device)
