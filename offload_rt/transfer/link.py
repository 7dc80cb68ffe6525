"""The contract of the link, which moves rows between the host pool and the compute device and says how many bytes.

It has three parts, and whoever uses it is typed on the part that it needs: `KVStorage` takes new rows in, `RowFetch`
brings rows of single sequences, `BatchedRows` those of whole batches, where counts stay on the device.

What is counted is what must cross on a machine whose device memory is its own: on the CPU, where rows are attended in
place, the same numbers appear as on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..core import BlockTable, KVPart, Selection, Visible
from .row_lists import RowLists


@dataclass(frozen=True)
class PrefilledLayer:
    """K and V of tokens [first, stop) of one layer, contiguous, valid until the next layer is taken: all, or of a
    sliding layer those that the new tokens' windows show; and what crossed the link for them: rows before `start` that
    had to be loaded, new rows written back. past: the tokens before `first` that the layer sees besides, as parts in
    token order, to be gone through once; where rows lie on disk, or are read in place and are several runs."""

    kv: KVPart
    first: int
    bytes_to_device: int
    bytes_to_host: int
    past: Sequence[KVPart] = ()

    def joined(self) -> PrefilledLayer:
        """The same with `past` in front of the other rows, in one piece."""
        return replace(self, kv=join([*self.past, self.kv]), first=0, past=()) if self.past else self


def join(parts: Sequence[KVPart]) -> KVPart:
    """The rows of all parts in order, of one part the part itself."""
    if len(parts) == 1:
        return parts[0]
    return KVPart(torch.cat([part.k for part in parts], dim=1), torch.cat([part.v for part in parts], dim=1))


@dataclass(frozen=True)
class Savings:
    """Which of the `asked` rows of a ticket (K and V of one token and KV head) need not cross the link, counted on the
    device (int64 without axes). `selected`: rows that were really selected, of the `asked` there is room for. `rows`:
    all that do not cross, those that were not selected included. `hits`: those of them that the working set has; the
    others are fetched for another sequence already."""

    asked: int
    selected: torch.Tensor
    rows: torch.Tensor
    hits: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that is on the device."""
        return self.selected, self.rows, self.hits


class Ticket(Protocol):
    """Rows on their way to the device."""

    @property
    def bytes(self) -> int:
        """Bytes of the rows that were asked for and are not resident: they cross the link, but for `savings`."""
        ...

    @property
    def savings(self) -> Savings | None:
        """What of it does not cross, valid like the rows after `wait`; None where nothing can be saved."""
        ...

    def wait(self) -> list[KVPart]:
        """The rows, on the device. Of `fetch`: everything the layer attends to for this sequence, each token once, in
        the order sinks, recent, selected (dense: in any order), the newest token included, so `append` of the layer
        must come first. Of `fetch_more`: its rows only. Orders the compute stream behind the copies and never blocks
        the host on CUDA. The parts of a selection are valid until the next `wait` of a ticket from the same method,
        those of everything (`fetch` without a selection, `fetch_range`) for as long as they are held."""
        ...


class KVStorage(Protocol):
    """Takes new rows of open sequences: some stay resident on the device, all are written to the pool."""

    def open(self, blocks: BlockTable, sinks: int, recent: int, origin: BlockTable | None = None) -> None:
        """A sequence starts; `sinks` and `recent` of its tokens stay resident. `origin`: an open block table with the
        same tokens, sinks and window; what of these is on the device is copied there."""
        ...

    def close(self, blocks: BlockTable) -> None:
        """A sequence ends; its resident rows are dropped."""
        ...

    def settle(self, blocks: BlockTable) -> None:
        """Waits until everything appended is in the pool: before its chunks are shared with another sequence."""
        ...

    def append(self, blocks: BlockTable, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> int:
        """New rows k, v `[Hkv, m, d]` in the slots [start, start + m): the resident ones stay, all that the layer has
        slots for are written back to the pool asynchronously. Returns the bytes written back."""
        ...

    def move(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Between steps: the row in slot `source` replaces the one in slot `target` of the pool, by when this
        returns."""
        ...

    def displace(self, blocks: BlockTable, layer: int, source: int, target: int) -> None:
        """Within a step: the row in slot `source`, resident until now, replaces the one in slot `target` of the pool,
        in the order of the layer's fetches and appends: it leaves the window, and the next `append` takes its place."""
        ...

    def prefill_layer(self, blocks: BlockTable, layer: int, start: int, slices: Iterable[KVPart]) -> PrefilledLayer:
        """Takes K and V of tokens [start, ...) slice by slice, in token order, writes each back as it comes (of a
        sliding layer what there are slots for), keeps those that will be resident, and returns the rows of the layer,
        on the device."""
        ...

    def extend_layer(self, blocks: BlockTable, layer: int, start: int, new: KVPart) -> PrefilledLayer:
        """As `prefill_layer` for a few tokens: where rows before them are read in place, those that are not one run
        with them are the `past`."""
        ...


class RowFetch(Protocol):
    """Brings rows of open sequences to the device, a ticket for each sequence."""

    def fetch(self, blocks: BlockTable, layer: int, visible: Visible, selection: Selection | None) -> Ticket:
        """Starts moving the selected candidates (None: all of them). Resident rows cost nothing. Of a selection with
        counts the rows are a part of their own, with the same counts."""
        ...

    def fetch_range(self, blocks: BlockTable, layer: int, tokens: range) -> Ticket:
        """Starts moving all rows of `tokens`, resident or not, for all sequences that hold the same chunks."""
        ...

    def fetch_together(
        self,
        block_tables: Sequence[BlockTable],
        layer: int,
        visible: Sequence[Visible],
        selections: Sequence[Selection],
    ) -> list[Ticket]:
        """Like `fetch` of each, but rows of shared chunks that several selected cross once: in all but the first one's
        ticket they are savings. Each ticket still gives its own sequence's rows and no others."""
        ...

    def fetch_more(self, blocks: BlockTable, layer: int, extra: Selection) -> Ticket:
        """Starts moving rows that a repair asks for, in addition to a ticket's."""
        ...


class BatchedRows(Protocol):
    """Brings rows of whole batches, for selections whose counts stay on the device."""

    def row_lists(self, batch: int, tokens: int) -> RowLists:
        """Lists of `batch` sequences of up to `tokens` tokens each; before a step `RowLists.hold` says which."""
        ...


class Link(Protocol):
    """Moves rows for any number of sequences. Not thread-safe: one engine, one link."""

    @property
    def storage(self) -> KVStorage:
        """Takes new rows in."""
        ...

    @property
    def rows(self) -> RowFetch:
        """Brings rows of single sequences."""
        ...

    @property
    def batched(self) -> BatchedRows | None:
        """Brings rows of whole batches; None where rows are attended to where they lie."""
        ...

    @property
    def device_bytes(self) -> int:
        """Bytes of resident rows, working sets and staging buffers that a device of its own holds for all open
        sequences."""
        ...

    def working_set_bytes(self, blocks: BlockTable) -> int:
        """Bytes of the working set of a sequence, its tables included."""
        ...

    def check_integrity(self) -> None:
        """Asserts that what is on the device for open sequences is what the pool has. Waits for everything."""
        ...
