"""Interface of KV transfers between the host pool and the compute device.

The interface has three parts. `KVStorage` stores new KV. `RowFetch` fetches KV of single sequences. `BatchedRows`
fetches KV of whole batches; the numbers of selected tokens then stay on the device.

All byte counts assume separate device memory. On a CPU, where KV is read in place, the counts are the same as on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..core import BlockTable, KVPart, Selection, VisibleTokens
from .row_lists import RowLists


@dataclass(frozen=True)
class PrefilledLayer:
    """KV of one layer during prefill, valid until the next layer is prefilled.

    Attributes:
        kv: Contiguous K and V of the tokens [first, stop): all tokens that are not in `past`. In a sliding-window
            layer, only tokens that a new token can see.
        first: Index of the first token in `kv`.
        bytes_to_device: Bytes of KV of earlier tokens that were copied to the device.
        bytes_to_host: Bytes of new KV written back to the pool.
        past: KV of earlier visible tokens that are not in `kv`, as parts in token order. It can be iterated over once.
            Used if KV is on disk, or if KV is read in place and is not contiguous.
    """

    kv: KVPart
    first: int
    bytes_to_device: int
    bytes_to_host: int
    past: Sequence[KVPart] = ()

    def joined(self) -> PrefilledLayer:
        """Return this object with `past` and `kv` concatenated in `kv`."""
        return replace(self, kv=join([*self.past, self.kv]), first=0, past=()) if self.past else self


def join(parts: Sequence[KVPart]) -> KVPart:
    """Concatenate parts along the token axis. If there is only one part, return it unchanged."""
    if len(parts) == 1:
        return parts[0]
    return KVPart(torch.cat([part.k for part in parts], dim=1), torch.cat([part.v for part in parts], dim=1))


@dataclass(frozen=True)
class Savings:
    """Numbers of KV entries of a pending fetch that need no transfer. An entry is K and V of one token and KV head.

    The counts are on the device (int64 scalars).

    Attributes:
        requested: Number of requested entries, including padding.
        selected: Number of requested entries without padding.
        rows: Number of entries that are not transferred: working-set hits, entries that are fetched for another
            sequence, and padding.
        hits: Number of entries found in the working set.
    """

    requested: int
    selected: torch.Tensor
    rows: torch.Tensor
    hits: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.selected, self.rows, self.hits


class PendingFetch(Protocol):
    """A pending fetch of KV."""

    @property
    def bytes(self) -> int:
        """Size in bytes of the requested KV that is not resident.

        This KV is transferred, except for the entries in `savings`.
        """
        ...

    @property
    def savings(self) -> Savings | None:
        """Numbers of KV entries that need no transfer, valid after `wait`. None if all entries are transferred."""
        ...

    def wait(self) -> list[KVPart]:
        """Return the fetched KV on the device, as parts.

        The compute stream waits for the copies. On CUDA, the host does not wait for them.

        For `fetch`, the parts contain all KV that the layer attends to, each token once: sinks, recent tokens and
        selected tokens. For a dense layer (one that attends to all tokens), the order is arbitrary. The parts include
        the newest token, so `append` must be called for the layer before `wait`. For `fetch_more`, the parts contain
        only the additional tokens.

        Parts with selected tokens are valid until the next `wait` of a fetch that was started by the same method. Parts
        without a selection (`fetch_range`, or `fetch` of all candidates) are valid while they are referenced.
        """
        ...


class KVStorage(Protocol):
    """Stores new KV of open sequences.

    All KV is written to the pool, and part of it also stays on the device (resident).
    """

    def open(self, blocks: BlockTable, sinks: int, recent: int, origin: BlockTable | None = None) -> None:
        """Open a sequence. Its first `sinks` and last `recent` tokens stay on the device.

        If `origin` is not None, the data on the device is copied from the open sequence with this block table. That
        sequence must have the same tokens, sinks and window.
        """
        ...

    def close(self, blocks: BlockTable) -> None:
        """Close a sequence and free its resident KV."""
        ...

    def settle(self, blocks: BlockTable) -> None:
        """Wait until all appended KV is in the pool. Must be called before blocks are shared with another sequence."""
        ...

    def append(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        """Store new k and v `[Hkv, m, d]` in the slots [start, start + m).

        KV of resident tokens also stays on the device. KV is written back to the pool asynchronously if the token has a
        slot in the layer.

        Returns:
            The bytes written back.
        """
        ...

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Copy the KV entry in pool slot `source` to pool slot `target`, between steps.

        Return when the copy is complete.
        """
        ...

    def displace(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Copy the resident KV entry in slot `source` to pool slot `target`, within a step.

        The copy is ordered with the layer's fetches and appends. The entry's token leaves the recent window, and the
        next `append` overwrites its slot. The default implementation calls `move`, because all KV is in the pool as
        well.
        """
        self.move(blocks, layer, source, target)

    def prefill_layer(self, blocks: BlockTable, layer: int, start: int, slices: Iterable[KVPart]) -> PrefilledLayer:
        """Store K and V of the tokens from `start` on, passed as slices in token order. Return the KV of the layer.

        Each slice is written back to the pool as soon as the iterator yields it. In a sliding-window layer, only tokens
        with slots are written. KV of tokens that will be resident also stays on the device.
        """
        ...

    def extend_layer(self, blocks: BlockTable, layer: int, start: int, new: KVPart) -> PrefilledLayer:
        """Store KV of a few new tokens and return the KV of the layer, like `prefill_layer`.

        If earlier KV is read in place and is not contiguous with the new KV, it is returned in `past`.
        """
        return self.prefill_layer(blocks, layer, start, [new])


class RowFetch(Protocol):
    """Fetches KV of open sequences to the device, one pending fetch per sequence."""

    def fetch(
        self, blocks: BlockTable, layer: int, visible: VisibleTokens, selection: Selection | None
    ) -> PendingFetch:
        """Start fetching the selected candidates, or all candidates if `selection` is None.

        Resident tokens are not transferred. If the selection has counts, the selected KV is a separate part with the
        same counts.
        """
        ...

    def fetch_range(self, blocks: BlockTable, layer: int, tokens: range) -> PendingFetch:
        """Start fetching all KV of `tokens`, resident or not.

        The result can be used for all sequences that share these blocks.
        """
        ...

    def fetch_together(
        self,
        block_tables: Sequence[BlockTable],
        layer: int,
        visible: Sequence[VisibleTokens],
        selections: Sequence[Selection],
    ) -> list[PendingFetch]:
        """Start one fetch per sequence. Each fetch returns all selected KV of its sequence.

        KV in shared blocks that several sequences select is transferred only once. The first of their fetches transfers
        it, and the other fetches count it in `savings`.
        """
        each = zip(block_tables, visible, selections, strict=True)
        return [self.fetch(blocks, layer, seen, selection) for blocks, seen, selection in each]

    def fetch_more(self, blocks: BlockTable, layer: int, extra: Selection) -> PendingFetch:
        """Start fetching `extra`, the tokens that a repair selects in addition to the tokens of an earlier fetch."""
        ...


class BatchedRows(Protocol):
    """Fetches KV of whole batches, for selections whose counts stay on the device."""

    def row_lists(self, batch: int, tokens: int) -> RowLists:
        """Create lists for `batch` sequences of up to `tokens` tokens.

        `RowLists.hold` assigns sequences to them in each step.
        """
        ...


class Transfer(Protocol):
    """Transfers the KV of any number of sequences. Not thread-safe; each engine has its own object."""

    @property
    def storage(self) -> KVStorage:
        """The part that stores new KV."""
        ...

    @property
    def rows(self) -> RowFetch:
        """The part that fetches KV of single sequences."""
        ...

    @property
    def batched(self) -> BatchedRows | None:
        """The part that fetches KV of whole batches; None if batched fetches are not supported."""
        ...

    @property
    def device_bytes(self) -> int:
        """Size in bytes of the KV of all open sequences on the device: resident KV and working sets.

        On a CPU, the size includes scratch buffers.
        """
        ...

    def working_set_bytes(self, blocks: BlockTable) -> int:
        """Return the size in bytes of a sequence's working set, including its tables; 0 if there is no working set."""
        ...

    def check_integrity(self) -> None:
        """Wait for all transfers. Then assert that KV on the device equals the KV in the pool."""
        ...
