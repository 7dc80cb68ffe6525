"""Interface of KV transfers between the host pool and the compute device.

`KVStorage` stores new KV. `RowFetch` fetches KV for single sequences, and `BatchedRows` for a whole batch.

All byte counts assume that the device has separate memory. On a CPU, where KV is read in place, they are computed too.
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
    """KV of one layer during prefill, valid until the sequence is prefilled further or closed.

    Attributes:
        kv: Contiguous K and V of the tokens from `first` on. For a sliding-window layer, `kv` contains only tokens that
            a new token attends to.
        first: Index of the first token in `kv`.
        bytes_to_device: Size in bytes of the earlier tokens' KV that was copied to the device.
        bytes_to_host: Size in bytes of the new KV that was written back to the pool.
        past: Parts with the KV of earlier tokens, in token order. This list is only used if KV is on disk, or if KV is
            read in place and is not contiguous. Each access to a part on disk reads it again.
    """

    kv: KVPart
    first: int
    bytes_to_device: int
    bytes_to_host: int
    past: Sequence[KVPart] = ()

    def joined(self) -> PrefilledLayer:
        """Return this layer with all KV joined in `kv` and an empty `past`."""
        return replace(self, kv=join([*self.past, self.kv]), first=0, past=()) if self.past else self


def join(parts: Sequence[KVPart]) -> KVPart:
    """Concatenate parts along the token axis. A single part is returned unchanged."""
    if len(parts) == 1:
        return parts[0]
    k = torch.cat([part.k for part in parts], dim=1)
    same = all(part.v is part.k for part in parts)  # keys contain the values
    return KVPart(k, k if same else torch.cat([part.v for part in parts], dim=1))


@dataclass(frozen=True)
class Savings:
    """Counts of KV entries in a fetch, as int64 scalars on the device. An entry is K and V of one token and KV head.

    Attributes:
        requested: Number of requested entries, including padding.
        selected: Number of requested entries, excluding padding.
        not_transferred: Number of requested entries that need no transfer because they are hits, padding, or already
            fetched for another sequence.
        hits: Number of requested entries that were found in the working set.
    """

    requested: int
    selected: torch.Tensor
    not_transferred: torch.Tensor
    hits: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.selected, self.not_transferred, self.hits


class PendingFetch(Protocol):
    """A pending fetch of KV for one sequence."""

    @property
    def bytes(self) -> int:
        """Size in bytes of the requested KV that is not resident. Part of it may need no transfer (see `savings`)."""
        ...

    @property
    def savings(self) -> Savings | None:
        """Counts of the entries that need no transfer, or None if all are transferred. Valid only after `wait`."""
        ...

    @property
    def copied_tokens(self) -> int | None:
        """Number of tokens that are read from block copies on the device. `bytes` does not include them.

        None if there are no block copies. Also None for fetches of selected tokens, which `savings` counts.
        """
        ...

    def wait(self) -> list[KVPart]:
        """Return the fetched KV on the device, as parts. On CUDA, the compute stream waits, but the host does not.

        For `fetch`, each token that the layer attends to is in exactly one part, and the order is arbitrary. The parts
        include the newest token, so call `append` for the layer before `wait`. For `fetch_more`, the parts contain only
        the additional tokens.

        Parts with selected tokens are valid until `wait` is called for the next fetch by the same method. All other
        parts are valid while they are referenced.
        """
        ...


class KVStorage(Protocol):
    """Stores new KV of open sequences in the pool, and keeps the KV of resident tokens on the device as well."""

    def open(self, blocks: BlockTable, sinks: int, recent: int, origin: BlockTable | None = None) -> None:
        """Open a sequence. Its first `sinks` and last `recent` tokens stay on the device.

        `origin` can be the block table of an open sequence with the same tokens, sinks and window. In this case, its
        device data is copied.
        """
        ...

    def close(self, blocks: BlockTable) -> None: ...

    def reload(self, blocks: BlockTable, sinks: int, recent: int) -> None:
        """Copy the resident KV from the pool again. The default implementation closes and reopens the sequence."""
        self.close(blocks)
        self.open(blocks, sinks, recent)

    def settle(self, blocks: BlockTable) -> None:
        """Wait until all appended KV is in the pool. Call this before other sequences share the blocks."""
        ...

    def append(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        """Store new k and v `[Hkv, m, d]` in the slots [start, start + m).

        The KV is written to the pool asynchronously, and the KV of resident tokens also stays on the device.
        Sliding-window layers store only the tokens in their window. Return the size in bytes of the KV that is written
        to the pool.
        """
        ...

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Copy the KV entry in pool slot `source` to pool slot `target`, and wait for the copy. Call between steps."""
        ...

    def displace(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Copy the resident KV entry of slot `source` to pool slot `target`. This can be called during a step.

        It is used for a token that leaves the recent window, before the next `append` overwrites its resident KV. The
        copy is ordered relative to the layer's fetches and appends. The default implementation calls `move`.
        """
        self.move(blocks, layer, source, target)

    def prefill_layer(self, blocks: BlockTable, layer: int, start: int, slices: Iterable[KVPart]) -> PrefilledLayer:
        """Store K and V of the tokens from `start` on, and return the KV of the layer.

        `slices` contains the new KV in token order. The write of each slice starts before the next slice is requested
        from the iterator. The KV of resident tokens also stays on the device.
        """
        ...

    def extend_layer(self, blocks: BlockTable, layer: int, start: int, new: KVPart) -> PrefilledLayer:
        """Store the KV of a few new tokens, and return the KV of the layer as `prefill_layer` does."""
        return self.prefill_layer(blocks, layer, start, [new])


class RowFetch(Protocol):
    """Fetches KV of open sequences to the device. Each fetch is for one sequence."""

    def fetch(
        self, blocks: BlockTable, layer: int, visible: VisibleTokens, selection: Selection | None
    ) -> PendingFetch:
        """Start fetching the selected candidates, or all candidates if `selection` is None.

        Resident tokens are not transferred. If `selection.counts` is not None, the selected KV is returned as a
        separate part with these counts.
        """
        ...

    def fetch_range(self, blocks: BlockTable, layer: int, tokens: range) -> PendingFetch:
        """Start fetching all KV of `tokens`, including resident tokens.

        The result is valid for all sequences that share the blocks of these tokens.
        """
        ...

    def fetch_together(
        self,
        block_tables: Sequence[BlockTable],
        layer: int,
        visible: Sequence[VisibleTokens],
        selections: Sequence[Selection],
    ) -> list[PendingFetch]:
        """Start one fetch per sequence, each for all KV that the sequence selects.

        KV that several sequences select from shared blocks is transferred only once, by the first fetch that needs it.
        The other fetches count it in `savings`.
        """
        each = zip(block_tables, visible, selections, strict=True)
        return [self.fetch(blocks, layer, seen, selection) for blocks, seen, selection in each]

    def fetch_more(self, blocks: BlockTable, layer: int, extra: Selection) -> PendingFetch:
        """Start fetching the tokens `extra`, which the layer has selected in addition to those of an earlier fetch."""
        ...


class BatchedRows(Protocol):
    """Fetches KV for a whole batch without the host knowing how many tokens are selected."""

    def row_lists(self, batch: int, tokens: int) -> RowLists: ...

    def on_device(self, block_tables: Sequence[BlockTable]) -> bool:
        """Return whether all blocks have copies on the device, in the model's dtype.

        `RowLists.hold` loads layers that copies lack.
        """
        ...


class Transfer(Protocol):
    """Transfers the KV of any number of sequences. Not thread-safe."""

    storage: KVStorage
    rows: RowFetch
    batched: BatchedRows | None = None
    """Fetches for whole batches, or None if they are not supported."""

    @property
    def device_bytes(self) -> int:
        """Size in bytes of the KV of all open sequences on the device. On a CPU, this includes scratch buffers."""
        ...

    def working_set_bytes(self, blocks: BlockTable) -> int:
        """Return the size in bytes of a sequence's working set; 0 if there is none."""
        return 0

    def loaded_bytes(self, blocks: BlockTable) -> int:
        """Return how many bytes of a sequence's KV were copied to the device outside of fetches."""
        return 0

    def check_integrity(self) -> None:
        """Wait for all transfers. Then assert that KV on the device equals the KV in the pool."""
        ...
