"""Interface of KV transfers between the host pool and the compute device.

It has three parts, and callers depend only on the part that they need. `KVStorage` stores new KV, `RowFetch` fetches KV
of single sequences, and `BatchedRows` fetches KV of whole batches, for which counts stay on the device.

All byte counts assume separate device memory. On a CPU, where KV is read in place, they are the same as on CUDA.
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
        kv: Contiguous K and V of the tokens [first, stop): all tokens or, in a sliding-window layer, those in the
            windows of the new tokens.
        first: The first token of `kv`.
        bytes_to_device: Bytes of KV before the new tokens that were copied to the device.
        bytes_to_host: Bytes of new KV written back.
        past: KV of earlier visible tokens, as parts in token order. It can be iterated over once. It is used if KV is
            on disk, or if KV is read in place and is not contiguous.
    """

    kv: KVPart
    first: int
    bytes_to_device: int
    bytes_to_host: int
    past: Sequence[KVPart] = ()

    def joined(self) -> PrefilledLayer:
        """Return the layer with `past` and `kv` concatenated."""
        return replace(self, kv=join([*self.past, self.kv]), first=0, past=()) if self.past else self


def join(parts: Sequence[KVPart]) -> KVPart:
    """Concatenate parts along the tokens. A single part is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    return KVPart(torch.cat([part.k for part in parts], dim=1), torch.cat([part.v for part in parts], dim=1))


@dataclass(frozen=True)
class Savings:
    """KV entries of a pending fetch that need no transfer. An entry is K and V of one token and KV head.

    The counts are on the device (int64 scalars).

    Attributes:
        requested: Number of requested entries, including padding.
        selected: Number of entries that are selected.
        rows: Number of entries that are not transferred: working-set hits, entries that were fetched for another
            sequence already, and padding.
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
        """Size in bytes of requested KV that is not resident. All of it except `savings` is transferred."""
        ...

    @property
    def savings(self) -> Savings | None:
        """The KV entries that need no transfer, valid after `wait`; None if there cannot be any."""
        ...

    def wait(self) -> list[KVPart]:
        """Return the KV on the device. The compute stream waits for the copies; on CUDA, the host does not.

        For `fetch`, the parts are all KV that the layer attends to, each token once: sinks, recent, selected (in any
        order for a dense layer). They include the newest token, so `append` of the layer must come first. For
        `fetch_more`, they are the additional tokens only.

        Parts of a selection are valid until the next `wait` of a fetch from the same method. Parts without a selection
        (`fetch_range`, or `fetch` of all candidates) are valid while they are referenced.
        """
        ...


class KVStorage(Protocol):
    """Stores new KV of open sequences. All KV is written to the pool, and part of it stays resident on the device."""

    def open(self, blocks: BlockTable, sinks: int, recent: int, origin: BlockTable | None = None) -> None:
        """Open a sequence. Its first `sinks` and last `recent` tokens stay on the device.

        `origin` is an open block table with the same tokens, sinks and window. Its data on the device is copied.
        """
        ...

    def close(self, blocks: BlockTable) -> None:
        """Close a sequence and drop its resident KV."""
        ...

    def settle(self, blocks: BlockTable) -> None:
        """Wait until all appended KV is in the pool. Call it before sharing blocks with another sequence."""
        ...

    def append(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        """Store new k, v `[Hkv, m, d]` of the slots [start, start + m).

        Resident tokens stay on the device. Tokens with slots in the layer are written back asynchronously.

        Returns:
            The bytes written back.
        """
        ...

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Copy the KV entry in slot `source` of the pool to slot `target`, between steps. Returns when it is done."""
        ...

    def displace(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Copy the resident KV entry in slot `source` to slot `target` of the pool, within a step.

        The copy is ordered with the fetches and appends of the layer. The entry leaves the window, and the next
        `append` overwrites it. The default implementation calls `move`, because the pool already holds all KV.
        """
        self.move(blocks, layer, source, target)

    def prefill_layer(self, blocks: BlockTable, layer: int, start: int, slices: Iterable[KVPart]) -> PrefilledLayer:
        """Store K and V of tokens [start, ...), given as slices in token order, and return the KV of the layer.

        Each slice is written back when it arrives (in a sliding-window layer, tokens with slots only). Tokens that will
        be resident stay on the device.
        """
        ...

    def extend_layer(self, blocks: BlockTable, layer: int, start: int, new: KVPart) -> PrefilledLayer:
        """Like `prefill_layer`, for a few new tokens.

        If earlier KV is read in place and is not contiguous with the new KV, it is returned in `past`.
        """
        return self.prefill_layer(blocks, layer, start, [new])


class RowFetch(Protocol):
    """Fetches KV of open sequences to the device, one pending fetch per sequence."""

    def fetch(
        self, blocks: BlockTable, layer: int, visible: VisibleTokens, selection: Selection | None
    ) -> PendingFetch:
        """Start fetching the selected candidates, or all candidates if `selection` is None.

        Resident tokens are not transferred. The KV of a selection with counts is a separate part with the same counts.
        """
        ...

    def fetch_range(self, blocks: BlockTable, layer: int, tokens: range) -> PendingFetch:
        """Start fetching all KV of `tokens`, resident or not, for all sequences that share these blocks."""
        ...

    def fetch_together(
        self,
        block_tables: Sequence[BlockTable],
        layer: int,
        visible: Sequence[VisibleTokens],
        selections: Sequence[Selection],
    ) -> list[PendingFetch]:
        """Start a fetch for each sequence, transferring KV that several sequences select from shared blocks once.

        In all but the first fetch, such KV is part of `savings`. Each fetch still returns all KV of its sequence.
        """
        each = zip(block_tables, visible, selections, strict=True)
        return [self.fetch(blocks, layer, seen, selection) for blocks, seen, selection in each]

    def fetch_more(self, blocks: BlockTable, layer: int, extra: Selection) -> PendingFetch:
        """Start fetching `extra`, the additional tokens of a repair. An earlier fetch contains the other tokens."""
        ...


class BatchedRows(Protocol):
    """Fetches KV of whole batches, for selections whose counts stay on the device."""

    def row_lists(self, batch: int, tokens: int) -> RowLists:
        """Create lists of `batch` sequences of up to `tokens` tokens, to be bound by `RowLists.hold` before a step."""
        ...


class Transfer(Protocol):
    """Transfers KV of any number of sequences. Not thread-safe; each engine has a separate one."""

    @property
    def storage(self) -> KVStorage:
        """Stores new KV."""
        ...

    @property
    def rows(self) -> RowFetch:
        """Fetches KV of single sequences."""
        ...

    @property
    def batched(self) -> BatchedRows | None:
        """Fetches KV of whole batches; None if batches are not supported."""
        ...

    @property
    def device_bytes(self) -> int:
        """Size in bytes of resident KV and working sets, over all open sequences; on a CPU also of scratch buffers."""
        ...

    def working_set_bytes(self, blocks: BlockTable) -> int:
        """Return the size in bytes of a sequence's working set, tables included; 0 without working sets."""
        ...

    def check_integrity(self) -> None:
        """Assert that data on the device equals that in the pool. Waits for all transfers."""
        ...
